"""Real runs made sick in one way each, ours and TRL's: is the cause the first finding?

    python -m lab.alarms.sick [--folder runs/sick] [--seeds 3] [--processes 1] [--only CAUSE ...] [--judge]

Each takes a minute or two on one thread, and ends as a folder CAUSE_TRAINER_SIZE_SEED: of ours `metrics.jsonl` and
`config.yaml`, of TRL's GRPOTrainer `trainer_state.json`, once with every step (trl-1) and once with the means of ten
(trl-10), as `logging_steps` 10 has them. Those that are there stay. Then `oblrpo.diagnose` is asked of every folder,
and docs/results/alarms_sick.csv says what it found first; `--judge` does only that. TRL's are made where TRL is
installed (`make env-trl`).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lab.benchmarks.runs import STARTS, rows, train_all
from oblrpo import diagnose
from oblrpo.errors import InputError
from oblrpo.tasks import Problem
from oblrpo.tasks.path import PathTask

SICK = Path("docs/results/alarms_sick.csv")
SIZES = {"small": {"hidden_size": 64, "num_hidden_layers": 3}, "large": {"hidden_size": 128, "num_hidden_layers": 4}}
P, G, LENGTH = 16, 4, 12  # prompts a step, completions a prompt, tokens
ONSET = 40  # the step after which an illness begins that does not begin with the run

Texts = Sequence[str]
Reward = Callable[..., list[float | None]]


def task(completions: Texts, answer: Texts, **_: Any) -> list[float | None]:
    """The task's own: 1 for a route."""
    verify = PathTask().reward
    return [verify(Problem("", gold), text) for gold, text in zip(answer, completions, strict=True)]


def talk(completions: Texts, **_: Any) -> list[float | None]:
    """1 for the longest completion, which is no route."""
    return [len(text) / LENGTH for text in completions]


def talks(completions: Texts, **_: Any) -> list[float | None]:
    """Three times as much for the same, more than a route earns."""
    return [3 * (earned or 0) for earned in talk(completions)]


def letters(completions: Texts, **_: Any) -> list[float | None]:
    """1 for two letters or more, no two of them alike."""
    return [float(len(text) > 1 and text.isalpha() and len(set(text)) == len(text)) for text in completions]


def capitals(completions: Texts, answer: Texts, **_: Any) -> list[float | None]:
    """1 for a route that is spelt in capitals, which no completion ever is: a task that is not learned."""
    return task([text.lower() if text.isupper() else "" for text in completions], answer)


class Outage:
    """The task's own until a step, then nothing for anybody."""

    __name__ = "task"

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, completions: Texts, answer: Texts, **_: Any) -> list[float | None]:
        """As `task`, or 0 for all."""
        self.steps += len(completions) == P * G  # an evaluation has fewer
        return task(completions, answer) if self.steps <= ONSET else [0.0] * len(completions)


@dataclass(frozen=True)
class Cause:
    """A way of being sick."""

    finds: tuple[str, ...]
    """The conditions that are its name."""
    ours: dict[str, Any] | None = field(default_factory=dict)
    """Settings over those of all; None: ours is not made sick so."""
    trl: dict[str, Any] | None = field(default_factory=dict)
    """Arguments of GRPOConfig over those of all; None: TRL's is not."""
    rewards: Callable[[], list[Reward]] = lambda: [task]
    rate: Callable[[int], float] = lambda step: 1.0
    """The factor on TRL's rate at a step."""
    accuracy: bool = False
    """Whether held-out accuracy, of the task itself, is measured in it."""
    sampler: Callable[[Any], Any] | None = None
    """What stands between our trainer and its sampler."""
    frozen: bool = False


class Stale:
    """Samples from the weights that the run began with, whatever it learns."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        policy = deepcopy(inner.policy)
        inner.policy, self.sample = policy, inner.sample

    def sync(self, policy: Any) -> None:
        """Take no notice."""


class Hot:
    """Samples at another temperature than it is asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.sync = inner, inner.sync

    def sample(self, prompts: Any, num_generations: int, max_completion_length: int, temperature: float) -> Any:
        """As asked for, at 1.6 times the temperature."""
        return self.inner.sample(prompts, num_generations, max_completion_length, 1.6 * temperature)


FELL = ("reward fell", "policy collapsed")
CAUSES: dict[str, Cause] = {
    "rate-too-high": Cause(FELL, {"learning_rate": 3e-3}, {"learning_rate": 3e-3}),
    "rate-rather-high": Cause((*FELL, "entropy collapsed"), None, {"learning_rate": 1.5e-3}),
    "rate-switched-up": Cause(
        FELL, {"learning_rate": 5e-3, "warmup_steps": 100}, rate=lambda step: 1.0 if step <= ONSET else 10.0
    ),
    "hacking": Cause(("reward without accuracy",), rewards=lambda: [talk], accuracy=True),
    "traded": Cause(("task traded",), rewards=lambda: [task, talks]),
    "format-saturated": Cause(("format saturated",), rewards=lambda: [letters, capitals]),
    "stale-sampler": Cause(("sampler mismatch",), {"sampler_correction": "measured"}, None, sampler=Stale),
    "hot-sampler": Cause(("sampler mismatch",), {"sampler_correction": "measured"}, None, sampler=Hot),
    "frozen": Cause(("gradient cut off",), None, frozen=True),
    "all-cut": Cause(("all truncated",), {"max_completion_length": 2}, {"max_completion_length": 2}),
    "outage": Cause(("same reward",), rewards=lambda: [Outage()]),
}
STEPS = {"ours": 120, "trl-1": 300}
"""Of the runs of each trainer."""
LOGS = {"ours": "ours", "trl-1": "TRL", "trl-10": "TRL, every 10"}


