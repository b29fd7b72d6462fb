"""Reading a GGUF file, the format of llama.cpp, as a plain model: dequantised, to be trained and saved like any."""

from __future__ import annotations

import importlib.util
import io
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from oblrpo.errors import InputError, pip_install
from oblrpo.policy.files import check_complete, explained

NEEDED = ("gguf", "accelerate")


def read_gguf_tokenizer(name: str) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template."""
    return _read(name, AutoTokenizer)


def read_gguf_model(name: str, dtype: torch.dtype, attention: str = "") -> Any:
    """Return the causal LM of a GGUF file, dequantised to `dtype`; its name is the file's absolute path."""
    options = {"attn_implementation": attention} if attention else {}
    if config := getattr(transformers, "GgufConfig", None):  # blocks would stay packed where there is a kernel for them
        options["quantization_config"] = config(dequantize=True)
    model, report = _read(name, AutoModelForCausalLM, dtype=dtype, output_loading_info=True, **options)
    check_complete(name, report["missing_keys"])
    if quantizer := getattr(model, "hf_quantizer", None):  # which would refuse to save what is in numbers now
        quantizer.remove_quantization_config(model)
    # PEFT looks for a config beside the weights to see if adapters' model has grown tokens; in a file there is none.
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*\.gguf", category=UserWarning)
    # What adapters call the model they belong to; transformers takes the file's folder.
    model.name_or_path = model.config.name_or_path = str(Path(name).resolve())
    return model


def _read(name: str, kind: Any, **options: Any) -> Any:
    """Return what transformers makes of the file; the error says why it does not."""
    path = Path(name)
    failed = f"cannot load the model {name!r}"
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{failed}: a GGUF file needs {package}; install it with: {pip_install('gguf')}")
    hint = "; is the file complete, and its architecture one that transformers reads from GGUF?"
    with explained(failed, hint), redirect_stderr(io.StringIO()):  # for a progress bar that has no switch
        return kind.from_pretrained(str(path.parent.resolve()), gguf_file=path.name, **options)
