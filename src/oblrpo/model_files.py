"""Whether settings and files say which model there is, and hold all of it; found without torch.

What files lack, libraries make up at random and train on.
"""

import importlib.util
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from oblrpo.errors import InputError, nearby, pip_install
from oblrpo.objects import PREFIX
from oblrpo.settings import PolicyConfig

ADAPTER = "adapter_config.json"
OF_RECIPES = "models/"  # where they keep what they fetch
FETCH = " A recipe's first lines say how to fetch its model."
LOCAL = ("/", "./", "../", "~", OF_RECIPES, "runs/")  # how names begin that none on the hub has


@contextmanager
def explained(what: str, hint: str = ".") -> Iterator[None]:
    """Refuse in one sentence, `what` and the reason, where a library raises anything: they raise many kinds."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {reason(error)}{hint}") from error


def reason(error: Exception) -> str:
    """What a library says went wrong, in one line without pydantic's words before it and without a full stop."""
    return " ".join(str(error).split()).rpartition(" Value error, ")[2][:300].rstrip(".") or type(error).__name__


def is_gguf(name: str) -> bool:
    """Return whether a model's name is that of a GGUF file, there or not."""
    return name.lower().endswith(".gguf") and not Path(name).is_dir()


def base_of(folder: str) -> str | None:
    """Return the model that the adapters in a folder belong to, or None if the folder holds no adapters."""
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


def check_is_there(name: str) -> None:
    """Say at once that a local model is not there, where transformers would look for it on the hub, or never ends."""
    path = Path(name)
    is_local = name.startswith(LOCAL) or (len(path.parts) > 1 and path.parent.is_dir())
    if (is_local or is_gguf(name)) and not path.exists():
        raise InputError(
            f"cannot load the model {name!r}: there is no such file or folder; check the path, or give a name on the "
            f"hub.{FETCH if name.startswith(OF_RECIPES) else nearby(path)}"
        )
    for file in path.iterdir() if path.is_dir() else [path]:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise InputError(
                f"cannot load the model {name!r}: {file.name} is a pipe, a socket or a device, not a regular file."
            )


def check_complete(
    name: str, missing: Collection[str], other_shapes: Collection[tuple[str, object, object]] = ()
) -> None:
    """Refuse a model or adapters whose files lack a weight, or hold (name, shape in the file, shape of the model)."""
    if missing:
        many = "1 weight" if len(missing) == 1 else f"{len(missing)} weights"
        raise InputError(f"cannot load the model {name!r}: its files lack {many}, as {min(missing)}; fetch them again.")
    if other_shapes:
        weight, *shapes = min(other_shapes, key=lambda row: row[0])
        there, needed = (tuple(shape) if isinstance(shape, (list, tuple)) else shape for shape in shapes)
        raise InputError(
            f"cannot load the model {name!r}: {weight} has the shape {there}, but its config needs {needed}; "
            "fetch config and weights again, from one place."
        )


def check_policy(config: PolicyConfig) -> None:
    """Refuse what does not go together; what a loaded model allows is checked by `adopt_policy`."""
    if config.lora and not config.adapters.r > 0:
        raise InputError(f"lora is {config.lora}; give the adapters' rank r, at least 1, such as '{{r: 16}}'.")
    if config.model.startswith(PREFIX):
        return
    adapters = config.lora or (config.model and base_of(config.model))
    if adapters and not config.model:
        raise InputError("lora needs a model to adapt; name one with model.")
    if config.lora and config.model and base_of(config.model):
        raise InputError(
            f"{config.model!r} holds adapters, which are trained on; leave out lora, or merge "
            "them first (oblrpo export --merge)."
        )
    if config.load_in_4bit and not adapters:
        raise InputError("load_in_4bit leaves no weight that could be trained; add adapters with lora.")
    if config.load_in_4bit and is_gguf(base_of(config.model) or config.model):
        raise InputError("load_in_4bit cannot quantise a GGUF file; leave it out, or give a folder of safetensors.")
    if config.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(f"load_in_4bit needs bitsandbytes; install it with: {pip_install('qlora')}")
    if config.dtype == "bfloat16" and not adapters:
        raise InputError(
            "weights in bfloat16 lose updates smaller than 1/256 of them; train in float32 with bf16 arithmetic "
            "(bf16: true), or train adapters beside them (lora)."
        )
