"""The constraints on a setting beside its type and default, declared as annotations where it stands (`train`).

Below stand the conditions under which settings have no effect.

steps: Annotated[int, Range(0), MAY_CHANGE] = 100
"""

from __future__ import annotations

import sys
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from oblrpo.errors import InputError
from oblrpo.settings.typed import Setting, of_mapping, settings_of

Mapping = dict[str, Any]
"""Further arguments by name; on the command line one word of YAML, such as '{momentum: 0.9}'."""


class Positional(NamedTuple):
    """The setting is the first word of a command that is not a flag."""

    name: str  # as usage shows it
    needed: str = ""  # what to give, where the command does nothing without it


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be; NaN and the infinities are in no range."""

    least: float
    most: float = sys.float_info.max


MAY_CHANGE = "may change"
"""A run may be resumed with another value of the setting."""
ADJUSTABLE = "adjustable"
"""The setting is adjusted to rows and model where it is not set; `trainer.setup.adjust` says how."""


@dataclass(frozen=True)
class NoEffect:
    """The setting has no effect under some configs; a run refuses it there if it was set."""

    why: str
    """The reason, in words; `{task}` stands for the task's name."""
    when: Callable[[Any], bool]
    """Whether it is so under a `TrainConfig`."""


@dataclass(frozen=True)
class Holds:
    """The setting is a mapping whose keys are the fields of a dataclass, with their types, defaults and annotations."""

    kind: type


def with_keys(config: Any) -> Iterator[Setting]:
    """Every setting of a config, and each key that a mapping `Holds`, as `setting.key`."""
    for setting in settings_of(config):
        yield setting
        for kind in [note.kind for note in setting.notes if isinstance(note, Holds)]:
            for key in settings_of(of_mapping(kind, setting.value, setting.name)):
                yield key._replace(name=f"{setting.name}.{key.name}")


def check_ranges(config: Any) -> None:
    """Refuse numbers out of range."""
    for name, value, _, notes in with_keys(config):
        for note in notes:
            if isinstance(note, Range) and value is not None and not note.least <= value <= note.most:
                least, most = f"{note.least:,}", f"{note.most:,}"
                bounded = note.most < sys.float_info.max
                wanted = f"between {least} and {most}" if bounded else f"a finite number of at least {least}"
                raise InputError(f"{name} is {value}; it must be {wanted}.")


def refuse_no_effect(given: abc.Mapping[str, str], config: Any) -> None:
    """Refuse settings that were set (`given`, with how they are written there) and that a run of `config` ignores."""
    idle: dict[str, list[str]] = {}
    written = dict(given)
    for name, value, _, notes in with_keys(config):
        for note in notes:
            if isinstance(note, Holds) and name in given:  # who has set a mapping has set the keys in it
                written |= {f"{name}.{key}": f"{key} in {given[name]}" for key in value}
            if isinstance(note, NoEffect) and note.when(config):
                idle.setdefault(note.why.format(task=config.task.task), []).append(name)
    refuse_named(written, idle)


def refuse_named(given: abc.Mapping[str, str], idle: abc.Mapping[str, Sequence[str]]) -> None:
    """Refuse settings without an effect, by why (`idle`), where one was set."""
    for why, names in idle.items():
        if written := [given[name] for name in names if name in given]:
            has, it = ("has", "it") if len(written) == 1 else ("have", "them")
            raise InputError(f"{', '.join(written)} {has} no effect because {why}; remove {it}.")


def adjustable(config: Any) -> set[str]:
    """The settings that may be adjusted because they were not set."""
    return {setting.name for setting in settings_of(config) if ADJUSTABLE in setting.notes} - set(config.given)


def may_change_on_resume(config: Any) -> set[str]:
    """The settings with which a run may be resumed although they differ from those it was started with."""
    return {setting.name for setting in with_keys(config) if MAY_CHANGE in setting.notes}


def _benchmark(config: Any) -> bool:
    from oblrpo.tasks import BENCHMARKS

    return config.task.task in BENCHMARKS


def _generated(config: Any) -> bool:
    return not config.task.data and not _benchmark(config)


LOADED = NoEffect("a loaded model has its own sizes", lambda c: bool(c.policy.model))
BUILT = NoEffect("no model is loaded", lambda c: not c.policy.model)
NO_WARM_START = NoEffect("warm_start_steps is 0", lambda c: not c.warm_start.begins)
FROM_ROWS = NoEffect("sft_data are learned as they are", lambda c: bool(c.warm_start.sft_data))
OWN_DATA = NoEffect("the problems come from data", lambda c: bool(c.task.data) and not _benchmark(c))
BENCHMARK = NoEffect("{task} names its columns itself", _benchmark)
GENERATED = NoEffect("the task '{task}' generates its problems", _generated)
BENCHMARK_PROMPT = NoEffect(BENCHMARK.why, lambda c: _benchmark(c) and not c.warm_start.sft_data)
GENERATED_PROMPT = NoEffect(GENERATED.why, lambda c: _generated(c) and not c.warm_start.sft_data)
OWN_TEST = NoEffect(  # eval_data, or the splits of a benchmark on the hub
    "held-out problems have their own source",
    lambda c: not _generated(c) and bool(c.task.eval_data or not c.task.data),
)
NO_PROJECTS = NoEffect(
    "neither wandb nor trackio is in report_to", lambda c: not {"wandb", "trackio"} & set(c.run.report_to)
)
ONE_UPDATE = NoEffect("every batch gets one update (num_iterations)", lambda c: c.algorithm.num_iterations == 1)
NO_TOOLS = NoEffect("there is neither an environment nor a tool", lambda c: not c.turns.names)
NO_VLLM = NoEffect("the sampler is transformers", lambda c: c.rollout.sampler != "vllm")
OWN_SCHEDULER = NoEffect("vLLM decides itself how many it samples at once", lambda c: c.rollout.sampler == "vllm")
