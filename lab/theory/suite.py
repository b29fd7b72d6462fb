"""Every claim, computed, in the order of the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lab.theory import (
    convergence,
    descent,
    exact,
    identities,
    improvement,
    kl,
    leave_one_out,
    lower,
    noise,
    smoothness,
    theorems,
)
from lab.theory.claims import Claim, Measurement, worst
from lab.theory.convergence import Curve, Slide
from lab.theory.descent import Quadratic, SampledWorld
from lab.theory.improvement import Ascent
from lab.theory.worlds import FAMILIES, World, bandit, linear_bandit, transformer, tree


@dataclass(frozen=True)
class Findings:
    """What `python -m lab.theory` shows."""

    claims: list[Claim]
    measurements: list[Measurement]
    curves: list[tuple[Slide, dict[str, Curve]]]
    """Curves of sampled runs on each task, by what sets the rate."""
    ascents: list[tuple[World, Ascent]]


def shifted(world: World, seed: int = 7) -> Tensor:
    """Probabilities of another policy near this one, to sample from or to be held to."""
    noise_QO = torch.randn(world.logp_QO.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (world.logp_QO + 0.5 * noise_QO).softmax(1)


@cache
def family(name: str) -> World:
    """One policy of a family; its derivatives are taken once."""
    return FAMILIES[name]()


def everywhere(check: Callable[[World], Claim]) -> Claim:
    """The worst case over all families of policies."""
    return worst([check(family(name)) for name in FAMILIES])


def columns(rows: Iterable[list[Claim]]) -> list[Claim]:
    """The worst case of each of several statements that were tried together."""
    return [worst(list(column)) for column in zip(*rows, strict=True)]


def run_all(note: Callable[[str], None] = lambda text: None, seed: int = 0) -> Findings:
    """Compute all claims, in under two minutes on one core; `note` is told what goes on, `seed` seeds the sampling."""
    note("assumptions, and theorems 1, 2, 4 and 7 on every family of policies")
    claims, measured = _assumptions()
    claims += _unbiasedness() + _covariances() + _rates() + _baselines()
    found, numbers = noise.schedule_on_one_batch(seed=seed)
    claims += [worst([claim for claim in found if claim.result == result]) for result in dict.fromkeys(
        claim.result for claim in found)]  # fmt: skip
    claims, measured = claims + noise.plugin_floor(), measured + numbers
    note("theorem 3 and the smoothness constant")
    claims += _bounds() + _smoothness() + _kl()
    ascents = []
    for world in (bandit(1, O=3), tree(1), linear_bandit(1, O=3)):
        ascent = improvement.ascend(world, 20, 2)
        ascents.append((world, ascent))
        claims.append(improvement.never_less_than_predicted(world, ascent, 2))
    note("theorems 5 and 6: runs under the exact schedule and at fixed rates")
    found, numbers, curves = _runs(seed)
    claims, measured = claims + found, measured + numbers
    note("what follows for estimators")
    measured += [identities.small_groups_are_no_guide(linear_bandit(number, O=3)) for number in (0, 1)]
    return Findings(claims + _derived(), measured, curves, ascents)


def _assumptions() -> tuple[list[Claim], list[Measurement]]:
    known = (bandit(0, O=3), tree(0), linear_bandit(0))
    claims, measured = smoothness.assumptions_of_a_network(transformer(0, Q=1, length=2))
    return [
        *theorems.baselines_leave_their_output_out(),
        *columns(smoothness.assumptions(w) for w in known),
        *claims,
        everywhere(lambda w: theorems.baselines_are_bounded(w, "oblr", 2)),
    ], measured


def _unbiasedness() -> list[Claim]:
    small = bandit(0, O=3)
    found = [everywhere(lambda w, name=name: theorems.unbiased(w, name, 2)) for name in ("none", "rloo", "oblr")]  # type: ignore[misc]
    found.append(everywhere(lambda w: theorems.unbiased(w, "oblr", 2, shifted(w))))
    found += [theorems.unbiased(tree(0), "oblr", 3), theorems.unbiased(tree(0), "oblr", 3, shifted(tree(0)))]
    return found + [theorems.unbiased_across_prompts(small, name) for name in ("oblr_shrunk", "js")]


def _covariances() -> list[Claim]:
    half = torch.full((2,), 0.5, dtype=torch.float64)
    return [
        everywhere(lambda w: theorems.fixed_baseline_covariance(w, 2, half)),
        everywhere(lambda w: theorems.rloo_covariance(w, 2)),
        theorems.rloo_covariance(tree(0), 4),
        *columns(theorems.group_mean_is_scaled_rloo(family(name), 2) for name in FAMILIES),
        theorems.batch_covariance(bandit(0, O=3), 2, 2),
    ]


def _rates() -> list[Claim]:
    return [
        everywhere(lambda w: descent.best_rate(w, 8, 4, 1.0)),
        everywhere(lambda w: descent.schedule_uses_it(w, 8, 4)),
        everywhere(lambda w: descent.noise_scale(w, 8, 4, 1.0)),
        *columns([
            noise.moments_are_unbiased(bandit(0, O=3), 2, 2),
            noise.moments_are_unbiased(bandit(0, O=2), 4, 1, 2, "none"),
        ]),
    ]  # fmt: skip


def _baselines() -> list[Claim]:
    return [
        everywhere(theorems.optimal_baseline),
        theorems.optimal_baseline(linear_bandit(0), 2),
        everywhere(lambda w: theorems.optimal_baseline(w, 1, shifted(w))),
        everywhere(lambda w: theorems.optimal_baseline_beats(w, 4)),
        everywhere(lambda w: kl.best_baseline(w, 0.1, differentiated=False)),
        everywhere(lambda w: kl.best_baseline(w, 0.1, differentiated=True)),
    ]


def quadratic() -> Quadratic:
    """Places where the bounds on the smoothness are attained."""
    return Quadratic(torch.tensor([0.7, -0.4], dtype=torch.float64), 1.3, 0.5, 2)


def _bounds() -> list[Claim]:
    """Theorems 3 and 5 over every path of a few steps."""
    flat = quadratic()
    found = [descent.loss_bound(flat, [0.5, 0.3, 0.2], flat.c, "c its curvature")]
    for world in (bandit(0, O=3), tree(0), linear_bandit(0)):
        c, label = smoothness.everywhere(world)["osc(F) L"], "c = osc(F) L"
        found.append(descent.loss_bound(SampledWorld(world, 1, 1, exact.fixed(0.3), "b = 0.3"), [0.5] * 3, c, label))
        found.append(
            descent.loss_bound(SampledWorld(world.only(0), 2, 2, exact.named("rloo"), "RLOO"), [0.5], c, label)
        )
        steps = SampledWorld(world, 1, 1, exact.fixed(0.3), "b = 0.3")
        found.append(descent.total_decrease(steps, 3, c))
    network = SampledWorld(family("transformer"), 1, 1, exact.fixed(0.3), "b = 0.3")
    c = descent.curvature_of_steps(network, 0.1)
    found.append(descent.loss_bound(network, [0.1], c, "c the largest curvature along its steps"))
    return [*found, descent.total_decrease(flat, 3, flat.c), descent.decay_bound_is_attained(flat)]


def _smoothness() -> list[Claim]:
    known = (bandit(0, O=3), tree(0), linear_bandit(0))
    return [
        *columns(smoothness.bounds_hold(w) for w in known),
        *columns(
            smoothness.bounds_hold_at_every_place(family(name), 0 if name == "transformer" else 10) for name in FAMILIES
        ),
        smoothness.nearly_attained(),
        *smoothness.small_rewards_break_the_papers_constant(),
        everywhere(lambda w: identities.shift_leaves_the_hessian(w, 3.0)),
        everywhere(lambda w: improvement.second_order_is_the_derivative(w, 1, "none")),
        improvement.second_order_is_the_derivative(linear_bandit(0), 2, "rloo"),
    ]


def _kl() -> list[Claim]:
    beta = 0.1
    forms = columns(kl.forms(family(name), shifted(family(name)), beta) for name in FAMILIES)
    return [
        everywhere(lambda w: smoothness.kl_bound(w, shifted(w), beta)),
        smoothness.kl_bound_is_nearly_attained(0.1),
        smoothness.kl_bound_is_nearly_attained(10.0),
        *forms,
    ]


def _runs(seed: int) -> tuple[list[Claim], list[Measurement], list[tuple[Slide, dict[str, Curve]]]]:
    """Theorems 5 and 6 on sampled runs, and what fixed rates do instead."""
    claims, measured, curves = [], [], []
    for slide in (convergence.climb(), convergence.flat()):
        shares = (None, 1.0, 0.1)
        rates = [None if share is None else share / slide.smoothness for share in shares]
        names = ["schedule" if share is None else f"fixed {share:g}/c" for share in shares]
        by_rate = dict(zip(names, convergence.run(slide, rates, seed=seed), strict=True))
        claims += [
            convergence.total_decrease(slide, by_rate["schedule"]),
            convergence.bounded_decay(slide, by_rate["schedule"]),
        ]
        measured += convergence.measurements(slide, by_rate)
        curves.append((slide, by_rate))
    slide = lower.quartic()
    (curve,) = convergence.run(slide, [None], runs=512, steps=5000, n=1, seed=seed)
    claims += [
        convergence.bounded_decay(slide, curve, 1),
        *lower.norm_falls_slower(slide),
        lower.runs_stay_above_the_floor(slide, curve),
    ]
    return claims, measured + convergence.measurements(slide, {"schedule": curve}), curves


def _derived() -> list[Claim]:
    small = linear_bandit(0, O=3)
    alone = [linear_bandit(number, Q=1) for number in range(1000)]
    steady = [bandit(number, Q=1, O=3) for number in range(3)]
    return [
        everywhere(lambda w: identities.leverage(w, 2)),
        identities.leverage(linear_bandit(0), 3),
        identities.leverage(linear_bandit(0), 3, shifted(linear_bandit(0))),
        theorems.unbiased(small, "rloo", 4),
        identities.in_sample_counts_agree(small, 4),
        worst([identities.in_sample_is_biased(w) for w in (small, *(bandit(number, O=3) for number in range(3)))]),
        identities.in_sample_is_not_unbiased(small, 4),
        worst([leave_one_out.decomposition(w, 4) for w in (alone[0], steady[0], tree(0, Q=1))]),
        *columns(leave_one_out.coefficients(w) for w in (*steady, linear_bandit(0, Q=1, O=3))),
        *leave_one_out.rules_of_thumb(alone, 4),
        *leave_one_out.rules_of_thumb(alone[:300], 16),
        *leave_one_out.rules_of_thumb([bandit(number, Q=1) for number in range(1000)], 4),
        *columns(
            identities.truncated_importance(w, shifted(w), 1.2, G)
            for w, G in ((family(name), 2 if name == "transformer" else 3) for name in FAMILIES)
        ),
    ]
