"""What both adapters have.

Requirements on another library, each with its reason and its fix; what ranks tell each other; an update's metrics, by
the names that `oblrpo train` gives them; states as somebody else's checkpoint can hold them, as JSON beside its own
files. The squared norm of gradients that are sharded over ranks is `estimators.squared_norm`.
"""

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from operator import not_
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from oblrpo import estimators
from oblrpo.errors import InputError
from oblrpo.estimators import ONE_IN

off = not_
"""The requirement that a setting is empty, 0 or False, whichever of them its type has."""


def check_version(library: str, version: str, least: tuple[int, ...], below: tuple[int, ...]) -> None:
    """Refuse a version of a library whose insides are not known here.

    Raises:
        ImportError: it is older than `least`, or not older than `below`.
    """
    if not least <= tuple(map(int, re.findall(r"\d+", version)[:3])) < below:
        known = "{}>={},<{}".format(library, *(".".join(map(str, bound)) for bound in (least, below)))
        raise ImportError(
            f"oblrpo's {library} adapter works with {known}, and this is {library} {version}; install '{known}', or a "
            "version of oblrpo that supports this one."
        )


class Rule(NamedTuple):
    """A requirement on one setting."""

    key: str
    allowed: tuple[Any, ...] | Callable[[Any], bool]
    """The values that it may have, the one to set first; or whether it may have a value."""
    why: str
    fix: str = ""
    """What to set, where that is not the first value."""

    def holds(self, value: Any) -> bool:
        """Whether the setting may have this value."""
        return self.allowed(value) if callable(self.allowed) else value in self.allowed


def check(
    rules: Iterable[Rule],
    trainer: str,
    value_of: Callable[[str], Any],
    shown: Callable[[Any], str] = str,
    further: Iterable[str] = (),
) -> None:
    """Refuse all settings that do not meet their requirement at once, each with its reason and its fix.

    Args:
        rules: the requirements.
        trainer: the name of ours, which does not work with such a setting.
        value_of: the value of a setting, by its key.
        shown: how a value is written.
        further: refusals of what takes more than one setting, as "what: why; fix."
    """
    refusals = []
    for rule in rules:
        if not rule.holds(value := value_of(rule.key)):
            fix = rule.fix or (f"{rule.key}={shown(rule.allowed[0])}" if isinstance(rule.allowed, tuple) else "")
            refusals.append(f"{rule.key}={shown(value)}: {rule.why}; set {fix}.")
    refusals += further
    if len(refusals) == 1:
        raise InputError(f"{trainer} does not work with {refusals[0]}")
    if refusals:
        raise InputError("\n- ".join([f"{trainer} does not work with {len(refusals)} settings:", *refusals]))


def of_all_ranks(value: Any, group: Any = None) -> list[Any]:
    """This value of every rank of a process group, in their order; alone in its list where none is initialised."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def rows_of_all_ranks(rows_SC: Tensor, group: Any = None) -> Tensor:
    """The rows of all ranks below each other, as wide as the widest, with 0 behind the others; the same on each.

    Ranks may have any number of rows, of any width. Where no process group is initialised they are this rank's own.
    """
    parts = of_all_ranks(rows_SC.cpu(), group)
    width = max(part.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
    return torch.cat(padded).to(rows_SC.device)


def key_of(ids: Tensor) -> int:
    """A number by which a row is known from its tokens."""
    return zlib.crc32(ids.long().cpu().numpy().tobytes())


def measured(keys: Sequence[Sequence[int | None]], rank: int) -> tuple[list[int], int]:
    """This rank's rows of those that are measured, then others, so that all ranks have as many, and how many are meant.

    One row of `ONE_IN` is meant, over all ranks, those of the least keys: which rank has a row may be chance.

    Args:
        keys: of every rank's rows (`of_all_ranks`), by what the row says (`key_of`); None for padding.
        rank: whose rows.
    """
    own_keys = sorted(key for row in keys for key in row if key is not None)
    last = own_keys[math.ceil(len(own_keys) / ONE_IN) - 1]
    meant = [[place for place, key in enumerate(row) if key is not None and key <= last] for row in keys]
    mine, most = meant[rank], max(map(len, meant))
    others = [place for place in range(len(keys[rank])) if place not in mine]
    return [*mine, *others[: most - len(mine)]], len(mine)


def finite(value: float) -> float:
    """The value, or NaN for infinity: TRL leaves NaN out of its averages, and JSON knows neither."""
    return value if math.isfinite(value) else math.nan


def signal_metrics(schedule: estimators.SNRSchedule, batch: estimators.Moments | None) -> dict[str, float]:
    """Signal and noise: averaged over steps as the schedule sees them, and this batch's own where it has any."""
    smoothed = schedule.smoothed
    return {
        "snr": smoothed.snr,
        "n_snr": smoothed.n_snr,
        "critical_batch_size": smoothed.critical_batch_size,
        **({} if batch is None else {"signal2": batch.signal2, "trace_cov": batch.trace_cov}),
    }


def baseline_metrics(valid_PG: Tensor, baseline_PG: Tensor) -> dict[str, float]:
    """Mean and spread over prompts of the prompts' mean baselines."""
    part_P = valid_PG.any(1)
    baseline_P = baseline_PG.masked_fill(~valid_PG, 0).sum(1)[part_P] / valid_PG.sum(1)[part_P]
    return {
        "baseline/mean": float(baseline_P.mean()),
        "baseline/spread": float(baseline_P.std()) if len(baseline_P) > 1 else math.nan,
    }


def norm_metrics(rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor) -> dict[str, float]:
    """The mean squared score norm, and how it goes with rewards; nothing where no output counts."""
    if not valid_PG.any():
        return {}
    norm2_N = norm2_PG[valid_PG]
    kappa = estimators.kappa(norm2_N, rewards_PG[valid_PG])
    return {"score_norm2/mean": float(norm2_N.mean()), "score_norm2/kappa": kappa}


def without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The state with lists of numbers in the place of tensors."""
    plain: dict[str, Any] = json.loads(json.dumps(state, default=torch.Tensor.tolist))
    return plain


def with_tensors(state: Any) -> Any:
    """The state with tensors in the place of lists, in float64."""
    if isinstance(state, dict):
        return {key: with_tensors(value) for key, value in state.items()}
    return torch.tensor(state, dtype=torch.float64) if isinstance(state, list) else state


def schedule_state(schedule: estimators.SNRSchedule) -> dict[str, Any]:
    """A schedule's state with its name."""
    return {"mode": schedule.mode, **schedule.state_dict()}


def load_schedule(schedule: estimators.SNRSchedule, state: dict[str, Any], file: Path, setting: str) -> None:
    """Let a schedule resume where `schedule_state` was taken; `setting` is how a user names it."""
    try:
        mode = state["mode"]
        if mode == schedule.mode:
            return schedule.load_state_dict(state)
    except KeyError as error:
        raise InputError(f"{file} was written by another version of oblrpo ({error} is missing).") from None
    raise InputError(f"{file} was written with {setting}={mode!r}; set it again, or start a new run.")
