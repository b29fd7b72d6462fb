"""Evaluations that draw: kept on disk, so that one that was stopped continues; and of a policy in training."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from oblrpo.errors import InputError
from oblrpo.evaluation.evaluate import (
    Estimate,
    Evaluation,
    Grader,
    Ids,
    batches_of,
    clustered,
    evaluate,
    read_completions,
)
from oblrpo.memory import free_bytes
from oblrpo.objects import as_stable_json
from oblrpo.policy import Policy
from oblrpo.policy.model import LEAST_COMPLETION
from oblrpo.rewards import Rewards
from oblrpo.rollout import Rollouts, Sampler, TransformersSampler, VLLMSampler, sample_problems
from oblrpo.rollout.room import rows_at_once, sampling_memory
from oblrpo.rollout.variety import answers_of
from oblrpo.runs import locked, read_rows, write_atomically
from oblrpo.seeds import seed_of
from oblrpo.settings import RolloutConfig, SamplingConfig
from oblrpo.tasks.episode import Episode, logged
from oblrpo.tasks.task import Problem

# The size of a batch is among them because it decides the draws.
OF_DRAWS = ("samples", "temperature", "top_p", "problems_per_batch", "seed")
"""The settings, beside model, prompts and length, that completions depend on."""

LONGEST = 2048  # most tokens of a completion, where it is not set


class SavedCompletions:
    """The files FOLDER/NAME.jsonl, a row for each completion, and FOLDER/NAME.settings.json, how they were drawn."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"{name}.jsonl"
        self.settings_file = folder / f"{name}.settings.json"

    def open(self, settings: dict[str, Any]) -> None:
        """Begin an evaluation, or resume one of the same settings."""
        if self.settings_file.is_file():
            old = self.settings()
            changed = [key for key in old | settings if key != "notes" and old.get(key) != settings.get(key)]
            if changed:
                differences = ", ".join(f"{key} (was {old.get(key)!r}, now {settings.get(key)!r})" for key in changed)
                raise InputError(f"{self.file} was sampled with other settings: {differences}; give another --output.")
            return
        if self.file.exists():
            raise InputError(f"{self.file} exists, but its settings file does not; give another --output.")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.settings_file, json.dumps(settings, indent=1))
        except OSError as error:
            raise InputError(f"cannot write to {self.file.parent}: {error.strerror}.") from None

    @property
    def max_num_seqs(self) -> int:
        """How many are sampled at once in what is there, on which its draws depend; 0 if nothing is."""
        return int(self.settings().get("max_num_seqs", 0)) if self.settings_file.is_file() else 0

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that are there, without a last line that was not finished."""
        return read_rows(self.file) if self.file.is_file() else []

    def settings(self) -> dict[str, Any]:
        """Return what the completions were drawn with."""
        try:
            return dict(json.loads(self.settings_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{self.settings_file} cannot be read ({error}); give another --output.") from None

    def read(self, questions: Sequence[Any]) -> tuple[list[list[str]], list[list[int]] | None, dict[str, Any]]:
        """Return completions of the questions asked, their tokens where all are kept, and how they were drawn."""
        rows = sorted(self.rows(), key=lambda row: row.get("index", 0))
        if not rows:
            raise InputError(f"{self.file} holds no completions to grade; check --output.")
        settings = self.settings()
        questions = questions[: settings.get("problems")]
        if settings.get("questions") != digest_of_questions(questions):
            raise InputError(
                f"{self.file} answers other questions than those of the data; give the data that it was sampled for."
            )
        lengths = {}
        if counted := [row for row in rows if "tokens" in row]:
            lengths["mean_length"] = sum(row["tokens"] for row in counted) / len(counted)
            lengths["clipped_ratio"] = sum(bool(row["clipped"]) for row in counted) / len(counted)
        ids: list[Any] = [row.get("completion_ids") for row in rows]
        completions = read_completions(self.file, len(questions))
        return completions, None if None in ids else ids, lengths | {"settings": settings}

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the figures to FOLDER/NAME.result.json."""
        write_atomically(self.file.with_suffix(".result.json"), json.dumps(result, indent=1))


