"""Every situation: what it is, what should come out, what came out on 69a7883, and the function that measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from lab.moving import change, lengths, noise, outage
from lab.moving.place import Figures, Place


@dataclass(frozen=True)
class Situation:
    """A row of the table."""

    what: str
    should: str
    before: str
    """On commit 69a7883, as it was first reported."""
    measure: Callable[[Place], Figures]
    seeds: tuple[int, ...] = (0, 1, 2)
    in_trl: bool = False

    @property
    def can(self) -> bool:
        """Whether what it needs is installed."""
        return not self.in_trl or find_spec("trl") is not None


def of_trl(name: str) -> Callable[[Place], Figures]:
    """A function of `lab.moving.trl`, which is imported when it is called."""
    return lambda at: getattr(import_module("lab.moving.trl"), name)(at)


SITUATIONS = {
    "M1": Situation(
        "`oblrpo` with `debiased`, eta_0 6e-3, AdamW: reward .99 after 20 steps, 60 in all",
        "N SNR .1 to .3 over the last 20 steps: a rate below a third of eta_0",
        "N SNR 5.2 at the end, rate .84 of eta_0",
        noise.solved_by_the_paper,
    ),
    "M2": Situation(
        "the default, reward 1.000 from step 36 on, 80 in all",
        "N SNR -.07 in steps 28 to 33, then no gradient",
        "1.11, unchanged from step 24 to 80",
        noise.solved_by_default,
    ),
    "M3": Situation(
        "the same reward for all in steps 10 to 39 (0, .37 or 1), the default",
        "N SNR 0, no update, nothing moves; the rate after within a factor of 2 of that before",
        "at 0: N SNR .345, rate x 88, .40 nats a token",
        outage.outage,
    ),
    "M3b": Situation(
        "the same in TRL: `OBLRPOTrainer`, its defaults, binary reward, G = 4",
        "0 updates (`rloo` there has none)",
        "at .37: 30 of 30 updates, rate x 18 to 46, .60 to 3.5 nats a token; at 0: x 37 to 51, .47 to .80; at 1: 7 "
        "updates, .18",
        of_trl("outage"),
        in_trl=True,
    ),
    "M3d": Situation(
        "a task that is solved, in TRL, dense reward, 80 steps: all earn alike from some step on",
        "no update in such steps; `rloo` moves 6.7 and 6.6 nats from the start",
        "rate .0026 (step 10) -> .34 (step 44), 5.4 -> 33.5 nats from the start; two more seeds 12.9, 12.3, ten such "
        "updates each",
        of_trl("solved"),
        in_trl=True,
    ),
    "M5": Situation(
        "8 or 16 prompts in all, 8 a step, G = 16, 90 steps, a letter for each prompt: `oblrpo` with `debiased`, eta_0 "
        "6e-3",
        "as a fixed rate (`off`); true N SNR half-way 2.01, 1.87",
        "8 prompts .012, .012; 16 prompts .007, .008; fixed .500, .374 and .222, .385; N SNR 0",
        noise.few_prompts,
    ),
    "M6": Situation(
        "the default: KL of a step over `step_kl_target`, geometric mean",
        "1",
        "AdamW .25, SGD .15, LoRA .31, 2 and 4 updates .30, .52",
        lengths.arms,
    ),
    "M7": Situation(
        "completions growing from 4 to 64 tokens (reward = length), the default: the largest step",
        "at most .5 nats",
        "one step of 1.96 nats, then .12 for ten steps",
        lengths.growing,
    ),
    "M8": Situation(
        "`num_iterations` 1, 2, 4, 8: KL of the whole step over the target",
        "1, and no step over .5 nats",
        ".28, .97, 4.5, 8.9 (8 updates: 14 of 14 steps over .5 nats)",
        lengths.updates,
    ),
    "M9": Situation(
        "outliers: rewards + .3 t with 1.5 degrees of freedom, 75 steps; what is earned without them",
        "as RLOO at 3e-3: .967, .991, .177, .521",
        ".985, .175, .136, .179: the rate stalls",
        change.outliers,
        seeds=(0, 1, 2, 3),
    ),
    "M10": Situation(
        "a reward that changes (lowercase to digits) at a policy trained for 25 steps: steps to .5",
        "the default going on as fast as begun afresh",
        "default going on 34, 17, 35; afresh 25, 17, 19; RLOO afresh 15, 13, 16 at 3e-3, 6, 5, 5 at 1e-2",
        change.changes,
    ),
    "M11": Situation(
        "the 95 % interval of N SNR every five steps, against the policy frozen there",
        "covered, or said to be that of a mean over steps",
        "1 of 6 points covered (on the demo)",
        noise.intervals,
        seeds=(0, 1),
    ),
    "M12": Situation(
        "one reward of 1,000 in step 10, the default with SGD and AdamW, 45 steps",
        "steps as long as they are meant, and the reward of a run without it",
        "not measured; 82fa1a3: SGD at .14, steps 1e-5 of what was meant, for good",
        change.one_absurd,
    ),
    "M13": Situation(
        "a reward that changes after 14 and 18 steps, completions of 8 tokens: steps to .5",
        "the default going on as fast as begun afresh",
        "not measured; 82fa1a3: after 18 steps in none of five seeds",
        change.early_changes,
    ),
    "M14": Situation(
        "outliers: one reward in 128 is 100 or -100, 75 steps; what is earned without them",
        "with `reward_clip 1` as without outliers",
        "not measured",
        change.rare_hundreds,
    ),
    "rare": Situation(
        "a reward that .2 % of the first completions earn: steps until five steps have a mean of .5",
        "not slower than it was",
        "default 60, 60, 85; RLOO at its best rate 15, 20, 40",
        outage.rare,
    ),
    "zero": Situation(
        "the reward less 1 and plus 1, 30 steps: the default, and no baseline with the measured rate",
        "what is earned does not depend on it",
        "not measured",
        change.another_zero,
    ),
    "end": Situation(
        "tasks that are soon solved, 150 steps, the default: rate and entropy before reward .99 and after",
        "the rate ends where the signal ends; entropy stays",
        "rates of 1 to 34, entropy 0",
        outage.solved,
    ),
}
