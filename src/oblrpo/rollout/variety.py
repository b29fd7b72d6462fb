"""How much the completions of a step differ: what shows a policy that says one thing to every prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def variety(texts: Sequence[Hashable], count_V: Tensor, answers: Sequence[Hashable]) -> dict[str, float]:
    """The metrics of how much the completions of a step differ.

    With n_ta completions with text t to prompts whose right answer is a: of the pairs of completions to prompts with
    different answers, the share (sum_t n_t^2 - sum_ta n_ta^2) / (n^2 - sum_a n_a^2) is the same text, which right
    completions are not.

    Args:
        texts: what the policy has said in each of n completions, as text or tokens.
        count_V: how often each token is in them (`token_counts`).
        answers: the right answer to each completion's prompt, or what stands for it (`answers_of`).
    """
    n, n_t, n_a, n_ta = len(texts), Counter(texts), Counter(answers), Counter(zip(texts, answers, strict=True))
    pairs, same = n * n - _squares(n_a), _squares(n_t) - _squares(n_ta)
    tokens = int(count_V.sum())
    return {
        "completions/distinct_ratio": len(n_t) / n,
        "completions/commonest_ratio": max(n_t.values()) / n,
        "completions/commonest_token_ratio": int(count_V.max()) / tokens if tokens else math.nan,
        "completions/same_ratio": same / pairs if pairs else math.nan,
    }


def _squares(counts: Counter[Any]) -> int:
    return sum(count * count for count in counts.values())


def answers_of(answers: Iterable[str], columns: Iterable[Mapping[str, Any]], prompts: Iterable[str]) -> list[str]:
    """What tells prompts of a step apart, for each: its answer, where there are any; else its other columns; else it.

    Columns that are the same for all prompts tell nothing, and are no stand-in for answers.
    """
    if any(known := list(answers)):
        return known
    further = [repr(each) for each in columns]
    return further if len(set(further)) > 1 else list(prompts)


def token_counts(ids_SC: Tensor, own_SC: Tensor, ends: Sequence[int], size: int) -> Tensor:
    """How often each of `size` tokens is among the policy's own, (V,); 0 for those that end a completion."""
    count_V = torch.bincount(ids_SC[own_SC.bool()], minlength=size)
    count_V[list(ends)] = 0
    return count_V
