"""What is compared: a YAML file of variants, learning rates and seeds over common settings, checked key by key."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from oblrpo.config import TrainConfig
from oblrpo.errors import InputError, did_you_mean
from oblrpo.settings import flatten, load_recipe, with_settings
from oblrpo.yaml_files import read_yaml_file

SPECS = files("oblrpo") / "recipes" / "compare"

DEFAULTS: dict[str, Any] = {"save_steps": 20, "save_total_limit": 1}
"""Settings of every run that neither the recipe nor the spec names. They save seldom: a killed run loses some steps."""

KEYS = (
    "about", "base", "variants", "learning_rates", "seeds", "search_seeds", "reference", "target", "share_warm_start",
    "keep_checkpoints", "processes",
)  # fmt: skip

OURS = {
    # settings that the comparison makes itself, and what says them
    "output": "--output", "seed": "seeds", "recipe": "base",
}  # fmt: skip


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
    """The accuracy to reach, where it is given as a level."""
    curve: str = "accuracy"
    """The curve that has to reach the level: accuracy (held out) or reward (of the training batches)."""
    window: int = 3
    """How many points of the curve its centred moving average takes."""


@dataclass(frozen=True)
class Spec:
    """A resolved comparison. Where `search_seeds` is 0, every rate runs on every seed."""

    name: str
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
        source = f"{self.name}, variant {variant.name!r}"
        settings = variant.settings | {"learning_rate": rate, "seed": seed, "output": output}
        return with_settings(self.base_config, settings, source)

    @cached_property
    def base_config(self) -> TrainConfig:
        """The config of the base: its recipe, and its settings over it.

        Raises:
            InputError: as `load_recipe` and `with_settings` raise.
        """
        config = with_settings(TrainConfig(), DEFAULTS, self.name)
        settings = dict(self.base)
        if recipe := settings.pop("recipe", ""):
            config = load_recipe(recipe, config)
        return with_settings(config, settings, f"{self.name}, base")

    def as_mapping(self) -> dict[str, Any]:
        """Return the resolved spec as a file would hold it."""
        target = {key: value for key, value in asdict(self.target).items() if value is not None}
        variants = {v.name: v.settings | {"learning_rates": list(v.learning_rates)} for v in self.variants}
        plain = {key: getattr(self, key) for key in ("search_seeds", "reference")}
        more = {key: getattr(self, key) for key in ("share_warm_start", "keep_checkpoints", "processes")}
        about = {"about": self.about} if self.about else {}
        seeds = {"seeds": list(self.seeds)}
        return about | {"base": self.base, "variants": variants} | seeds | plain | {"target": target} | more


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
    for key in raw:
        if key not in KEYS:
            raise InputError(
                f"{source}: unknown key {key!r}; choose from: {', '.join(KEYS)}.{did_you_mean(str(key), KEYS)}"
            )
    if "learning_rates" in overrides:
        _drop_grids(raw, source)
    if "target" in overrides:
        overrides = overrides | {"target": _over(raw.get("target", {}), overrides["target"], source)}
    raw |= overrides
    raw["base"] = _base(raw.get("base", {}), source) | _settings(settings, "--set")
    return _resolve(raw, source, settings)


def _over(target: Any, changed: dict[str, Any], source: str) -> dict[str, Any]:
    """Change some keys of a target; a level takes the place of the one that was there."""
    changed = _mapping(changed, "target", "--target")
    _target(changed, "--target")
    level = set(LEVELS) & changed.keys()
    kept = {key: value for key, value in _mapping(target, "target", source).items() if not (level and key in LEVELS)}
    return kept | changed


def _drop_grids(raw: dict[str, Any], source: str) -> None:
    variants = [v for v in _mapping(raw.get("variants"), "variants", source).values() if isinstance(v, dict)]
    if variants and all("learning_rate" in variant for variant in variants):
        raise InputError(f"--learning-rates: every variant of {source} sets its own learning_rate; change the file.")
    for variant in variants:
        variant.pop("learning_rates", None)


def _resolve(raw: dict[str, Any], source: str, settings: dict[str, Any]) -> Spec:
    seeds = _seeds(raw.get("seeds", 3), source)
    spec = Spec(
        name=source,
        about=_of(str, "text", "about", raw.get("about", ""), source),
        base=raw["base"],
        variants=(),
        seeds=seeds,
        search_seeds=_whole("search_seeds", raw.get("search_seeds", 0), 0, source),
        reference="",
        target=_target(raw.get("target", {}), source),
        share_warm_start=_of(bool, "true or false", "share_warm_start", raw.get("share_warm_start", True), source),
        keep_checkpoints=_of(bool, "true or false", "keep_checkpoints", raw.get("keep_checkpoints", True), source),
        processes=_whole("processes", raw.get("processes", 0), 0, source),
    )
    if spec.search_seeds > len(seeds):
        raise InputError(f"{source}: search_seeds is {spec.search_seeds}, more than the {len(seeds)} seeds there are.")
    rate = flatten(spec.base_config)["learning_rate"]
    rates = _rates(raw["learning_rates"], source) if "learning_rates" in raw else (rate,)
    given = _mapping(raw.get("variants"), "variants", source)
    variants = tuple(_variant(name, value, rates, source) for name, value in given.items())
    if not variants:
        raise InputError(f"{source}: variants is missing; give a mapping of names to train settings.")
    for key in settings:
        if all(_sets(key, value, "learning_rates" in raw) for value in given.values()):
            raise InputError(f"--set {key}: every variant of {source} has its own, so that it would change nothing.")
    reference = _of(str, "a variant's name", "reference", raw.get("reference", variants[0].name), source)
    names = [variant.name for variant in variants]
    if reference not in names:
        raise InputError(f"{source}: reference is {reference!r}; choose one of: {', '.join(names)}.")
    return replace(spec, variants=variants, reference=reference)


def _sets(key: str, variant: dict[str, Any] | None, grid: bool) -> bool:
    """Whether a variant's own settings, or the common grid, hide this setting of the base."""
    return key in (variant or {}) or (key == "learning_rate" and (grid or "learning_rates" in (variant or {})))


