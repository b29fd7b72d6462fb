"""Figures of a policy by rewards, such as those it was trained with, on rows of data or on held-out problems."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from oblrpo.errors import InputError
from oblrpo.evaluation.completions import as_json
from oblrpo.evaluation.sampled import SavedCompletions, collect
from oblrpo.evaluation.statistics import clustered, pass_at, powers_to
from oblrpo.policy import Policy
from oblrpo.rewards import Rewards
from oblrpo.rollout import TransformersSampler, VLLMSampler
from oblrpo.settings import SamplingConfig
from oblrpo.tasks import Problem


def evaluate_policy(
    policy: Policy | None,
    sampler: Callable[[], TransformersSampler | VLLMSampler],
    problems: Sequence[Problem],
    rewards: Rewards,
    asked: SamplingConfig,
    saved: SavedCompletions,
    threshold: float = 1.0,
    ks: Sequence[int] = (),
    progress: Callable[[int, int, Sequence[str]], None] = lambda done, total, notes: None,
) -> dict[str, Any]:
    """Draw the completions that are not there yet, and return the figures of all, with what they were drawn with.

    Without a policy nothing is drawn; `sampler` is as of `collect`. The figures are written beside the completions.
    """
    questions = [problem.question or problem.prompt for problem in problems]
    if policy is not None:
        collect(policy, sampler, problems, questions, asked.prompt_template, asked, saved, progress, rewards.ask_ids)
    completions, how_drawn = saved.read(questions)
    ids = saved.ids() if rewards.ask_ids else None
    figures = score(problems[: len(completions)], completions, rewards, asked.problems_per_batch, threshold, ks, ids)
    result = {"data": saved.file.stem} | figures | how_drawn
    saved.write_result(result)
    return result


def score(
    problems: Sequence[Problem],
    completions: Sequence[Sequence[str]],
    rewards: Rewards,
    problems_per_batch: int = 16,
    threshold: float = 1.0,
    ks: Sequence[int] = (),
    ids: list[list[int]] | None = None,
) -> dict[str, Any]:
    """Return problems, samples, avg@k (the mean reward), pass@k, the threshold, the rewards, and how many were masked.

    Masked completions count nowhere, nor do problems without any other; pass@k is left out where there are some. The
    intervals of rewards that leave [0, 1] are not cut to it. `ids` are the tokens of all completions.
    """
    n = len(completions[0])
    ks = sorted(set(ks)) or powers_to(n)
    rewards_P: list[list[float]] = []  # of each problem, without those that are masked
    for start in range(0, len(problems), problems_per_batch):
        part = slice(start, start + problems_per_batch)
        texts = [text for texts in completions[part] for text in texts]
        of_part = None if ids is None else ids[start * n : start * n + len(texts)].copy
        values_PG, valid_PG = rewards(list(problems[part]), texts, of_part)
        for values_G, valid_G in zip(values_PG, valid_PG, strict=True):
            rewards_P.append([value for value, valid in zip(values_G, valid_G, strict=True) if valid])
    flat = [value for row in rewards_P for value in row]
    if not flat:
        raise InputError("all completions are masked, so there is no reward to be averaged.")
    bounds = (0.0, 1.0) if 0 <= min(flat) <= max(flat) <= 1 else (-math.inf, math.inf)
    average = clustered([math.fsum(row) / len(row) for row in rewards_P if row], *bounds)
    figures: dict[str, Any] = {"problems": len(problems), "samples": n, "avg@k": {"k": n, **as_json(average)}}
    masked = n * len(problems) - len(flat)
    if not masked:
        passed = [sum(value >= threshold for value in row) for row in rewards_P]
        figures["pass@k"] = {str(k): as_json(clustered([pass_at(k, c, n) for c in passed])) for k in ks}
    return figures | {"rewards": rewards.names, "threshold": threshold, "masked": masked}
