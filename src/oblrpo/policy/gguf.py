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

from oblrpo.errors import InputError
from oblrpo.policy.whole import check_whole

NEEDED = ("gguf", "accelerate")


def is_gguf(name: str) -> bool:
    """Return whether a model's name is that of a GGUF file, there or not."""
    return name.lower().endswith(".gguf") and not Path(name).is_dir()


def read_gguf_tokenizer(name: str) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template; it pads on the left.

    Raises:
        InputError: the file cannot be read.
    """
    return _reading(name, AutoTokenizer, padding_side="left")


def read_gguf_model(name: str, dtype: torch.dtype, attention: str = "") -> Any:
    """Return the causal LM of a GGUF file, every weight dequantised to `dtype`; its name is the file's whole path.

    transformers refuses to save what it has read from a GGUF, so the weights go into a model of the same config: for
    a moment they are there twice.

    Raises:
        InputError: the file cannot be read, or does not hold all the model's weights.
    """
    plainly = {"quantization_config": config(dequantize=True)} if (config := _dequantising()) else {}
    read, report = _reading(name, AutoModelForCausalLM, dtype=dtype, output_loading_info=True, **plainly)
    check_whole(name, report["missing_keys"])
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    options = {"attn_implementation": attention} if attention else {}
    model = AutoModelForCausalLM.from_config(read.config, dtype=dtype, **options)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    # PEFT looks for a config beside the weights to see if adapters' model has grown tokens; in a file there is none.
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*\.gguf", category=UserWarning)
    # What adapters call the model they belong to; transformers takes the folder that the file lies in.
    model.name_or_path = model.config.name_or_path = str(Path(name).resolve())
    return model


def _dequantising() -> Any:
    """Return transformers' `GgufConfig`, if it has one: else blocks stay packed where there is a kernel for them."""
    return getattr(transformers, "GgufConfig", None)


def _reading(name: str, kind: Any, **options: Any) -> Any:
    """Return what transformers makes of the file.

    Raises:
        InputError: says why it does not.
    """
    path = Path(name)
    failed = f"cannot load the model {name!r}"
    try:
        with path.open("rb") as file:
            begins = file.read(4)
    except OSError as error:
        raise InputError(f"{failed}: {error.strerror}.") from None
    if begins != b"GGUF":
        raise InputError(f"{failed}: it is no GGUF file, for its first bytes are not 'GGUF'.")
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{failed}: a GGUF file needs {package}; install it with: pip install 'oblrpo[gguf]'")
    try:
        with redirect_stderr(io.StringIO()):  # for a progress bar that transformers has no switch for
            return kind.from_pretrained(str(path.parent.resolve()), gguf_file=path.name, **options)
    except Exception as error:  # transformers raises many kinds; a file that was cut off ends in any of them
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise InputError(
            f"{failed}: {reason}; is the file whole, and its architecture one that transformers reads from GGUF?"
        ) from error
