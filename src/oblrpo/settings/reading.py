"""Settings by name: flat, from recipes and YAML files, checked against the config's types."""

from __future__ import annotations

import dataclasses
from importlib.abc import Traversable
from importlib.resources import files
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError
from oblrpo.settings.annotations import Holds, annotations_of
from oblrpo.settings.elsewhere import hint
from oblrpo.settings.train import TrainConfig
from oblrpo.settings.typed import of_mapping, with_fields
from oblrpo.settings.yaml_files import read_yaml_file

RECIPES = files("oblrpo") / "recipes"

IDENTITY = "identity"
"""The key of a run's `config.yaml` under which stands what is no setting: see `runs.Identity`."""


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Every setting under its flag's name (underscored), without the sections."""
    flat: dict[str, Any] = {"recipe": config.recipe}
    for section in dataclasses.fields(config)[1:]:
        flat.update(
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in dataclasses.asdict(getattr(config, section.name)).items()
            }
        )
    return flat


def every_value(config: TrainConfig) -> dict[str, Any]:
    """Every setting as `flatten` has it; in the place of a mapping with known keys, each of them as `setting.key`.

    Raises:
        InputError: such a mapping has an unknown key, or a value of the wrong type.
    """
    values = flatten(config)
    for name, notes in annotations_of(config).items():
        for note in notes:
            if isinstance(note, Holds):
                held = vars(of_mapping(note.kind, values.pop(name), name))
                values |= {f"{name}.{key}": value for key, value in held.items()}
    return values


def with_settings(config: TrainConfig, settings: dict[str, Any], source: str) -> TrainConfig:
    """`config` with the flat settings replaced.

    Raises:
        InputError: an unknown key or a value of the wrong type; `source` says where it stands.
    """
    known = flatten(config)
    for key in settings:
        if key not in known:
            raise InputError(
                f"{source}: unknown setting {key!r}; `oblrpo train --help-all` lists all.{hint(str(key), known)}"
            )
    sections = {
        section.name: with_fields(getattr(config, section.name), settings, source)
        for section in dataclasses.fields(config)[1:]
    }
    return dataclasses.replace(config, recipe=str(settings.get("recipe", config.recipe)), **sections)


def flags_in(argv: list[str]) -> dict[str, str]:
    """Name of a setting -> the flag that sets it, of all flags among these words."""
    flags = (word.split("=")[0] for word in argv if word.startswith("--"))
    return {flag[2:].removeprefix("no-").replace("-", "_"): flag for flag in flags}


def load_recipe(name: str, base: TrainConfig) -> TrainConfig:
    """`base` with the settings of a built-in recipe or of a YAML file.

    Raises:
        InputError: no such recipe or file, not a YAML mapping, an unknown key, a value of the wrong type.
    """
    return with_settings(base, recipe_settings(name) | {"recipe": name}, source=name)


def recipe_settings(name: str) -> dict[str, Any]:
    """What a built-in recipe or a YAML file says, and nothing else.

    Raises:
        InputError: no such recipe or file, or not a YAML mapping.
    """
    built_in = sorted(entry.name.removesuffix(".yaml") for entry in RECIPES.iterdir() if entry.name.endswith(".yaml"))
    path = RECIPES / f"{name}.yaml" if name in built_in else Path(name)
    if not path.is_file():
        raise InputError(f"no recipe or file {name!r}; the built-in recipes are: {', '.join(built_in)}.")
    return settings_in(path)


def settings_in(path: Path | Traversable) -> dict[str, Any]:
    """What a YAML file says, which may be the `config.yaml` of a run.

    Raises:
        InputError: it cannot be read, or is no YAML mapping.
    """
    return {key: value for key, value in read_yaml_file(path).items() if key != IDENTITY}
