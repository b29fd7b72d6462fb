"""The runs that a comparison takes: where each lies, how it is made, what it waits for, how far it is."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from oblrpo.compare.spec import Spec, Variant
from oblrpo.errors import InputError
from oblrpo.runs import Metrics, RunFolder, parsed, write_atomically
from oblrpo.settings import RolloutConfig, RunConfig, TrainConfig
from oblrpo.workers import cores


@dataclass(eq=False)
class PlannedRun:
    """One training, identified by the `place` of its folder, and the files beside that."""

    name: str  # variant, rate and seed, for people
    config: TrainConfig
    variant: str = ""
    start: PlannedRun | None = None  # the run whose policy this one starts from
    is_warm_start: bool = False  # whether this run only makes the policy that others start from

    def __post_init__(self) -> None:
        self.place = self.config.run.output
        self.folder = RunFolder(Path(self.place))
        self.log = Path(f"{self.place}.log")  # what the run printed
        self.failed_file = Path(f"{self.place}.failed")  # why it ended early, while that is so

    def last_row(self) -> Metrics | None:
        """Return the newest metrics, reading the end of the file only; None before the first step."""
        file = self.folder.metrics_file
        if not file.is_file():
            return None
        with file.open("rb") as metrics:
            metrics.seek(max(0, file.stat().st_size - 2**17))  # room for the last two lines
            lines = metrics.read().split(b"\n")
        row = parsed(lines[-2]) if len(lines) > 1 else None  # the last one is empty, or still being written
        return row if row and isinstance(row.get("step"), int) else None

    def finished(self) -> bool:
        """Whether the last step's metrics are there; of a run of no steps, whether the policy is."""
        if not self.config.run.steps:
            return 0 in self.folder.checkpoint_steps()
        rows = self.folder.read_metrics()
        return bool(rows) and rows[-1]["step"] >= self.config.run.steps and "eval/accuracy" in rows[-1]

    def failure(self) -> tuple[str, str] | None:
        """Return (diverged or failed, why) for a run that ended so."""
        if not self.failed_file.is_file():
            return None
        kind, _, message = self.failed_file.read_text("utf-8", "replace").partition(": ")
        return kind, message.strip()

    def note_failure(self, kind: str, message: str) -> None:
        """Keep why the run ended."""
        self.failed_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.failed_file, f"{kind}: {' '.join(message.split())}\n")

    def diverged(self) -> bool:
        """Whether the run ended in numbers that are not finite."""
        return (self.failure() or ("",))[0] == "diverged"

    def is_done(self) -> bool:
        """Whether there is nothing more to do: it is finished, or diverged, which it would do again."""
        return self.diverged() or self.finished()

    def final_accuracy(self) -> float | None:
        """Return the held-out accuracy after the last step, a mean total reward, which may be negative.

        It is None for a run that has not finished, and where every held-out completion was masked.
        """
        return None if self.is_warm_start or not self.finished() else self.folder.read_metrics()[-1]["eval/accuracy"]

    def check_same(self) -> None:
        """Refuse to continue, or to report, what lies here if it was made with other settings."""
        if not self.folder.config_file.is_file():
            return
        wrong = ""
        if differences := self.folder.differences(self.as_saved()):
            wrong = f"was made with other settings: {differences}"
        elif (rows := self.folder.read_metrics()) and rows[-1]["step"] > self.config.run.steps:
            wrong = f"is at step {rows[-1]['step']} already, but steps is {self.config.run.steps}"
        if wrong:
            raise InputError(f"{self.folder.path} {wrong}; give another --output, or remove that folder.")

    def as_saved(self) -> TrainConfig:
        """Return the config as adjusted when the run began, and the shared start where it lay: both may have moved."""
        saved, config = self.folder.saved_config().policy.model, self.folder.adjusted(self.config)
        if self.start is None or Path(saved).parts[-5:] != Path(config.policy.model).parts[-5:]:
            return config
        return replace(config, policy=replace(config.policy, model=saved))


