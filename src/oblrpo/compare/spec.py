"""What is compared: a YAML file of variants, learning rates and seeds over common settings, checked key by key."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from oblrpo.errors import InputError, did_you_mean
from oblrpo.settings import TrainConfig, file_named, load_recipe, read_yaml_file, with_settings
from oblrpo.settings.typed import of_mapping

SPECS = files("oblrpo") / "recipes" / "compare"

# Checkpoints are rare: a killed run loses some steps.
DEFAULTS: dict[str, Any] = {"save_steps": 20, "save_total_limit": 1}
"""Settings of every run that neither the recipe nor the spec names."""

PLAIN = {  # keys of one plain value: the default, which has the type of all values, and what they must be
    "about": ("", "text"),
    "search_seeds": (0, "a whole number of at least 0"),
    "share_warm_start": (True, "true or false"),
    "keep_checkpoints": (True, "true or false"),
    "processes": (0, "a whole number of at least 0"),
}
KEYS = ("about", "base", "variants", "learning_rates", "seeds", "reference", "target", *list(PLAIN)[1:])
OURS = {"output": "--output", "seed": "seeds", "recipe": "base"}  # what the comparison sets itself, and what says it
LEVELS = ("of_best", "of_gain", "accuracy")  # the keys of a target that say where it lies; it has one of them
LONGEST_NAME = 100  # bytes of a variant's name, which is a part of the names of its folders
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

    of_best: float | None = None  # a share of the best variant's end
    of_gain: float | None = None  # a share of the way from where runs begin to the best variant's end
    accuracy: float | None = None  # the level itself
    curve: Literal["accuracy", "reward"] = "accuracy"
    """The curve that has to reach the level: accuracy (held out) or reward (of the training batches)."""
    window: int = 3  # points of the curve in its centred moving average


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
        """Return the config of one run."""
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
    """
    file, ours = file_named(name, SPECS, "comparison")
    raw, source = read_yaml_file(file), Path(name).name
    for key in raw:
        hint = did_you_mean(key, KEYS)
        _require(key in KEYS, f"{source}: unknown key {key!r}; choose from: {', '.join(KEYS)}.{hint}")
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
    if type(many := overrides.get("seeds")) is int and type(few := raw.get("search_seeds", 0)) is int:
        raw["search_seeds"] = min(few, many)  # those of the file follow
    raw |= overrides
    base = raw.get("base")
    base = {"recipe": base} if isinstance(base, str) else _mapping(base, "base", source)
    recipe = base.get("recipe", "")
    _refuse_ours({key: base[key] for key in base if key != "recipe" or not isinstance(recipe, str)}, f"{source}, base")
    _refuse_ours(settings, "--set")
    raw["base"] = base | settings
    spec = _resolve(raw, source, settings if ours else raw["base"])
    for key in settings:
        hiding = {key, "learning_rates"} if key == "learning_rate" else {key}
        if (key == "learning_rate" and "learning_rates" in raw) or all(
            hiding & (variant or {}).keys() for variant in variants.values()
        ):
            raise InputError(f"--set {key}: every variant of {source} has its own, so it has no effect; remove it.")
    return spec


def _resolve(raw: dict[str, Any], source: str, given: Iterable[str]) -> Spec:
    plain: dict[str, Any] = {}
    for key, (default, words) in PLAIN.items():
        plain[key] = value = raw.get(key, default)
        holds = type(value) is type(default) and not (type(value) is int and value < 0)
        _require(holds, f"{source}: {key} is {value!r}; it must be {words}.")
    seeds, few = _seeds(raw.get("seeds", 3), source), plain["search_seeds"]
    _require(few <= len(seeds), f"{source}: search_seeds is {few}, more than the {len(seeds)} seeds there are.")
    config = with_settings(TrainConfig(), DEFAULTS, source, ())
    if recipe := raw["base"].get("recipe", ""):
        config = load_recipe(recipe, config)
    config = with_settings(config, {k: v for k, v in raw["base"].items() if k != "recipe"}, f"{source}, base", given)
    rates = _rates(raw.get("learning_rates", [config.optim.learning_rate]), source)
    named = _mapping(raw.get("variants"), "variants", source).items()
    variants = tuple(_variant(name, settings, rates, source) for name, settings in named)
    _require(variants, f"{source}: variants is missing; give a mapping of names to train settings.")
    if any({"prompts_per_step", "eval_prompts"} & variant.settings.keys() for variant in variants):
        # All are measured on the same rows: no variant may hold out others for the sake of its own numbers.
        config = replace(config, given=(*config.given, "heldout_fraction"))
    names = [variant.name for variant in variants]
    reference = raw.get("reference", names[0])
    _require(reference in names, f"{source}: reference is {reference!r}; choose one of: {', '.join(map(str, names))}.")
    target = _target(raw.get("target"), source)
    return Spec(source, config, base=raw["base"], variants=variants, seeds=seeds, reference=reference, target=target,
                **plain)  # fmt: skip