def evaluate_saved(
    policy: Policy | None,
    sampler: Callable[[], TransformersSampler | VLLMSampler],
    problems: Sequence[Problem],
    grade: Grader,
    sampling: SamplingConfig,
    saved: SavedCompletions,
    ks: Sequence[int] = (),
    progress: Callable[[int, int, Sequence[str]], None] = lambda done, total, notes: None,
    with_ids: bool = False,
) -> tuple[Evaluation, dict[str, Any]]:
    """Draw the completions that are missing, grade all of them, and return what they earned and how they were drawn.

    Without a policy nothing is drawn. `ks` are as of `sizes`, and the rest is as of `collect`.
    """
    if policy is not None:
        collect(policy, sampler, problems, sampling, saved, progress, with_ids)
    completions, ids, how_drawn = saved.read(questions_of(problems))
    problems, ids = problems[: len(completions)], ids if with_ids else None
    batches = batches_of(problems, completions, sampling.problems_per_batch, ids)
    return evaluate(batches, len(completions[0]), grade, ks), how_drawn


def collect(
    policy: Policy,
    sampler: Callable[[], TransformersSampler | VLLMSampler],
    problems: Sequence[Problem],
    sampling: SamplingConfig,
    saved: SavedCompletions,
    progress: Callable[[int, int, Sequence[str]], None] = lambda done, total, notes: None,
    with_ids: bool = False,
) -> None:
    """Draw completions {index, sample, completion, tokens, clipped} of every problem; those on disk already are kept.

    Every batch has a seed of its own, so an evaluation that was stopped and continued gives what it would have given.
    `sampler` returns what draws, and is called only where something is missing. `progress` is called with the numbers
    of problems that are done, and of all, and at first with what a user should know before. Rows may have
    `completion_ids`, too.
    """
    prompts, length = [problem.prompt for problem in problems], sampling.max_completion_length
    least = LEAST_COMPLETION if length is None else length
    longest, length = policy.room(prompts, LONGEST if length is None else length, least)
    length = sampling.fit(longest, length, least)
    settings = settings_of(policy, problems, sampling, length)
    if sampling.sampler == "transformers":
        asked, most = {"samples": sampling.samples}, min(sampling.problems_per_batch, len(problems))
        settings["max_num_seqs"] = sampling.max_num_seqs or saved.max_num_seqs
        settings["max_num_seqs"] = settings["max_num_seqs"] or rows_at_once(
            sampling_memory(policy), free_bytes(policy.device), most, asked, longest, length
        )
    saved.open(settings)
    samples, size, total = sampling.samples, sampling.problems_per_batch, len(problems)
    with locked(saved.file):
        rows = saved.rows()  # of one batch after another
        done = total if len(rows) == total * samples else len(rows) // (size * samples) * size
        progress(done, total, settings.get("notes", ()))
        if done < total:  # without an unfinished batch or line
            write_atomically(saved.file, "".join(json.dumps(row) + "\n" for row in rows[: done * samples]))
        for start in range(done, total, size):
            draws_with, part = sampler(), prompts[start : start + size]
            if isinstance(draws_with, TransformersSampler):
                draws_with = replace(draws_with, max_num_seqs=settings["max_num_seqs"])
            with policy.seeded(seed_of(sampling.seed, start)):
                drawn = draws_with.sample(part, samples, length, sampling.temperature, sampling.top_p)
            with saved.file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in _rows(drawn, start, samples, with_ids))
            progress(min(start + size, total), total, ())


