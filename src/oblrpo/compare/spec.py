"""What is compared: a YAML file of variants, learning rates and seeds over common settings, checked key by key."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError, did_you_mean
from oblrpo.settings import TrainConfig, load_recipe, read_yaml_file, with_settings

SPECS = files("oblrpo") / "recipes" / "compare"

# They save seldom: a killed run loses some steps.
DEFAULTS: dict[str, Any] = {"save_steps": 20, "save_total_limit": 1}
"""Settings of every run that neither the recipe nor the spec names."""

PLAIN = {
    "about": ("", "text"),
    "search_seeds": (0, "a whole number of at least 0"),
    "share_warm_start": (True, "true or false"),
    "keep_checkpoints": (True, "true or false"),
    "processes": (0, "a whole number of at least 0"),
}
"""Keys of one plain value: the default, which has the type of all values, and what they must be."""

KEYS = ("about", "base", "variants", "learning_rates", "seeds", "reference", "target", *list(PLAIN)[1:])

OURS = {"output": "--output", "seed": "seeds", "recipe": "base"}
"""Settings that the comparison makes itself, and what says them."""

LEVELS = ("of_best", "of_gain", "accuracy")
"""The keys of a target that say where it lies; it has one of them."""

LONGEST_NAME = 100
"""Bytes of a variant's name, which is a part of the names of its folders."""

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Variant:
    """One of the things compared: train settings over the base's, at one or more learning rates."""

    name: str
    settings: dict[str, Any]
    learning_rates: tuple[float, ...]


@dataclass(frozen=True)
class Target:
    """The level that completions are counted to, given in one of three ways."""

    of_best: float | None = None
    """A share of the best variant's end."""
    of_gain: float | None = None
    """A share of the way from where runs begin to the best variant's end."""
    accuracy: float | None = None
    """The level itself."""
    curve: str = "accuracy"
    """The curve that has to reach the level: accuracy (held out) or reward (of the training batches)."""
    window: int = 3
    """Points of the curve in its centred moving average."""


@dataclass(frozen=True)
class Spec:
    """A resolved comparison. Where `search_seeds` is 0, every rate runs on every seed."""

    name: str
    base_config: TrainConfig
    about: str
    base: dict[str, Any]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    search_seeds: int
    reference: str
    target: Target
    share_warm_start: bool
    keep_checkpoints: bool
    processes: int

    def config(self, variant: Variant, rate: float, seed: int, output: str) -> TrainConfig:
        """Return the config of one run.

        Raises:
            InputError: an unknown setting or a value of the wrong type, with the variant's name.
        """
        settings = variant.settings | {"learning_rate": rate, "seed": seed, "output": output}
        return with_settings(self.base_config, settings, f"{self.name}, variant {variant.name!r}")

    def as_mapping(self) -> dict[str, Any]:
        """Return the resolved spec as a file would hold it."""
        mapping = {field.name: getattr(self, field.name) for field in fields(self)} | {
            "variants": {v.name: v.settings | {"learning_rates": list(v.learning_rates)} for v in self.variants},
            "seeds": list(self.seeds),
            "target": {key: value for key, value in asdict(self.target).items() if value is not None},
        }
        return {key: value for key, value in mapping.items() if key in KEYS and (value or key != "about")}


def read_spec(name: str, overrides: dict[str, Any], settings: dict[str, Any]) -> Spec:
    """Read a built-in spec or a YAML file; `overrides` replace its keys, `settings` those of its base.

    `learning_rates` among the overrides replaces the rates of every variant that does not set `learning_rate`.

    Raises:
        InputError: no such spec, an unknown key, a bad value; says where, and how to mend it.
    """
    built_in = sorted(entry.name.removesuffix(".yaml") for entry in SPECS.iterdir() if entry.name.endswith(".yaml"))
    path = SPECS / f"{name}.yaml" if name in built_in else Path(name)
    if not path.is_file():
        raise InputError(f"no comparison or file {name!r}; the built-in comparisons are: {', '.join(built_in)}.")
    raw = read_yaml_file(path)
    source = name if name in built_in else path.name
    _refuse_unknown(raw, KEYS, source)
    variants = _mapping(raw.get("variants"), "variants", source)
    if "learning_rates" in overrides:
        own = [variant for variant in variants.values() if isinstance(variant, dict)]
        if variants and all("learning_rate" in variant for variant in own):
            raise InputError(f"--learning-rates: every variant of {source} sets its learning_rate; change the file.")
        for variant in own:
            variant.pop("learning_rates", None)
    if "target" in overrides:
        changed = _mapping(overrides["target"], "target", "--target")
        _target(changed, "--target")
        replaced = {*changed, *(LEVELS if set(LEVELS) & changed.keys() else ())}  # a level replaces the one before
        target = _mapping(raw.get("target"), "target", source)
        overrides = overrides | {"target": {k: target[k] for k in target if k not in replaced} | changed}
    raw |= overrides
    base = raw.get("base")
    base = {"recipe": base} if isinstance(base, str) else _mapping(base, "base", source)
    recipe = base.get("recipe", "")
    _refuse_ours({key: base[key] for key in base if key != "recipe" or not isinstance(recipe, str)}, f"{source}, base")
    _refuse_ours(settings, "--set")
    raw["base"] = base | settings
    spec = _resolve(raw, source)
    for key in settings:
        hiding = {key, "learning_rates"} if key == "learning_rate" else {key}
        if (key == "learning_rate" and "learning_rates" in raw) or all(
            hiding & (variant or {}).keys() for variant in variants.values()
        ):
            raise InputError(f"--set {key}: every variant of {source} has its own, so that it would change nothing.")
    return spec


