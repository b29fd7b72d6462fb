"""The schedules of the learning rate, a row each. `estimators/schedule.py` has what computes them."""

from __future__ import annotations

from dataclasses import dataclass

RATES_OF_THEIR_OWN = ("Rprop", "Adafactor", "Prodigy")
"""Optimizers whose step is not a direction times the rate that they are given."""


@dataclass(frozen=True)
class Schedule:
    """What is known of a schedule, which multiplies the optimizer's own rate eta_0 by a factor."""

    meaning: str
    memory: float = 0.9
    """Decay of the averages of signal and noise, unless the user sets one."""
    nats: float = 0.5
    """How far an update may or should move the policy, in nats an output, unless the user sets it."""
    state_bytes_per_parameter: int = 0
    """The bytes that it keeps of every trained number between steps."""
    measures_updates: bool = False
    """Whether it sets the rate itself, from how far each update has moved the policy: `SNRSchedule.confine` has to be
    called after every one."""


SCHEDULES: dict[str, Schedule] = {
    "debiased": Schedule("signal-to-noise ratio, theorem 4 with unbiased estimates"),
    "plugin": Schedule("the same, biased: the paper read literally"),
    "auto": Schedule("measured from `learning_rate` on, as long as the next gradients say that steps should be",
                     memory=0.97, state_bytes_per_parameter=2, measures_updates=True),
    "kl": Schedule("measured from `learning_rate` on, towards a KL per update", nats=0.02, measures_updates=True),
    "ess": Schedule("effective sample size, the rate of VCPO (arXiv 2602.17616)"),
    "off": Schedule("the factor 1"),
}  # fmt: skip
"""Every schedule by name; the command line, the adapters and the diagnosis read this table."""

MEASURED = tuple(name for name, row in SCHEDULES.items() if row.measures_updates)
"""Those whose rate follows how far updates move the policy."""


def refusal(schedule: str, optimizer: str, learning_rate: float) -> str:
    """Why a schedule cannot work with an optimizer of this name at this rate, in a sentence; empty if it can."""
    if not SCHEDULES[schedule].measures_updates:
        return ""
    if optimizer in RATES_OF_THEIR_OWN:
        return (
            f"schedule {schedule!r} sets the rate, which {optimizer} makes its own; set schedule to off, or try AdamW."
        )
    return "" if learning_rate else f"schedule {schedule!r} needs a learning_rate above 0 to start from."