def _base(value: Any, source: str) -> dict[str, Any]:
    """Read the base, which is settings, or the name of a recipe or of a file of settings."""
    if isinstance(value, str):
        return {"recipe": value}
    settings = _mapping(value, "base", source)
    recipe = {"recipe": settings["recipe"]} if isinstance(settings.get("recipe"), str) else {}
    return recipe | _settings({key: settings[key] for key in settings if key not in recipe}, f"{source}, base")


def _settings(settings: dict[str, Any], source: str) -> dict[str, Any]:
    for key, instead in OURS.items():
        if key in settings:
            raise InputError(f"{source}: {key} is not a setting of the runs compared; say {instead} instead.")
    return settings


def _variant(name: Any, value: Any, rates: tuple[float, ...], source: str) -> Variant:
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+ -]*", name) or len(name.encode()) > LONGEST_NAME:
        raise InputError(
            f"{source}: {name!r:.100} is no name for a variant, for it names a folder; use letters, digits, - _ . + "
            f"(a number in quotes), and at most {LONGEST_NAME} bytes."
        )
    place = f"{source}, variant {name!r}"
    settings = dict(_settings(_mapping(value, f"variant {name!r}", source), place))
    own = settings.pop("learning_rates", None)
    if own is not None and "learning_rate" in settings:
        raise InputError(f"{place}: give learning_rate or learning_rates, not both.")
    if own is not None:
        rates = _rates(own, place)
    elif "learning_rate" in settings:
        rates = _rates([settings.pop("learning_rate")], place)
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
    if isinstance(value, int) and value > MOST_SEEDS:
        raise InputError(f"{source}: seeds is more than {MOST_SEEDS:,}.")
    seeds = range(value) if isinstance(value, int) and not isinstance(value, bool) else value
    whole = isinstance(seeds, (list, tuple, range)) and all(type(seed) is int for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise InputError(
            f"{source}: seeds is {value!r}; give how many, at least 1, or a list of different whole numbers."
        )
    return tuple(seeds)


def _target(value: Any, source: str) -> Target:
    given = _mapping(value, "target", source)
    known = list(asdict(Target()))
    for key in given:
        if key not in known:
            raise InputError(f"{source}: unknown key {key!r} of target; choose from: {', '.join(known)}.")
    levels = [key for key in LEVELS if key in given]
    if len(levels) > 1:
        raise InputError(f"{source}: target has {' and '.join(levels)}; give one of them.")
    for key in levels:
        number = given[key]
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 < number < 1e300:
            raise InputError(f"{source}: target {key} is {number!r}; it must be a number above 0.")
        if key != "accuracy" and number > 1:
            raise InputError(f"{source}: target {key} is {number}; a share is at most 1.")
    if given.get("curve", "accuracy") not in ("accuracy", "reward"):
        raise InputError(f"{source}: target curve is {given['curve']!r}; choose one of: accuracy, reward.")
    if _whole("target window", given.get("window", 1), 1, source) is not None and given.get("window", 1) % 2 == 0:
        raise InputError(
            f"{source}: target window is {given['window']}; it must be odd, for it lies around each point."
        )
    return Target(**({} if levels else {"of_best": 0.8}) | given)


def _mapping(value: Any, key: str, source: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{source}: {key} is {value!r}; it must be a mapping, one `name: value` a line.")
    return value


def _of(kind: type, words: str, key: str, value: Any, source: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"{source}: {key} is {value!r}; it must be {words}.")
    return value


def _whole(key: str, value: Any, least: int, source: str) -> int:
    if type(value) is not int or value < least:
        raise InputError(f"{source}: {key} is {value!r}; it must be a whole number of at least {least}.")
    return value
