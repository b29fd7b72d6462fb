"""A policy's completions of a benchmark: sampled in batches, kept on disk as they come, continued after a stop."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from oblrpo import __version__
from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.rollout import sample
from oblrpo.runs import held, read_rows, write_atomically
from oblrpo.seeds import seed_of
from oblrpo.tasks.benchmarks import BenchmarkProblem, to_train_on
from oblrpo.tasks.task import Problem


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    samples: int
    """Completions of each problem."""
    temperature: float
    """Temperature of the distribution; 0 always takes the most probable token."""
    top_p: float
    """Share of the distribution, from its top, that tokens are drawn from."""
    max_completion_length: int
    """Most tokens of a completion."""
    problems_per_batch: int
    """Problems that are sampled at once; part of the settings because it decides the draws."""
    seed: int
    """Seed that the seeds of the batches are made of."""


class SavedCompletions:
    """The files FOLDER/NAME.jsonl, a row for each completion, and FOLDER/NAME.settings.json, how they were drawn."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"{name}.jsonl"
        self.settings_file = folder / f"{name}.settings.json"

    def open(self, settings: dict[str, Any]) -> None:
        """Begin an evaluation, or go on with one of the same settings.

        Raises:
            InputError: the folder cannot be written, or holds completions drawn with other settings.
        """
        if self.settings_file.is_file():
            self._check_same(settings)
            return
        if self.file.exists():
            raise InputError(f"{self.file} is there, but not what it was drawn with; give another --output.")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.settings_file, json.dumps(settings, indent=1))
        except OSError as error:
            raise InputError(f"cannot write to {self.file.parent}: {error.strerror}.") from None

    def _check_same(self, settings: dict[str, Any]) -> None:
        old = self.settings()
        changed = [key for key in settings if old.get(key) != settings[key]]
        if changed:
            differences = ", ".join(f"{key} (was {old.get(key)!r}, now {settings[key]!r})" for key in changed)
            raise InputError(f"{self.file} was drawn with other settings: {differences}; give another --output.")

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that are there, without a last line that was not finished."""
        return read_rows(self.file) if self.file.is_file() else []

    def settings(self) -> dict[str, Any]:
        """Return what the completions were drawn with.

        Raises:
            InputError: the file of settings is not there, or damaged.
        """
        try:
            return dict(json.loads(self.settings_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{self.settings_file} cannot be read ({error}); give another --output.") from None

    def check_questions(self, questions: Sequence[Any]) -> None:
        """Refuse to grade the completions by the answers to other questions.

        Raises:
            InputError: these are not the questions that were asked.
        """
        if self.settings().get("questions") not in {digest_of_questions(questions), None}:  # None: of an older version
            raise InputError(
                f"{self.file} answers other questions than the data holds; give the data it was drawn for."
            )

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the figures to FOLDER/NAME.result.json."""
        write_atomically(self.file.with_suffix(".result.json"), json.dumps(result, indent=1))

    def keep(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replace all rows by these."""
        write_atomically(self.file, "".join(json.dumps(row) + "\n" for row in rows))

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def collect(
    policy: Policy,
    problems: Sequence[BenchmarkProblem],
    template: str,
    sampling: Sampling,
    saved: SavedCompletions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Return rows {index, sample, completion, tokens, clipped} of every problem; those on disk already are kept.

    Every batch has a seed of its own, so an evaluation that was stopped and continued gives what it would have given.

    Raises:
        InputError: a prompt does not fit, the folder holds another evaluation, or another process is at this one.
    """
    questions = [problem.question for problem in problems]
    return collect_asked(policy, to_train_on(problems, template), questions, template, sampling, saved, progress)


def collect_asked(
    policy: Policy,
    asked: Sequence[Problem],
    questions: Sequence[Any],
    template: str,
    sampling: Sampling,
    saved: SavedCompletions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Do what `collect` does for problems whose `questions` have been put into the template already.

    Raises:
        InputError: as `collect` raises.
    """
    policy.lengths([problem.prompt for problem in asked], sampling.max_completion_length)
    saved.open(settings_of(policy, asked[0].prompt, questions, template, sampling))
    with held(saved.file):
        return _collect(policy, asked, sampling, saved, progress)


def _collect(
    policy: Policy,
    asked: Sequence[Problem],
    sampling: Sampling,
    saved: SavedCompletions,
    progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    size = sampling.problems_per_batch
    starts = range(0, len(asked), size)
    rows = saved.rows()
    have = Counter(row.get("index") for row in rows)
    done = {
        start
        for start in starts
        if all(have[index] == sampling.samples for index in range(start, min(start + size, len(asked))))
    }
    kept = [row for row in rows if row["index"] // size * size in done]
    if len(done) < len(starts):
        saved.keep(kept)  # without a last line that was not finished, which the next would go on
    for start in starts:
        if start not in done:
            drawn = _batch(policy, asked[start : start + size], start, sampling)
            saved.append(drawn)
            kept += drawn
        progress(min(start + size, len(asked)), len(asked))
    return sorted(kept, key=lambda row: (row["index"], row["sample"]))


def _batch(policy: Policy, asked: Sequence[Any], start: int, sampling: Sampling) -> list[dict[str, Any]]:
    with policy.seeded(seed_of(sampling.seed, start)):
        drawn = sample(
            policy,
            [problem.prompt for problem in asked],
            sampling.samples,
            sampling.max_completion_length,
            sampling.temperature,
            sampling.top_p,
        )
    lengths, clipped = drawn.sequences.lengths_S.tolist(), drawn.clipped_S.tolist()
    return [
        {
            "index": start + s // sampling.samples,
            "sample": s % sampling.samples,
            "completion": text,
            "tokens": lengths[s],
            "clipped": clipped[s],
        }
        for s, text in enumerate(drawn.completions)
    ]


def settings_of(
    policy: Policy, prompt: Any, questions: Sequence[Any], template: str, sampling: Sampling
) -> dict[str, Any]:
    """Return all that the completions depend on, with one whole prompt as the model reads it."""
    return {
        "model": policy.name,
        "weights": digest_of_weights(policy.model),
        "problems": len(questions),
        "questions": digest_of_questions(questions),
        "prompt_template": template,
        "first_prompt": policy.format.text(policy.tokenizer, prompt),
        "chat": policy.format.chat,
        "precision": "bfloat16 arithmetic" if policy.bf16 else str(policy.model.dtype).removeprefix("torch."),
        **asdict(sampling),
        "version": __version__,
    }


def digest_of_questions(questions: Sequence[Any]) -> str:
    """Return one word for all questions, texts or messages, in their order."""
    return hashlib.blake2b(json.dumps(list(questions)).encode(), digest_size=6).hexdigest()


@torch.no_grad()
def digest_of_weights(model: torch.nn.Module) -> str:
    """Return a short digest of some entries of each weight: the same name may hold other weights tomorrow."""
    digest = hashlib.blake2b(digest_size=6)
    for parameter in model.parameters():
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 64)].to("cpu", torch.float64)
        digest.update(json.dumps([len(flat), *some.tolist()]).encode())
    return digest.hexdigest()


def lengths(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean length in tokens, and the share of completions that were cut at the longest length."""
    known = [row for row in rows if "tokens" in row]
    if not known:
        return {}
    return {
        "mean_length": sum(row["tokens"] for row in known) / len(known),
        "clipped_ratio": sum(bool(row["clipped"]) for row in known) / len(known),
    }