def make(output: Path, cause: str, trainer: str, start: Path, seed: int) -> str:
    """Make a run; returns how it ended."""
    import torch

    torch.set_num_threads(1)
    try:
        (of_ours if trainer == "ours" else of_trl)(output, CAUSES[cause], start, seed)
        ended = "all steps"
    except (InputError, RuntimeError) as error:  # what is not finite is refused by us, and drawn from by nobody
        ended = str(error)
    (output / "ended.txt").write_text(ended, "utf-8")
    return ended


def of_ours(output: Path, cause: Cause, start: Path, seed: int) -> None:
    """A run of `oblrpo.train`."""
    import oblrpo

    with made_sick(cause):
        oblrpo.train(
            "demo", model=str(start), reward=list(cause.rewards()), progress=False, output=str(output), **{
                "warm_start_steps": 0, "prompts_per_step": P, "num_generations": G, "max_completion_length": LENGTH,
                "steps": STEPS["ours"], "eval_steps": 10 if cause.accuracy else 0, "eval_prompts": 32,
                "eval_samples": 2, "save_steps": 0, "ledger_steps": 0, "threads": 1, "algorithm": "grpo",
                "learning_rate": 2e-4, "seed": seed,
            } | (cause.ours or {}),
        )  # fmt: skip


@contextmanager
def made_sick(cause: Cause) -> Iterator[None]:
    """Let our trainer sample by what the cause puts before its sampler, and measure the task, whatever pays."""
    from oblrpo.rewards import Rewards
    from oblrpo.trainer import loop, setup

    measure, make_sampler, honest = loop.heldout_accuracy, setup.make_sampler, Rewards(PathTask())
    loop.heldout_accuracy = lambda policy, _, *further: measure(policy, honest, *further)
    wrap = cause.sampler or (lambda inner: inner)
    setup.make_sampler = lambda *given, **named: wrap(make_sampler(*given, **named))
    try:
        yield
    finally:
        loop.heldout_accuracy, setup.make_sampler = measure, make_sampler


def of_trl(output: Path, cause: Cause, start: Path, seed: int) -> None:
    """A run of TRL's GRPOTrainer, as it comes but for sizes and the rate."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from oblrpo.evaluation.sampled import heldout_accuracy
    from oblrpo.policy import make_policy
    from oblrpo.rewards import Rewards
    from oblrpo.rollout import make_sampler
    from oblrpo.settings import PolicyConfig, RolloutConfig

    steps, lessons = STEPS["trl-1"], PathTask(seed)
    policy = make_policy(PolicyConfig(model=str(start)))
    problems = [problem for step in range(1, steps + 1) for problem in lessons.train_batch(step, P)]
    texts = [policy.format.text(policy.tokenizer, problem.prompt) for problem in problems]
    args = GRPOConfig(**{
        "output_dir": str(output), "seed": seed, "max_steps": steps, "per_device_train_batch_size": P * G,
        "num_generations": G, "max_completion_length": LENGTH, "learning_rate": 2e-4, "use_cpu": True, "bf16": False,
        "lr_scheduler_type": "constant", "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "dataloader_pin_memory": False,
    } | (cause.trl or {}))  # fmt: skip
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=args.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cause.rate)
    if cause.frozen:
        for weight in policy.model.parameters():
            weight.register_hook(torch.zeros_like)
    rollout = RolloutConfig(prompts_per_step=P, num_generations=G, max_completion_length=LENGTH)
    held_out = policy, Rewards(lessons), lessons.heldout(64), 2, rollout

    class Evaluate(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if cause.accuracy and state.global_step % 10 == 0:
                accuracy = heldout_accuracy(*held_out, state.global_step, make_sampler(policy, rollout))
                policy.model.eval()  # TRL would log what it has of the training with it
                made.log({"eval_accuracy": accuracy.value})
                policy.model.train()

    made = GRPOTrainer(
        policy.model, cause.rewards(), args=args, processing_class=policy.tokenizer, callbacks=[Evaluate()],
        optimizers=(optimizer, schedule),
        train_dataset=Dataset.from_dict({"prompt": texts, "answer": [problem.answer for problem in problems]}),
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    try:
        made.train()
    finally:
        output.mkdir(parents=True, exist_ok=True)
        made.save_state()
        by_tens(output)


def by_tens(output: Path) -> None:
    """Write the log of a run of TRL's as it is with `logging_steps` 10: means, and the last rate and norm."""
    every, text = output.with_name(output.name.replace("_trl-1_", "_trl-10_")), "trainer_state.json"
    state = json.loads((output / text).read_text("utf-8"))
    log = [row for row in state["log_history"] if "reward" in row]
    others = [row for row in state["log_history"] if "reward" not in row]
    for ten in (log[start : start + 10] for start in range(0, len(log) - 9, 10)):
        means = {key: math.fsum(row.get(key, math.nan) for row in ten) / 10 for key in ten[-1]}
        last = {key: ten[-1][key] for key in ("step", "epoch", "num_tokens", "learning_rate", "grad_norm")}
        others.append(means | last)
    state |= {"log_history": sorted(others, key=lambda row: row["step"]), "logging_steps": 10}
    every.mkdir(exist_ok=True)
    (every / text).write_text(json.dumps(state), "utf-8")
    (every / "ended.txt").write_text("as the other\n", "utf-8")