class Plan:
    """All runs of a comparison under one folder: OUTPUT/runs/VARIANT/lr_RATE/seed_N and OUTPUT/warm/HASH/seed_N."""

    def __init__(self, spec: Spec, output: Path) -> None:
        self.spec, self.output = spec, output
        self._made: dict[tuple[str, float, int], PlannedRun] = {}

    def run(self, variant: Variant, rate: float, seed: int) -> PlannedRun:
        """Return the run of a variant at a rate and seed; it starts from a shared warm start if there can be one."""
        key = variant.name, rate, seed
        if key not in self._made:
            path = self.output / "runs" / variant.name / f"lr_{rate!r}" / f"seed_{seed}"
            config, start = self.spec.config(variant, rate, seed, str(path)), None
            if self.spec.share_warm_start and config.warm_start.begins:
                start = self._warm_start(config)
                policy = replace(config.policy, model=str(start.folder.checkpoint(0)))
                warm = replace(config.warm_start, warm_start_steps=0, sft_data=())
                config = replace(config, policy=policy, warm_start=warm)
            self._made[key] = PlannedRun(f"{variant.name}, rate {rate:g}, seed {seed}", config, variant.name, start)
        return self._made[key]

    def search(self, variant: Variant) -> list[PlannedRun]:
        """Return the runs that choose a variant's rate, seed by seed; all its runs if nothing is to be chosen."""
        return [self.run(variant, rate, seed) for seed in self.search_seeds(variant) for rate in variant.learning_rates]

    def search_seeds(self, variant: Variant) -> tuple[int, ...]:
        """Return the seeds on which every rate of a variant runs."""
        few = self.spec.search_seeds if len(variant.learning_rates) > 1 else 0
        return self.spec.seeds[: few or None]

    def best_rate(self, variant: Variant) -> float | None:
        """Return the best rate over the search seeds; None where no rate has a result on all of them."""
        finals: dict[float, list[float]] = {}
        for rate in variant.learning_rates:
            runs = [self.run(variant, rate, seed) for seed in self.search_seeds(variant)]
            accuracies = [run.final_accuracy() for run in runs if not run.diverged()]
            if None not in accuracies:
                finals[rate] = [accuracy for accuracy in accuracies if accuracy is not None]
        return best_rate(finals)

    def later(self, variant: Variant) -> list[PlannedRun]:
        """Return the best rate's runs on the seeds that did not choose it; none before those that do have ended."""
        rest = self.spec.seeds[len(self.search_seeds(variant)) :]
        ended = rest and all(run.failure() or run.finished() for run in self.search(variant))
        rate = self.best_rate(variant) if ended else None
        return [] if rate is None else [self.run(variant, rate, seed) for seed in rest]

    def all_known(self) -> list[PlannedRun]:
        """Return every run that the plan names by now."""
        return [run for v in self.spec.variants for run in (*self.search(v), *self.later(v))]

    def count(self) -> int:
        """Return how many runs there will be, shared warm starts not counted."""
        return sum(len(self.search(v)) + len(self.spec.seeds) - len(self.search_seeds(v)) for v in self.spec.variants)

    def processes(self) -> int:
        """Return how many trainings run at a time: as the spec says, or one a core, or one if a model is named."""
        named = any(self.spec.config(v, v.learning_rates[0], 0, "").policy.model for v in self.spec.variants)
        return min(self.spec.processes or (1 if named else cores()), self.count())

    def _warm_start(self, config: TrainConfig) -> PlannedRun:
        """Make the supervised start that every variant with this policy, task and demonstrations shares."""
        parts = {part: asdict(getattr(config, part)) for part in ("policy", "warm_start", "task")}
        del parts["policy"]["device"]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:8]
        seed = config.run.seed
        # What comes after the demonstrations is another run's: its accuracy is measured there, and here hardly at all.
        # Rows to learn from leave out all that will be held out there.
        eval_prompts = config.run.eval_prompts if config.warm_start.sft_data else 2
        short = RunConfig(
            output=str(self.output / "warm" / key / f"seed_{seed}"), steps=0, seed=seed, eval_prompts=eval_prompts,
            eval_samples=1, save_total_limit=1, threads=config.run.threads,
        )  # fmt: skip
        rows = config.rollout.prompts_per_micro_batch * config.rollout.num_generations
        rollout = RolloutConfig(
            prompts_per_step=2, num_generations=2, max_completion_length=1, prompts_per_micro_batch=(rows + 1) // 2
        )
        start = TrainConfig(
            run=short, policy=config.policy, warm_start=config.warm_start, task=config.task, rollout=rollout,
            given=config.given,  # as much is held out as there
        )  # fmt: skip
        return PlannedRun(f"warm start, seed {seed}", start, is_warm_start=True)


def best_rate(finals: Mapping[float, Sequence[float]]) -> float | None:
    """Return the best rate, given the final accuracies of each rate's runs that did not diverge.

    The rate with the most of them comes first, and of these the one with the highest mean: whatever rewards are, a rate
    at which fewer runs diverge wins. It is the lowest rate where all runs diverged, and None without a rate.
    """
    means = {rate: statistics.fmean(values) if values else -math.inf for rate, values in finals.items()}
    return max(means, key=lambda rate: (len(finals[rate]), means[rate], -rate), default=None)
