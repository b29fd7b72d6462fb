"""Runs of the trainer on the device: whether two of one seed are the same, and what a real model does in 50 steps."""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lab.benchmarks.gpu.page import OutOfTime, Page

TINY = {
    "prompts_per_step": 4, "num_generations": 2, "max_completion_length": 4, "eval_prompts": 4,
    "model_args": {"hidden_size": 16, "num_hidden_layers": 1}, "warm_start_steps": 2, "warm_start_args": {"batch": 4},
}  # fmt: skip
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {}, "bfloat16 arithmetic": {"bf16": True}, "activation checkpointing": {"gradient_checkpointing": True},
}  # fmt: skip


def parity(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward that a policy of nothing earns now and then: the first character decides."""
    return [float(ord(text[:1] or " ") % 2) for text in completions]


FIXED_RATE = 3e-6
REAL: dict[str, dict[str, Any]] = {
    "oblrpo_thrifty, measured rate": {"algorithm": "oblrpo_thrifty"},
    f"rloo at {FIXED_RATE:g}": {"algorithm": "rloo", "learning_rate": FIXED_RATE},
}
STEPS = 50


def two_runs(page: Page, device: str, small: bool) -> None:
    """A few steps of the demo, twice from one seed, in each precision."""
    import oblrpo

    page.table(
        "The recipe demo, two runs of one seed: largest relative difference of a weight, and of a metric of any step.",
        "arithmetic", "weights", "metrics", "seconds a step", "held-out after",
    )  # fmt: skip
    settings = {"warm_start_steps": 100, "steps": 10, "eval_prompts": 32, "save_steps": 0}
    settings |= TINY | {"steps": 2, "reward": parity} if small else {}
    for name, further in list(PRECISIONS.items())[: 1 if small else None]:
        with TemporaryDirectory() as folder:
            places = [str(Path(folder) / each) for each in ("one", "two")]
            words: dict[str, Any] = settings | further | {"device": device, "progress": False}
            one, two = (oblrpo.train("demo", output=place, **words) for place in places)
            on = {parameter.device.type for parameter in one.policy.model.parameters()}
            page.check(on == {torch.device(device).type}, f"weights lie on {', '.join(sorted(on))}.")
            weights = _difference(one.policy.parameters, two.policy.parameters)
            metrics = max(_apart(*rows) for rows in zip(one.metrics, two.metrics, strict=True))
            taken = statistics.median(row["step_time"] for row in one.metrics[1:])
            page.add(
                name, f"{weights:.1e}", f"{metrics:.1e}", f"{taken:.2f}", f"{one.metrics[-1]['eval/accuracy']:.3f}"
            )
            _random_state(page, one.policy)


def _random_state(page: Page, policy: Any) -> None:
    """`Policy.seeded` draws the same every time, and leaves the device's random state and the CPU's as they were."""
    before, drawn = _states(policy.device), []
    for _ in range(2):
        with policy.seeded(3):
            drawn.append((torch.rand(4, device=policy.device), torch.rand(4)))
    after = _states(policy.device)
    page.check(all(map(torch.equal, before, after)), "a seeded draw changes the random state.")
    page.check(all(map(torch.equal, *drawn)), "two draws of one seed differ.")


def _states(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def _apart(one: dict[str, Any], two: dict[str, Any]) -> float:
    """Largest relative difference of a metric; infinite where one run has a number and the other has none."""
    kept = [{key: value for key, value in row.items() if "time" not in key} for row in (one, two)]
    numbers = [{key: value for key, value in row.items() if isinstance(value, float)} for row in kept]
    if numbers[0].keys() != numbers[1].keys():
        return math.inf
    return max(abs(a - numbers[1][key]) / max(abs(numbers[1][key]), 1e-30) for key, a in numbers[0].items())


def _difference(ours: list[Any], others: list[Any]) -> float:
    """Largest |a - b| / max |b|, over pairs of tensors."""
    with torch.no_grad():
        return max(
            float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(ours, others, strict=True)
        )


def real_model(page: Page, device: str, small: bool, model: Path) -> None:
    """The recipe smollm2-arithmetic, ours beside RLOO at a fixed rate, half of the time each."""
    import oblrpo

    if not small and not model.is_dir():
        page.say(f"Skipped: there is no folder {model}; `make smollm2` makes it, with network.")
        return
    page.table(
        f"{'The demo in small' if small else 'smollm2-arithmetic'}, one seed; accuracy with its standard error.",
        "algorithm", "steps", "seconds a step", "held-out before", "after", "reward, first five", "last five",
        "rate at the end", "peak memory (GB)",
    )  # fmt: skip
    recipe, words = (
        ("demo", TINY | {"steps": 2, "reward": parity}) if small else ("smollm2-arithmetic", {"model": str(model)})
    )
    words = {"steps": STEPS} | words | {"device": device, "save_steps": 0, "progress": False, "ledger_steps": 0}
    for place, (name, further) in enumerate(REAL.items()):
        left = page.deadline - time.monotonic()
        with TemporaryDirectory() as folder:
            output = Path(folder) / "run"
            try:
                with page.until(time.monotonic() + left / (len(REAL) - place)):
                    oblrpo.train(recipe, output=str(output), **words | further)
            except OutOfTime:
                page.say(f"{name} was stopped when its time was up.")
            _summary(page, name, output, device)


def _summary(page: Page, name: str, output: Path, device: str) -> None:
    file = output / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    steps = [row for row in rows if row["step"]]
    held_out = [row for row in rows if row.get("eval/accuracy") is not None]
    if not steps:
        page.say(f"{name} made no step.")
        return
    accuracy = [f"{row['eval/accuracy']:.3f} +- {row['eval/accuracy_stderr']:.3f}" for row in held_out]
    rewards = [f"{statistics.mean(row['reward'] for row in part):.3f}" for part in (steps[:5], steps[-5:])]
    taken = statistics.median(row["step_time"] for row in steps if row not in held_out or len(steps) < 3)
    peak = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device.startswith("cuda") else ""
    after = accuracy[-1] if len(accuracy) > 1 else "not measured"
    page.add(
        name, len(steps), f"{taken:.2f}", accuracy[0], after, *rewards, f"{steps[-1]['learning_rate']:.1e}", peak
    )  # fmt: skip
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
