"""Low-rank adapters by PEFT: a few trained parameters beside a model that stays as it is."""

from __future__ import annotations

import importlib
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError
from oblrpo.policy.files import check_complete
from oblrpo.settings import PolicyConfig

ADAPTER = "adapter_config.json"


def add_adapter(model: Any, config: PolicyConfig) -> Any:
    """Return the model with new adapters in float32, which alone are trained.

    The adapters have no dropout, because sampler and trainer must agree.

    Raises:
        InputError: PEFT is not installed, or refuses the settings.
    """
    peft, made = _peft(), config.adapters
    lora = peft.LoraConfig(
        r=made.r,
        lora_alpha=made.alpha,
        target_modules=list(made.target_modules) or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            _ignore_patterns()
            return peft.get_peft_model(model, lora)
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"PEFT refuses the adapter: {' '.join(str(error).split())[:300]}") from None


def _ignore_patterns() -> None:
    """Leave out PEFT's warning that patterns fit no module: of experts it writes such patterns itself."""
    warnings.filterwarnings("ignore", message="The following .*_pattern keys", category=RuntimeWarning)


def without_adapters(model: Any) -> Any:
    """Return the model itself, where PEFT's stands around it; LoRA lives in its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def base_of(folder: str) -> str | None:
    """Return the model that the adapters in a folder belong to, or None if the folder holds no adapters.

    Raises:
        InputError: the adapters are damaged, or do not name their model.
    """
    file = Path(folder) / ADAPTER
    if not file.is_file():
        return None
    try:
        base = dict(json.loads(file.read_text(encoding="utf-8"))).get("base_model_name_or_path")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} is damaged: {error}.") from None
    if not base:
        raise InputError(f"{file} does not say which model the adapters belong to (base_model_name_or_path).")
    return str(base)


def load_adapter(model: Any, folder: str) -> Any:
    """Return the model with the adapters of a folder, ready to be trained on.

    Raises:
        InputError: PEFT is not installed, the adapters do not fit the model, or a weight of them is missing.
    """
    peft = _peft()
    try:
        with warnings.catch_warnings():
            _ignore_patterns()
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # refused below
            adapted = peft.PeftModel.from_pretrained(model, folder, is_trainable=True, use_safetensors=True)
        _read_weights(adapted, folder)
    except InputError:
        raise
    except Exception as error:  # PEFT raises many kinds
        raise InputError(f"cannot load the adapters in {folder}: {' '.join(str(error).split())[:300]}") from error
    return adapted


def load_adapter_weights(model: Any, folder: Path) -> None:
    """Give a PEFT model the weights of the adapters in a folder, which must hold all of them."""
    _peft().set_peft_model_state_dict(model, _read_weights(model, str(folder)))


def _read_weights(model: Any, folder: str) -> dict[str, Any]:
    """Return the adapters' weights in a folder, if none is missing.

    Weights of embeddings need not be there: they are saved only where they are trained.
    """
    weights: dict[str, Any] = _peft().load_peft_weights(folder, device="cpu")
    wanted = _peft().get_peft_model_state_dict(model, save_embedding_layers=False)
    check_complete(folder, set(wanted) - weights.keys())
    return weights


def _peft() -> Any:
    if importlib.util.find_spec("peft") is None:
        raise InputError("adapters need PEFT; install it with: pip install 'oblrpo[lora]'")
    return importlib.import_module("peft")
