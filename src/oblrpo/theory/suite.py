"""Every claim, computed, in the order of the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo.theory import convergence, identities, improvement, smoothness, theorems
from oblrpo.theory.claims import Claim, worst
from oblrpo.theory.convergence import Curve, Slide
from oblrpo.theory.improvement import Ascent
from oblrpo.theory.worlds import FAMILIES, World, bandit, linear_bandit, tree


@dataclass(frozen=True)
class Findings:
    """What `oblrpo theory` shows."""

    claims: list[Claim]
    curves: list[tuple[Slide, dict[str, Curve]]]
    """By what sets the rate."""
    ascents: list[tuple[World, Ascent]]


def shifted(world: World, seed: int = 7) -> Tensor:
    """Probabilities of another policy near this one, to sample from or to be held to."""
    noise = torch.randn(world.logp_QO.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (world.logp_QO + 0.5 * noise).softmax(1)


def everywhere(check: Callable[[World], Claim]) -> Claim:
    """The worst case over all families of policies."""
    return worst([check(make()) for make in FAMILIES.values()])


def run_all(note: Callable[[str], None] = lambda text: None) -> Findings:
    """All claims, in under two minutes on two cores; `note` is told what is going on."""
    note("theorems 1, 2, 4 and 7 on every family of policies")
    claims = _unbiasedness() + _covariances() + _rates() + _baselines()
    note("theorem 3 and the smoothness constant")
    claims += _bounds()
    ascents = []
    for world in (bandit(1, O=3), tree(1), linear_bandit(1, O=3)):
        ascent = improvement.ascend(world, 20, 2)
        ascents.append((world, ascent))
        claims.append(improvement.never_less_than_predicted(world, ascent, 2))
    note("theorems 5 and 6: runs under the exact schedule and at fixed rates")
    curves = []
    for slide in (convergence.climb(), convergence.flat()):
        by_rate = {"schedule": convergence.run(slide, None)}
        for share in (1.0, 0.1):
            by_rate[f"fixed {share:g}/c"] = convergence.run(slide, share / slide.smoothness)
        claims += [convergence.total_decrease(slide), *convergence.decay(slide, by_rate["schedule"])]
        curves.append((slide, by_rate))
    note("what follows for estimators")
    return Findings(claims + _derived(), curves, ascents)


def _unbiasedness() -> list[Claim]:
    small = bandit(0, O=3)
    found = [everywhere(lambda w, name=name: theorems.unbiased(w, name, 2)) for name in ("none", "rloo", "oblr")]  # type: ignore[misc]
    found.append(everywhere(lambda w: theorems.unbiased(w, "oblr", 2, shifted(w))))
    found += [theorems.unbiased(tree(0), name, 3) for name in ("oblr", "oblr_crossfit")]
    return found + [theorems.unbiased_across_prompts(small, name) for name in ("oblr_shrunk", "js")]


def _covariances() -> list[Claim]:
    half = torch.full((2,), 0.5, dtype=torch.float64)
    return [
        everywhere(lambda w: theorems.fixed_baseline_covariance(w, 2, half)),
        everywhere(lambda w: theorems.rloo_covariance(w, 2)),
        theorems.rloo_covariance(tree(0), 4),
        everywhere(lambda w: theorems.group_mean_is_scaled_rloo(w, 2)),
        theorems.batch_covariance(bandit(0, O=3), 2, 2),
    ]


def _rates() -> list[Claim]:
    return [
        everywhere(lambda w: theorems.best_rate(w, 8, 4, 1.0)),
        everywhere(lambda w: theorems.schedule_uses_it(w, 8, 4)),
        everywhere(lambda w: identities.noise_scale(w, 8, 4, 1.0)),
        *identities.plugin_floor(),
    ]


def _baselines() -> list[Claim]:
    return [
        everywhere(theorems.optimal_baseline),
        theorems.optimal_baseline(linear_bandit(0), 2),
        everywhere(lambda w: theorems.optimal_baseline_beats(w, 4)),
        everywhere(lambda w: theorems.true_kl_baseline(w, 0.1, differentiated=False)),
        everywhere(lambda w: theorems.true_kl_baseline(w, 0.1, differentiated=True)),
    ]


def _bounds() -> list[Claim]:
    known = (bandit(0, O=3), tree(0), linear_bandit(0))
    found = [theorems.loss_bound(w, [0.5, 0.5, 0.5], smoothness.constants(w)["osc(F) L"]) for w in known]
    for claims in zip(*(smoothness.bounds_hold(w) for w in known), strict=True):
        found.append(worst(list(claims)))
    found += smoothness.small_rewards_break_the_papers_constant()
    found += [worst([smoothness.kl_bound(w, shifted(w), 0.1) for w in known])]
    return [*found, everywhere(lambda w: identities.shift_leaves_the_hessian(w, 3.0))]


def _derived() -> list[Claim]:
    small = linear_bandit(0, O=3)
    forms = zip(*(identities.kl_forms(make(), shifted(make()), 0.1) for make in FAMILIES.values()), strict=True)
    return [
        everywhere(lambda w: identities.leverage(w, 2)),
        theorems.unbiased(small, "rloo", 4),
        identities.in_sample_is_biased(small, 8),
        identities.in_sample_is_not_unbiased(small, 4),
        identities.when_leave_one_out_loses([linear_bandit(seed, Q=1) for seed in range(100)], 4),
        everywhere(lambda w: identities.truncated_importance(w, shifted(w), 1.2, 0.5)),
        *(worst(list(form)) for form in forms),
    ]
