"""Whether files hold a model, and all of it: what they lack, libraries make up at random and train on."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from oblrpo.errors import InputError, nearby

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