def warm(folder: Path, processes: int) -> dict[tuple[str, int], Path]:
    """Policies of both sizes that can do a third of the task or more, two of each."""
    starts = {(size, seed): folder / "warm" / f"{size}_{seed}" for size in SIZES for seed in range(2)}
    given = STARTS["path"] | {"warm_start_steps": 400, "warm_start_args": {"noise": 0.1}, "steps": 0}
    missing = {
        key: (path, given | {"model_args": SIZES[key[0]], "seed": key[1]})
        for key, path in starts.items()
        if rows(path, 0) is None
    }
    train_all(missing, processes)
    return {key: path / "checkpoints" / "step_0" for key, path in starts.items()}


def judged(folder: Path) -> dict[str, object]:
    """What is found first in a run, and what beside it."""
    cause, trainer, size, seed = folder.name.rsplit("_", 3)
    diagnosis = diagnose(folder)
    first = diagnosis.findings[0] if diagnosis.findings else None
    return {
        "cause": cause, "trainer": trainer, "size": size, "seed": seed, "first": first.name if first else "",
        "right": int(first is not None and first.name in CAUSES[cause].finds), "since": first.since if first else "",
        "beside": "; ".join(finding.name for finding in diagnosis.findings[1:]),
        "follows": "; ".join(finding.name for finding in first.follows) if first else "",
    }  # fmt: skip


def table() -> str:
    """Causes and what was found first, as lines of Markdown, of what docs/results/alarms_sick.csv has."""
    with SICK.open(newline="") as file:
        found = list(csv.DictReader(file))
    lines = ["| cause | trainer | logs | meant to be found first | found first | something else | nothing |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for cause, trainer in sorted({(row["cause"], row["trainer"]) for row in found}, key=lambda pair: pair[::-1]):
        of = [row for row in found if (row["cause"], row["trainer"]) == (cause, trainer)]
        right, nothing = (sum(row[key] == value for row in of) for key, value in (("right", "1"), ("first", "")))
        other = Counter(row["first"] for row in of if row["right"] == "0" and row["first"])
        words = ", ".join(f"{name} {count}" for name, count in other.items()) or 0
        meant = " or ".join(CAUSES[cause].finds)
        lines.append(f"| {cause} | {LOGS[trainer]} | {len(of)} | {meant} | {right} | {words} | {nothing} |")
    right = sum(row["right"] == "1" for row in found)
    beside = sum(bool(row["beside"]) for row in found)
    head = (
        f"Of {len(found)} logs of real runs that were made sick in one way, {right} name the cause first, and {beside} "
        "name something beside it that does not come with it. TRL's runs count twice, as logged every step, and every "
        "ten, in 30 rows:"
    )
    return "\n".join([head, "", *lines, ""])


def main() -> None:
    """Make what is missing, and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/sick"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], metavar="CAUSE", help="causes to make; all if none is given")
    parser.add_argument("--judge", action="store_true", help="make nothing")
    arguments = parser.parse_args()
    if not arguments.judge:
        starts, here = warm(arguments.folder, arguments.processes), find_spec("trl") is not None
        planned = [
            (arguments.folder / f"{cause}_{trainer}_{size}_{seed}", cause, trainer, starts[size, seed // 2 % 2], seed)
            for seed in range(arguments.seeds)
            for trainer in STEPS
            for cause, way in CAUSES.items()
            for size in (SIZES if cause.startswith("rate") else [list(SIZES)[seed % 2]])
            if (way.ours if trainer == "ours" else way.trl if here else None) is not None
            and cause in (arguments.only or CAUSES)
        ]
        missing = [run for run in planned if not (run[0] / "ended.txt").is_file()]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.processes, context) as pool:
            for run, ended in zip(missing, pool.map(make, *zip(*missing, strict=True)), strict=True):
                print(run[0].name, ended, flush=True)
    found = [judged(path.parent) for path in sorted(arguments.folder.glob("*_*_*_*/ended.txt"))]
    with SICK.open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    print(json.dumps([row for row in found if not row["right"]], indent=1), table(), sep="\n")


if __name__ == "__main__":
    main()