def _rows(drawn: Rollouts, start: int, samples: int, with_ids: bool) -> list[dict[str, Any]]:
    """The rows of a batch that begins with problem `start`."""
    figures = zip(drawn.completions, drawn.sequences.lengths_S.tolist(), drawn.clipped_S.tolist(), strict=True)
    rows = [
        {"index": start + s // samples, "sample": s % samples, "completion": text, "tokens": tokens, "clipped": clipped}
        for s, (text, tokens, clipped) in enumerate(figures)
    ]
    return [row | {"completion_ids": ids} for row, ids in zip(rows, drawn.ids(), strict=True)] if with_ids else rows


def settings_of(policy: Policy, problems: Sequence[Problem], sampling: SamplingConfig, length: int) -> dict[str, Any]:
    """Return all that completions of at most `length` tokens depend on, with one prompt as the model reads it."""
    first = problems[0].prompt
    return {
        "model": policy.name,
        "weights": digest_of_weights(policy.model),
        "problems": len(problems),
        "questions": digest_of_questions(questions_of(problems)),
        "prompt_template": sampling.prompt_template,
        "first_prompt": policy.format.text(policy.tokenizer, first),
        "chat": bool(policy.format.chat),
        **({"notes": notes} if (notes := policy.format.notes(policy.tokenizer, [first])) else {}),
        "ends": policy.end_words,
        "precision": "bfloat16 arithmetic" if policy.bf16 else str(policy.model.dtype).removeprefix("torch."),
        **{name: getattr(sampling, name) for name in OF_DRAWS},
        "max_completion_length": length,
        **({"sampler": "vllm", "sampler_dtype": sampling.vllm.dtype} if sampling.sampler == "vllm" else {}),
        "version": version("oblrpo"),
    }


def questions_of(problems: Sequence[Problem]) -> list[Any]:
    """Return problems without their template, by which completions are known to answer the same data."""
    return [problem.question or problem.prompt for problem in problems]


def digest_of_questions(questions: Sequence[Any]) -> str:
    """Return one word for all questions, texts or messages, in their order."""
    return hashlib.blake2b(json.dumps(as_stable_json(questions)).encode(), digest_size=6).hexdigest()


@torch.no_grad()
def digest_of_weights(model: torch.nn.Module) -> str:
    """Return a short digest of some entries of each weight: the same name may hold other weights tomorrow."""
    digest = hashlib.blake2b(digest_size=6)
    for parameter in model.parameters():
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 64)].to("cpu", torch.float64)
        digest.update(json.dumps([len(flat), *some.tolist()]).encode())
    return digest.hexdigest()


def heldout_accuracy(
    policy: Policy,
    rewards: Rewards,
    problems: list[Problem],
    samples: int,
    rollout: RolloutConfig,
    seed: int,
    sampler: Sampler,
    swap: bool = False,
) -> tuple[Estimate, list[dict[str, Any]], Estimate | None]:
    """Return avg@k of the policy, sampled as in training, and its completions; torch's random state is put back.

    A completion is {prompt, answer, completion, reward}, those of a prompt side by side; a masked one has no reward.
    With `swap` they are graded once more, as if each answered another prompt, one with another answer (`answers_of`).
    The last value is what they lose by that, a mean over prompts; None where all prompts have one answer.
    """
    rows, losses_P = list[dict[str, Any]](), list[float]()
    known = ([each.answer for each in problems], [each.columns for each in problems], [each.text for each in problems])
    others_P = _others(answers_of(*known)) if swap else []

    def drawn() -> Iterator[tuple[list[Problem], Sequence[str | Episode], Ids]]:
        at_once = max(1, rollout.prompts_per_step * rollout.num_generations // samples)
        for start in range(0, len(problems), at_once):
            part = problems[start : start + at_once]
            draws = sample_problems(sampler, part, samples, rollout.max_completion_length, rollout.temperature)
            yield part, draws.said, draws.ids

    def graded(*batch: Any) -> tuple[list[list[float]], list[list[bool]]]:
        values_PG, valid_PG = rewards(*batch)
        return torch.tensor(values_PG, device="cpu").tolist(), valid_PG  # in the precision that a step has them in

    def grade(
        part: list[Problem], texts: Sequence[str | Episode], ids: Ids
    ) -> tuple[list[list[float]], list[list[bool]]]:
        first, (values_PG, valid_PG) = len(rows) // samples, graded(part, texts, ids)
        for s, said in enumerate(texts):
            p, g = divmod(s, samples)
            asked = {"prompt": part[p].text, "answer": part[p].answer} | logged(said)
            rows.append(asked | {"reward": values_PG[p][g] if valid_PG[p][g] else None})
        if others_P:
            swapped = graded([problems[p] for p in others_P[first : first + len(part)]], texts, ids)
            for own, counts, other, also in zip(values_PG, valid_PG, *swapped, strict=True):
                both = [a - b for a, b, x, y in zip(own, other, counts, also, strict=True) if x and y]
                losses_P.extend([math.fsum(both) / len(both)] if both else [])
        return values_PG, valid_PG

    with policy.seeded(seed):
        accuracy = evaluate(drawn(), samples, grade).average()
    return accuracy, rows, clustered(losses_P, -math.inf, math.inf) if losses_P else None


def _others(answers_P: Sequence[str]) -> list[int]:
    """For each prompt the next one with another answer; empty where there is none."""
    P, other = len(answers_P), 0
    others_P = [other] * P
    for p in reversed(range(2 * P - 1)):  # round twice, for the next of the last ones is among the first
        other = (p + 1) % P if answers_P[(p + 1) % P] != answers_P[p % P] else other
        others_P[p % P] = other
    return others_P if len(set(answers_P)) > 1 else []
