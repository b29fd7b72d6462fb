"""The parts of the results: which runs they consist of, and in which order they are made."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.results.book import Book, Run

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Arm:
    """Something that is compared: settings, at each of some rates or from each of some starts."""

    name: str
    settings: Settings
    rates: tuple[float, ...]
    searched: bool = False
    """Whether the best of the rates is looked for on the search's seeds and reported on the others."""
    seeds: tuple[int, ...] = ()
    """The seeds it is reported on, if they are not the part's."""


@dataclass(frozen=True)
class Part:
    """Arms on policies in batches of some sizes."""

    name: str
    policies: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    """Prompts a step and completions a prompt."""
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    search: tuple[int, ...] = ()
    completions: int = 0
    """How many completions a run takes; 0: as many steps as the settings say."""
    settings: Settings = field(default_factory=dict)
    about: str = ""
    paced: bool = False
    """Whether the report says how soon each arm gets to a reward, though no arm's rate is searched."""
    shares: str = ""
    """The part whose CSV it adds to, so that runs of both are made once."""

    def rounds(self, book: Book) -> Iterator[list[tuple[Run, Settings]]]:
        """Runs that can be made at one time; what later ones are depends on how earlier ones ended."""
        yield [
            self._run(policy, size, arm, rate, seed)
            for seed in self.search
            for policy, size in self.places
            for arm in self.arms
            if arm.searched
            for rate in arm.rates
        ]
        yield [
            self._run(policy, size, arm, rate, seed)
            for seed in dict.fromkeys((*self.seeds, *(seed for arm in self.arms for seed in arm.seeds)))
            for policy, size in self.places
            for arm in self.arms
            if seed in (arm.seeds or self.seeds)
            for rate in ((self.best(book, policy, size, arm),) if arm.searched else arm.rates)
        ]

    @property
    def places(self) -> Iterable[tuple[str, tuple[int, int]]]:
        """Every policy in batches of every size."""
        return [(policy, size) for policy in self.policies for size in self.sizes]

    def _run(self, policy: str, size: tuple[int, int], arm: Arm, rate: float, seed: int) -> tuple[Run, Settings]:
        P, G = size
        given = {"prompts_per_step": P, "num_generations": G, "learning_rate": rate, "seed": seed}
        steps = {"steps": max(1, round(self.completions / (P * G)))} if self.completions else {}
        return Run(policy, P, G, arm.name, f"{rate:g}", seed), {**self.settings, **steps, **arm.settings, **given}

    def best(self, book: Book, policy: str, size: tuple[int, int], arm: Arm) -> float:
        """The rate of the best mean accuracy at the end, over the search's seeds."""

        def mean(rate: float) -> float:
            ends = book.ends(lambda run: run[:5] == (policy, *size, arm.name, f"{rate:g}") and run.seed in self.search)
            return statistics.fmean(ends.values())

        return max(arm.rates, key=mean)


NO_EXTRAS: Settings = {"ledger_steps": 0}
DEFAULT: Settings = {"algorithm": "oblrpo_thrifty"}  # of 0.3.0, as most CSVs have it, `oblrpo_shrunk`
FIXED: Settings = {**DEFAULT, "schedule": "off"}

RATES = Part(
    "rates",
    about="The default rate against a KL target, fixed rates, and itself without what it consists of.",
    policies=("addition-high", "countdown", "path"),
    sizes=((16, 4), (64, 4), (8, 4)),
    arms=(
        Arm("default", DEFAULT, (1e-5,)),
        Arm("kl 0.005", {**DEFAULT, "schedule": "kl", "schedule_kl": 0.005}, (1e-5,)),
        Arm("fixed", FIXED, (1e-4, 2e-4, 4e-4)),
        Arm("unguided", {**DEFAULT, "rule": "unguided"}, (1e-5,)),
        Arm("in-steps", {**DEFAULT, "rule": "in-steps"}, (1e-5,)),
        Arm("default", DEFAULT, (1e-7, 1e-3), seeds=(31,)),
    ),
    seeds=(31, 32, 33),
    completions=15360,
    settings={**NO_EXTRAS, "eval_steps": 0, "eval_prompts": 512, "save_steps": 0},
)