def _require(holds: Any, sentence: str) -> None:
    if not holds:
        raise InputError(sentence)


def _refuse_ours(settings: dict[str, Any], source: str) -> None:
    for key, instead in OURS.items():
        _require(key not in settings, f"{source}: {key} is not a setting of the runs compared; use {instead} instead.")


def _variant(name: Any, value: Any, rates: tuple[float, ...], source: str) -> Variant:
    _require(
        isinstance(name, str) and re.fullmatch(r"\w[\w.+ -]*", name) and len(name.encode()) <= LONGEST_NAME,
        f"{source}: {name!r:.100} cannot name a variant, because it also names a folder; use letters, digits, - _ . + "
        f"(a number in quotes), and at most {LONGEST_NAME} bytes.",
    )
    place = f"{source}, variant {name!r}"
    settings = dict(_mapping(value, f"variant {name!r}", source))
    _refuse_ours(settings, place)
    both = {"learning_rate", "learning_rates"} <= settings.keys()
    _require(not both, f"{place}: give learning_rate or learning_rates, not both.")
    if "learning_rate" in settings:
        settings["learning_rates"] = [settings.pop("learning_rate")]
    if "learning_rates" in settings:
        rates = _rates(settings.pop("learning_rates"), place)
    return Variant(name, settings, rates)


def _rates(value: Any, source: str) -> tuple[float, ...]:
    rates = value if isinstance(value, list) else []
    holds = rates and all(type(rate) in {int, float} and 0 < rate < 1e300 for rate in rates)
    place = f"{source}: learning_rates is {value!r}"
    _require(holds, f"{place}; give a list of numbers above 0, such as [1e-4, 3e-4].")
    _require(len(set(map(float, rates))) == len(rates), f"{place}; give every rate once.")
    return tuple(sorted(map(float, rates)))


def _seeds(value: Any, source: str) -> tuple[int, ...]:
    if type(value) is int:
        _require(value <= MOST_SEEDS, f"{source}: seeds is more than {MOST_SEEDS:,}.")
        value = range(value) or value
    seeds = list(value) if isinstance(value, (list, range)) else []
    _require(
        seeds and all(type(seed) is int for seed in seeds) and len(set(seeds)) == len(seeds),
        f"{source}: seeds is {value!r}; give how many, at least 1, or a list of different whole numbers.",
    )
    return tuple(seeds)


def _target(value: Any, source: str) -> Target:
    keys = _mapping(value, "target", source)
    levels = [key for key in LEVELS if key in keys]
    _require(len(levels) < 2, f"{source}: target has {' and '.join(levels)}; give one of them.")
    target = of_mapping(Target, ({} if levels else {"of_best": 0.8}) | keys, f"{source}: target")
    for key in levels:
        level, place = getattr(target, key), f"{source}: target {key} is {keys[key]!r}"
        _require(level is not None and 0 < level < 1e300, f"{place}; it must be a number above 0.")
        _require(key == "accuracy" or level <= 1, f"{place}; a share is at most 1.")
    odd = target.window > 0 and target.window % 2
    _require(odd, f"{source}: target window is {target.window}; it must be odd, because it is centred on each point.")
    return target


def _mapping(value: Any, key: str, source: str) -> dict[str, Any]:
    holds = value is None or isinstance(value, dict)
    _require(holds, f"{source}: {key} is {value!r}; it must be a mapping, one `name: value` per line.")
    return value or {}
