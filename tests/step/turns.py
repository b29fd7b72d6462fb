"""Completions in which a tool has words, as plain lists; and what loop autograd says of the policy's own tokens alone.

Nothing here reads `Sequences`: each row goes through the model by itself, and its own tokens are picked one by one.
"""

import functools
from dataclasses import dataclass, replace

import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.policy import Sequences
from oblrpo.policy.sequences import pad
from oblrpo.rollout import Rollouts
from oblrpo.rollout.rollouts import texts_of
from oblrpo.scores import Features

WORDS = [
    ["oottoo", "ttooo", "oott", "ooo"],
    ["tttt", "otto", "ototo", "oo"],
    ["oootttooo", "o", "ttot", "oottoottoo"],
    ["tot", "oo", "tt", "toott"],
]
"""Whose each token of a completion is: o is the policy's own, t is of a tool, by prompt and output."""
P, G, LONGEST = len(WORDS), len(WORDS[0]), max(len(words) for group in WORDS for words in group)
EMPTY = [row for row, words in enumerate(words for group in WORDS for words in group) if "o" not in words]
PROMPTS = ["a", "bcd", "ef", "ghij"]


@dataclass(frozen=True)
class Row:
    """A prompt, a completion, and whose its tokens are."""

    prompt: list[int]
    completion: list[int]
    words: str

    @property
    def own(self):
        """The places of the policy's own tokens in the completion."""
        return [place for place, whose in enumerate(self.words) if whose == "o"]


def rows_of(policy, words=WORDS, seed=1):
    """Completions of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    prompts = policy.encode(PROMPTS[: len(words)], room=0)
    return [
        Row(prompts[p], torch.randint(97, 123, (len(each),), generator=generator).tolist(), each)
        for p, group in enumerate(words)
        for each in group
    ]


@torch.no_grad()
def rollouts_of(policy, rows, temperature=1.0, counted=False):
    """The rows as a sampler of turns returns them; `counted` takes the words of tools for the policy's own.

    Features are those that a sampler sums over its own draws.
    """
    device, padding = policy.device, policy.pad_token
    prompt_SQ, prompt_mask_SQ = pad([row.prompt for row in rows], padding, left=True, device=device)
    completion_SC, mask_SC = pad([row.completion for row in rows], padding, left=False, device=device)
    own, _ = pad([[int(counted or whose == "o") for whose in row.words] for row in rows], 0, left=False, device=device)
    sequences = Sequences(
        torch.cat([prompt_SQ, completion_SC], 1), torch.cat([prompt_mask_SQ, mask_SC], 1),
        torch.cat([torch.zeros_like(prompt_SQ), own], 1), prompt_SQ.shape[1],
    )  # fmt: skip
    features = policy.logps(sequences, temperature).features
    clipped_S = torch.tensor([row.words[-1] == "t" for row in rows])
    return Rollouts(sequences, texts_of(policy, completion_SC, mask_SC), clipped_S, None, features)


@dataclass(frozen=True)
class Truth:
    """What a row's own distributions say of it, a list over rows."""

    logps: list[torch.Tensor]
    """log pi of each own token, with a graph."""
    entropies: list[torch.Tensor]
    logit_norms: list[torch.Tensor]

    @property
    def logps_S(self):
        """log pi(o|q) of every completion."""
        return torch.stack([logps.sum() for logps in self.logps])


SCORES = {}


def scores_of(policy, rows, temperature=1.0):
    """The score of every row, (S, N), by one backward each; kept for tests at the same weights."""
    weights = torch.cat([p.detach().flatten() for p in policy.parameters])
    key = temperature, float(weights.sum()), float(weights.norm()), str(rows)
    if key not in SCORES:
        SCORES[key] = scores(policy, truth_of(policy, rows, temperature).logps_S)
    return SCORES[key]


def truth_of(policy, rows, temperature=1.0):
    """Each row by itself, by the whole model, without padding."""
    logps, entropies, norms = [], [], []
    for row in rows:
        logits_TV = policy.model(input_ids=torch.tensor([row.prompt + row.completion]), use_cache=False).logits[0]
        of_TV = (logits_TV / temperature).log_softmax(-1)
        places = torch.tensor([len(row.prompt) - 1 + place for place in row.own], dtype=torch.long)
        tokens = torch.tensor([row.completion[place] for place in row.own], dtype=torch.long)
        of_NV = of_TV[places]
        logps.append(of_NV[torch.arange(len(tokens)), tokens])
        p_NV = of_NV.detach().exp()
        entropies.append(-(p_NV * of_NV.detach()).sum(1))
        onehot_NV = torch.nn.functional.one_hot(tokens, p_NV.shape[1])
        norms.append((onehot_NV - p_NV).square().sum(1))
    return Truth(logps, entropies, norms)


def scores(policy, scored_S):
    """The gradient of each of some numbers, (S, N), by one backward each; 0 where a number depends on nothing."""
    parameters, rows = policy.parameters, []
    for scored in scored_S:
        found = torch.autograd.grad(scored, parameters, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def grads(policy):
    """The gradient in `.grad`, 0 where there is none."""
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in policy.parameters])


def close(found, wanted, rtol=1e-9):
    """Compare in the norm; both must be more than nothing."""
    assert float(wanted.norm()) > 0
    assert found.shape == wanted.shape
    assert float((found - wanted).norm()) <= rtol * float(wanted.norm())


@dataclass(frozen=True)
class Turns:
    """A policy with rows of turns."""

    policy: object
    rows: list[Row]
    counted: bool = False
    """Whether the words of tools are taken for the policy's own."""

    def rollouts(self, temperature=1.0):
        """The rows as a sampler returns them."""
        return rollouts_of(self.policy, self.rows, temperature, self.counted)


def must_notice(check):
    """A test that has to pass on `turns`, and to fail where the words of tools are taken for the policy's own."""

    @functools.wraps(check)
    def test(turns, **given):
        check(turns, **given)
        with pytest.raises((AssertionError, InputError, ValueError)):
            check(replace(turns, counted=True), **given)

    return test


def in_columns(rows, values, otherwise=0.0):
    """Numbers of own tokens, a list over rows, in the columns of the completions, (S, C)."""
    result_SC = torch.full((len(rows), max(len(row.words) for row in rows)), otherwise, dtype=torch.float64)
    for row, into_C, of_row in zip(rows, result_SC, values, strict=True):
        into_C[row.own] = of_row.detach().double()
    return result_SC


def features_of(truth):
    """The features that these figures add up to."""
    sums = ([each.sum() for each in of] for of in (truth.logps, truth.entropies, truth.logit_norms))
    lengths = torch.tensor([float(len(each)) for each in truth.logps], dtype=torch.float64)
    return Features(lengths, *(torch.stack(each).detach() for each in sums))