CHOICE = Part(
    "choice",
    about="The policies on which the default rate was chosen, for which nothing else is claimed.",
    policies=("sums", "two-digit-addition"),
    sizes=((16, 4), (64, 4), (8, 4)),
    arms=(*RATES.arms[:2], Arm("fixed", FIXED, (5e-5, 1e-4, 2e-4)), *RATES.arms[3:4]),
    seeds=(0, 1),
    completions=10240,
    settings={**RATES.settings, "eval_prompts": 400},
)

LONG: Settings = {"betas": [0.99, 0.999]}
FEW = Part(
    "few",
    about="Two and four prompts a step, which must not destroy a policy.",
    policies=("path",),
    sizes=((2, 4), (4, 4)),
    arms=(
        *RATES.arms[:2],
        *RATES.arms[3:5],
        Arm("default, first beta 0.99", {**DEFAULT, "rule": "any-momentum", "optimizer_args": LONG}, (1e-5,)),
    ),
    seeds=(31, 32, 33),
    settings={**RATES.settings, "steps": 200},
)

FOUR_RATES = (1e-4, 2e-4, 4e-4)
BASELINES = {"rloo": "rloo", "shrunk": "oblrpo_shrunk", "leave-one-out": "oblrpo", "none": "reinforce"}


def _two_by_two(name: str, baselines: tuple[str, ...], size: tuple[int, int], policies: tuple[str, ...]) -> Part:
    return Part(
        name,
        about="Every baseline with the default rate, and at its own best of three fixed rates.",
        policies=policies,
        sizes=(size,),
        arms=tuple(
            arm
            for baseline in baselines
            for algorithm in ({"algorithm": BASELINES[baseline]},)
            for arm in (
                Arm(f"{baseline}, fixed", {**algorithm, "schedule": "off"}, FOUR_RATES, searched=True),
                Arm(f"{baseline}, default rate", {**algorithm, "schedule": "auto"}, (1e-5,)),
            )
        ),
        seeds=(43, 44, 45, 46, 47),
        search=(41, 42),
        completions=12800,
        settings={**NO_EXTRAS, "eval_steps": 0, "eval_prompts": 512, "save_steps": 0},
    )


GROUPS_OF_4 = _two_by_two("groups_of_4", tuple(BASELINES), (32, 4), ("path", "countdown", "addition", "addition-high"))
GROUPS_OF_2 = _two_by_two("groups_of_2", ("rloo", "shrunk", "none"), (64, 2), ("path", "addition-high"))

SUMS_RATES = (3e-6, 1e-5, 3e-5)
SMOLLM2 = Part(
    "smollm2",
    about="SmolLM2-135M-Instruct learns to add: the default against rivals at the best of three rates.",
    policies=("smollm2-arithmetic",),
    sizes=((16, 4),),
    arms=(
        Arm("default", DEFAULT, (1e-6, 1e-5)),
        Arm("rloo", {"algorithm": "rloo"}, SUMS_RATES, searched=True),
        Arm("grpo", {"algorithm": "grpo"}, SUMS_RATES, searched=True),
        Arm("reinforce", {"algorithm": "reinforce"}, SUMS_RATES, searched=True),
        Arm("kl 0.005", RATES.arms[1].settings, (1e-6,), seeds=(23, 24)),
        Arm("in-steps", {**DEFAULT, "rule": "in-steps"}, (1e-6,), seeds=(23,)),
    ),
    seeds=(23, 24, 25, 26, 27),
    search=(21, 22),
    settings={**NO_EXTRAS, "steps": 20, "eval_prompts": 128, "eval_steps": 5, "save_steps": 5},
)

WINDOW = Part(
    "window",
    about="SmolLM2's sums against the rate that one begins with.",
    policies=("smollm2-arithmetic",),
    sizes=((16, 4),),
    arms=(
        Arm("default", DEFAULT, (1e-6, 1e-5)),
        Arm("default", DEFAULT, (1e-4, 1e-3), seeds=(23,)),  # the run from 1e-5: one first step, shortened
        Arm("grpo", {"algorithm": "grpo"}, (1e-6, 1e-5, 1e-4, 3e-4, 1e-3)),
    ),
    seeds=(23, 24, 25, 26, 27),
    settings=SMOLLM2.settings,
    shares="smollm2",
)