def _resolve(raw: dict[str, Any], source: str) -> Spec:
    plain = {}
    for key, (default, words) in PLAIN.items():
        plain[key] = value = raw.get(key, default)
        if type(value) is not type(default) or (type(value) is int and value < 0):
            raise InputError(f"{source}: {key} is {value!r}; it must be {words}.")
    seeds = _seeds(raw.get("seeds", 3), source)
    if plain["search_seeds"] > len(seeds):
        raise InputError(
            f"{source}: search_seeds is {plain['search_seeds']}, more than the {len(seeds)} seeds there are."
        )
    config = with_settings(TrainConfig(), DEFAULTS, source)
    if recipe := raw["base"].get("recipe", ""):
        config = load_recipe(recipe, config)
    config = with_settings(config, {k: v for k, v in raw["base"].items() if k != "recipe"}, f"{source}, base")
    rates = _rates(raw.get("learning_rates", [config.optim.learning_rate]), source)
    named = _mapping(raw.get("variants"), "variants", source).items()
    variants = tuple(_variant(name, settings, rates, source) for name, settings in named)
    if not variants:
        raise InputError(f"{source}: variants is missing; give a mapping of names to train settings.")
    names = [variant.name for variant in variants]
    reference = raw.get("reference", names[0])
    if reference not in names:
        raise InputError(f"{source}: reference is {reference!r}; choose one of: {', '.join(names)}.")
    target = _target(raw.get("target"), source)
    return Spec(source, config, base=raw["base"], variants=variants, seeds=seeds, reference=reference, target=target,
                **plain)  # fmt: skip


def _refuse_unknown(mapping: dict[str, Any], keys: tuple[str, ...], source: str, of: str = "") -> None:
    for key in mapping:
        if key not in keys:
            hint = did_you_mean(str(key), keys)
            raise InputError(f"{source}: unknown key {key!r}{of}; choose from: {', '.join(keys)}.{hint}")


def _refuse_ours(settings: dict[str, Any], source: str) -> None:
    for key, instead in OURS.items():
        if key in settings:
            raise InputError(f"{source}: {key} is not a setting of the runs compared; say {instead} instead.")


def _variant(name: Any, value: Any, rates: tuple[float, ...], source: str) -> Variant:
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+ -]*", name) or len(name.encode()) > LONGEST_NAME:
        raise InputError(
            f"{source}: {name!r:.100} is no name for a variant, for it names a folder; use letters, digits, - _ . + "
            f"(a number in quotes), and at most {LONGEST_NAME} bytes."
        )
    place = f"{source}, variant {name!r}"
    settings = dict(_mapping(value, f"variant {name!r}", source))
    _refuse_ours(settings, place)
    if "learning_rate" in settings:
        if "learning_rates" in settings:
            raise InputError(f"{place}: give learning_rate or learning_rates, not both.")
        settings["learning_rates"] = [settings.pop("learning_rate")]
    if "learning_rates" in settings:
        rates = _rates(settings.pop("learning_rates"), place)
    return Variant(name, settings, rates)


def _rates(value: Any, source: str) -> tuple[float, ...]:
    rates = value if isinstance(value, list) else []
    if not rates or not all(type(rate) in {int, float} and 0 < rate < 1e300 for rate in rates):
        raise InputError(
            f"{source}: learning_rates is {value!r}; give a list of numbers above 0, such as [1e-4, 3e-4]."
        )
    if len({float(rate) for rate in rates}) < len(rates):
        raise InputError(f"{source}: learning_rates is {value!r}; name every rate once.")
    return tuple(sorted(float(rate) for rate in rates))


def _seeds(value: Any, source: str) -> tuple[int, ...]:
    if type(value) is int and value > MOST_SEEDS:
        raise InputError(f"{source}: seeds is more than {MOST_SEEDS:,}.")
    seeds = range(value) if type(value) is int else value if isinstance(value, list) else ()
    if not seeds or not all(type(seed) is int for seed in seeds) or len(set(seeds)) < len(seeds):
        raise InputError(
            f"{source}: seeds is {value!r}; give how many, at least 1, or a list of different whole numbers."
        )
    return tuple(seeds)


def _target(value: Any, source: str) -> Target:
    keys = _mapping(value, "target", source)
    _refuse_unknown(keys, tuple(field.name for field in fields(Target)), source, " of target")
    levels = [key for key in LEVELS if key in keys]
    if len(levels) > 1:
        raise InputError(f"{source}: target has {' and '.join(levels)}; give one of them.")
    for key in levels:
        level = keys[key]
        if type(level) not in {int, float} or not 0 < level < 1e300:
            raise InputError(f"{source}: target {key} is {level!r}; it must be a number above 0.")
        if key != "accuracy" and level > 1:
            raise InputError(f"{source}: target {key} is {level}; a share is at most 1.")
    target = Target(**({} if levels else {"of_best": 0.8}) | keys)
    if target.curve not in ("accuracy", "reward"):
        raise InputError(f"{source}: target curve is {target.curve!r}; choose one of: accuracy, reward.")
    if type(target.window) is not int or target.window < 1:
        raise InputError(f"{source}: target window is {target.window!r}; it must be a whole number of at least 1.")
    if target.window % 2 == 0:
        raise InputError(f"{source}: target window is {target.window}; it must be odd, for it lies around each point.")
    return target


def _mapping(value: Any, key: str, source: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{source}: {key} is {value!r}; it must be a mapping, one `name: value` a line.")
    return value
