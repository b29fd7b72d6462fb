"""Whether files held all of a model: what they lack, libraries make up at random and train on."""

from __future__ import annotations

from collections.abc import Collection

from oblrpo.errors import InputError


def check_whole(name: str, missing: Collection[str], other_shapes: Collection[tuple[str, object, object]] = ()) -> None:
    """Refuse what was loaded from files that do not hold every weight of it.

    Args:
        name: the model or the adapters, as they were asked for.
        missing: the weights that were not in the files.
        other_shapes: weights that were there in another shape: name, shape in the file, shape of the model.

    Raises:
        InputError: names the first weight.
    """
    if missing:
        many = "1 weight" if len(missing) == 1 else f"{len(missing)} weights"
        raise InputError(f"cannot load the model {name!r}: its files lack {many}, as {min(missing)}; fetch them again.")
    if other_shapes:
        weight, there, needed = min(other_shapes, key=lambda each: each[0])
        shapes = [tuple(shape) if isinstance(shape, (list, tuple)) else shape for shape in (there, needed)]
        raise InputError(
            f"cannot load the model {name!r}: {weight} has the shape {shapes[0]}, where its config asks for "
            f"{shapes[1]}; fetch config and weights again, from one place."
        )