INSTRUCTIONS = Part(
    "instructions",
    about="SmolLM2 learns to follow instructions, with answers of uneven length; RLOO's rate was chosen on seed 0.",
    policies=("smollm2-format",),
    sizes=((8, 4),),
    arms=(Arm("default", DEFAULT, (1e-6,)), Arm("rloo", {"algorithm": "rloo"}, (3e-5,))),
    seeds=(23, 24, 25),
    settings={**NO_EXTRAS, "steps": 12, "eval_prompts": 64, "eval_steps": 4, "save_steps": 4},
)

AFTER_SFT = Part(
    "after_sft",
    about="What reinforcement learning adds to supervised steps: SmolLM2 writes out sums step by step.",
    policies=("smollm2-sft",),
    sizes=((16, 4),),
    arms=(Arm("default", DEFAULT, (1e-6,)),),
    seeds=(23, 24, 25),
    settings={**NO_EXTRAS, "steps": 30, "eval_prompts": 128, "eval_steps": 10, "save_steps": 5},
)

RATIOS = ("sequence", "ppo", "gspo", "cispo", "dppo")
SEVERAL = Part(
    "several",
    about="Two and four updates on each batch, under every ratio.",
    policies=("path",),
    sizes=((32, 4),),
    arms=(
        Arm("one update", DEFAULT, (1e-5,)),
        *(
            Arm(f"{ratio}, {updates} updates", {**DEFAULT, "ratio": ratio, "num_iterations": updates}, (1e-5,))
            for updates in (2, 4)
            for ratio in RATIOS
        ),
    ),
    seeds=(51, 52),
    settings={**NO_EXTRAS, "steps": 120, "eval_steps": 20, "eval_prompts": 512, "save_steps": 0},
)

SHRUNK, LAZY, THRIFTY = (Arm(form, {"algorithm": f"oblrpo_{form}"}, (1e-5,)) for form in ("shrunk", "lazy", "thrifty"))
MEASURED_RLOO = Arm("rloo", {"algorithm": "rloo", "schedule": "auto"}, (1e-5,))
MEASURED_NONE = Arm("none", {"algorithm": "reinforce", "schedule": "auto"}, (1e-5,))
LOOKS = Part(
    "looks",
    about="The three forms of shrinking with few looks, with a look at all prompts in every step, and RLOO.",
    policies=GROUPS_OF_4.policies,
    sizes=GROUPS_OF_4.sizes,
    arms=(SHRUNK, LAZY, THRIFTY, Arm("exact", {**SHRUNK.settings, "look_steps": 1}, (1e-5,)), MEASURED_RLOO),
    seeds=(61, 62, 63),
    completions=GROUPS_OF_4.completions,
    settings=GROUPS_OF_4.settings,
    paced=True,
)
LOOKS_SMOLLM2 = Part(
    "looks_smollm2",
    about="The same on SmolLM2's sums, with the default rate everywhere.",
    policies=SMOLLM2.policies,
    sizes=SMOLLM2.sizes,
    arms=(THRIFTY, Arm("shrunk", SHRUNK.settings, (1e-5,), seeds=(23,)), MEASURED_RLOO, MEASURED_NONE),
    seeds=(23, 24, 25),
    settings=SMOLLM2.settings,
    paced=True,
)
TODAY = Part(
    "today",
    about="The default of today on the policies and seeds of groups_of_4, beside RLOO at its best of three rates.",
    policies=GROUPS_OF_4.policies,
    sizes=GROUPS_OF_4.sizes,
    arms=(
        THRIFTY,
        Arm("rloo, fixed", {"algorithm": "rloo", "schedule": "off"}, FOUR_RATES, searched=True),
        MEASURED_RLOO,
        MEASURED_NONE,
    ),
    seeds=GROUPS_OF_4.seeds,
    search=GROUPS_OF_4.search,
    completions=GROUPS_OF_4.completions,
    settings=GROUPS_OF_4.settings,
    paced=True,
)

EVERY = (
    RATES, CHOICE, FEW, GROUPS_OF_4, GROUPS_OF_2, SMOLLM2, WINDOW, INSTRUCTIONS, AFTER_SFT, SEVERAL, LOOKS,
    LOOKS_SMOLLM2, TODAY,
)  # fmt: skip
PARTS = {part.name: part for part in EVERY}
