"""Settings by name: flat, from recipes and YAML files, checked against the config's types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib.abc import Traversable
from importlib.resources import files
from os.path import isfile
from pathlib import Path
from typing import Any

from oblrpo.checksums import has_valid_checksum
from oblrpo.errors import InputError, did_you_mean
from oblrpo.settings.annotations import Holds, with_keys
from oblrpo.settings.foreign_settings import hint
from oblrpo.settings.train import TrainConfig
from oblrpo.settings.typed import settings_of, with_fields
from oblrpo.settings.yaml_files import read_yaml_file

RECIPES = files("oblrpo") / "recipes"

IDENTITY = "identity"
"""The key of a run's `config.yaml` for what is not a setting: see `runs.Identity`."""


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Every setting under its flag's name (underscored), without the sections."""
    return {name: _plain(value) for name, value, *_ in settings_of(config)}


def every_value(config: TrainConfig) -> dict[str, Any]:
    """Every setting as `flatten` has it; in the place of a mapping with known keys, each of them as `setting.key`."""
    settings = [each for each in with_keys(config) if not any(isinstance(note, Holds) for note in each.notes)]
    return {name: _plain(value) for name, value, *_ in settings}


def _plain(value: Any) -> Any:
    """Return a value as YAML has it."""
    return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value


def with_settings(
    config: TrainConfig, settings: dict[str, Any], source: str, given: Iterable[str] | None = None
) -> TrainConfig:
    """`config` with the flat settings of `source` replaced; all of them count as given, or those that `given` names."""
    known = flatten(config)
    for key in settings:
        if key not in known:
            raise InputError(
                f"{source}: unknown setting {key!r}; `oblrpo train --help-all` lists all.{hint(str(key), known)}"
            )
    new = {name for name in (settings if given is None else given) if settings.get(name) is not None}
    return dataclasses.replace(with_fields(config, settings, source), given=tuple(sorted({*config.given, *new})))


def flags_in(argv: list[str]) -> dict[str, str]:
    """Name of a setting -> the flag that sets it, of all flags among these words."""
    flags = (word.split("=")[0] for word in argv if word.startswith("--"))
    return {flag[2:].replace("-", "_").removeprefix("no_"): flag for flag in flags}


def load_recipe(name: str, base: TrainConfig) -> TrainConfig:
    """`base` with the settings of a built-in recipe or of a YAML file."""
    path, ours = file_named(name, RECIPES, "recipe")
    return dataclasses.replace(with_file(base, path, () if ours else None), recipe=name)


def with_file(config: TrainConfig, path: Path | Traversable, given: Iterable[str] | None = None) -> TrainConfig:
    """`config` with what a YAML file says; of the `config.yaml` that a run wrote only what was given counts so."""
    settings = read_yaml_file(path)
    if (of_run := settings.pop(IDENTITY, None)) and has_valid_checksum(path.read_text(encoding="utf-8")):
        given = of_run.get("given")
    return with_settings(config, settings, str(path), given)


def recipe_settings(name: str) -> dict[str, Any]:
    """What a built-in recipe or a YAML file says, and nothing else."""
    return settings_in(file_named(name, RECIPES, "recipe")[0])


def file_named(name: str, folder: Traversable, kind: str) -> tuple[Path | Traversable, bool]:
    """A built-in YAML file of a folder by its name, or any file by its path; and whether it is built in."""
    built_in = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    if name in built_in:
        return folder / f"{name}.yaml", True
    if not isfile(name):
        close = did_you_mean(name, built_in)
        raise InputError(f"no {kind} or file {name!r}; the built-in {kind}s are: {', '.join(built_in)}.{close}")
    return Path(name), False


def settings_in(path: Path | Traversable) -> dict[str, Any]:
    """What a YAML file says, which may be the `config.yaml` of a run."""
    return {key: value for key, value in read_yaml_file(path).items() if key != IDENTITY}
