"""Low-rank adapters by PEFT: a few trained parameters beside a model that stays as it is."""

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch

from oblrpo.errors import InputError, pip_install
from oblrpo.model_files import check_complete, explained
from oblrpo.settings import PolicyConfig

NOISE = "The following .*_pattern keys|.is_gradient_checkpointing. is deprecated"
"""PEFT's warnings that patterns fit no module (of experts it writes such itself), and that it asks by an old name."""


def add_adapter(model: Any, config: PolicyConfig) -> Any:
    """Return the model with new adapters in float32, which alone are trained; no dropout: the sampler has none."""
    peft, made = _peft(), config.adapters
    lora = peft.LoraConfig(
        r=made.r,
        lora_alpha=made.alpha,
        target_modules=list(made.target_modules) or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with explained("PEFT refuses the adapter"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NOISE)
        return peft.get_peft_model(model, lora)


def without_adapters(model: Any) -> Any:
    """Return the model itself, where PEFT's stands around it; LoRA lives in its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def load_adapter(model: Any, folder: str, train: bool) -> Any:
    """Return the model with the adapters of a folder, ready to be trained on if they are to be."""
    peft = _peft()
    with explained(f"cannot load the adapters in {folder}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NOISE)
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # refused below
        adapted = peft.PeftModel.from_pretrained(model, folder, is_trainable=train, use_safetensors=True)
        _read_weights(adapted, folder)
    return adapted


def load_adapter_weights(model: Any, folder: Path) -> None:
    """Give a PEFT model's active adapter the weights in a folder, which must hold all of them."""
    [name] = model.active_adapters
    _peft().set_peft_model_state_dict(model, _read_weights(model, str(folder), name), name)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the active adapter alone, into the folder itself, where PEFT and transformers look for it."""
    if len(active := model.active_adapters) != 1:
        raise InputError(
            f"the model has {len(active)} active adapters ({', '.join(active)}), but a checkpoint holds one: activate "
            "the one to train with model.set_adapter(NAME)."
        )
    [name] = active
    # On a CPU bitsandbytes' state_dict() repacks the weights, and the policy would be another one after a checkpoint.
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    model.save_pretrained(folder, selected_adapters=[name], state_dict=weights)
    if name != "default":  # others have a folder of their own below
        for file in (folder / name).iterdir():
            file.replace(folder / file.name)
        (folder / name).rmdir()


def merge(model: Any) -> Any:
    """Return the model with its adapters added to its weights.

    A head that is tied to the embedding gets a weight of its own where one of the two has an adapter, or is trained as
    it is: that is of that use alone.
    """
    if model.active_peft_config.is_prompt_learning:
        raise InputError("a learned prompt cannot be merged into weights; export it as it is (without --merge).")
    inner = model.get_base_model()
    ends = inner.get_input_embeddings(), inner.get_output_embeddings()
    if ends[0].weight is ends[1].weight and any(hasattr(end, "base_layer") for end in ends):
        head = ends[1].get_base_layer() if hasattr(ends[1], "base_layer") else ends[1]
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    own = any(hasattr(end, name) for end in ends for name in ("base_layer", "modules_to_save"))
    if own and ends[0].weight is not ends[1].weight:
        for config in (inner.config, inner.config.get_text_config()):
            config.tie_word_embeddings = False
    return model.merge_and_unload()


def _read_weights(model: Any, folder: str, adapter: str = "default") -> dict[str, Any]:
    """Return the adapters' weights in a folder, if all are there; embeddings are saved only where they are trained."""
    weights: dict[str, Any] = _peft().load_peft_weights(folder, device="cpu")
    wanted = _peft().get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    check_complete(folder, set(wanted) - weights.keys())
    return weights


def _peft() -> Any:
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"adapters need PEFT; install it with: {pip_install('lora')}")
    return importlib.import_module("peft")
