"""When plain leave-one-out loses to RLOO: exactly, in the limit of large groups, and by the rule of thumb. Derived.

For baselines b_j = b(other outputs), unbiased both, with E over one prompt's outputs, n = G - 1:

tr Cov = (1/G) (E[w (F - b*)^2] + E[w] E[(b - b*)^2]) + ((G-1)/G) E||E_o[b(o, G-2 others) s_o]||^2 - (1/G) ||E[F s]||^2

so that two of them differ by how far their baselines lie from b* and by what the outputs of a group do to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.theory import exact
from lab.theory.claims import Claim, interval, romberg
from lab.theory.worlds import World


@dataclass(frozen=True)
class Prompt:
    """Probabilities, rewards, weights and scores of a single prompt's outputs."""

    pi_O: Tensor
    F_O: Tensor
    w_O: Tensor
    score_OD: Tensor

    @classmethod
    def of(cls, world: World) -> Prompt:
        """The first prompt of a world."""
        return cls(world.pi_QO[0], world.rewards_QO[0], world.norm2_QO[0], world.score_QOD[0])

    def mean(self, value_O: Tensor) -> Tensor:
        """Mean of a value over outputs."""
        average: Tensor = torch.tensordot(self.pi_O, value_O, 1)
        return average

    @property
    def weight(self) -> Tensor:
        """Mean weight, E w."""
        return self.mean(self.w_O)

    @property
    def best(self) -> Tensor:
        """The best baseline, b* = E[w F] / E[w]."""
        return self.mean(self.w_O * self.F_O) / self.weight

    @property
    def variance(self) -> Tensor:
        """Variance of the reward."""
        return self.mean((self.F_O - self.mean(self.F_O)).square())

    @property
    def covariance(self) -> Tensor:
        """Covariance of reward and weight."""
        return self.mean(self.w_O * self.F_O) - self.weight * self.mean(self.F_O)


def difference(prompt: Prompt, G: int) -> float:
    """Variance (tr Cov) of leave-one-out less that of RLOO, by the decomposition above, from counts of outputs."""
    F_O, w_O, pi_O = prompt.F_O, prompt.w_O, prompt.pi_O
    counts_BO, chance_B = exact.counts(pi_O, G - 1)
    error_B = (counts_BO @ (w_O * F_O)) / (counts_BO @ w_O) - prompt.best
    rloo_error2 = (prompt.covariance / prompt.weight).square() + prompt.variance / (G - 1)
    rest_BO, rest_chance_B = exact.counts(pi_O, G - 2)
    baseline_BO = ((rest_BO @ (w_O * F_O))[:, None] + w_O * F_O) / ((rest_BO @ w_O)[:, None] + w_O)
    mutual = rest_chance_B @ ((pi_O * baseline_BO) @ prompt.score_OD).square().sum(1)
    rloo_mutual = prompt.mean(F_O[:, None] * prompt.score_OD).square().sum() / (G - 1) ** 2
    errors = prompt.weight / G * (chance_B @ error_B.square() - rloo_error2)
    return float(errors + (G - 1) / G * (mutual - rloo_mutual))


def decomposition(world: World, G: int) -> Claim:
    """The decomposition against the traces of `estimators`' `oblr` and `rloo` over every ordered group."""
    traces = [float(exact.group_moments(world, exact.named(name), G).cov_QDD[0].trace()) for name in ("oblr", "rloo")]
    claimed, computed = traces[0] - traces[1], difference(Prompt.of(world), G)
    return Claim("leave-one-out less RLOO: errors of b and mutual terms", "derived", claimed, computed,
                 gap=abs(computed - claimed) / traces[1],
                 note=f"{world.name}, G = {G}: gap on the scale of tr Cov")  # fmt: skip


def second_coefficient(prompt: Prompt, mutual: bool = True) -> float:
    """The coefficient of 1 / (G - 1) in G (tr Cov_LOO - tr Cov_RLOO), next after -Cov(F,w)^2 / E w.

    E[w^2 (F-b*)^2] / E w - E w Var F, and of the mutual terms ||E[w (F-b*) s]||^2 / (E w)^2 - ||E[F s]||^2.
    """
    centred_O = prompt.w_O * (prompt.F_O - prompt.best)
    errors = prompt.mean(centred_O.square()) / prompt.weight - prompt.weight * prompt.variance
    ours = prompt.mean(centred_O[:, None] * prompt.score_OD).square().sum() / prompt.weight**2
    theirs = prompt.mean(prompt.F_O[:, None] * prompt.score_OD).square().sum()
    return float(errors + (ours - theirs if mutual else 0.0))


def expected_advantage(prompt: Prompt, G: int, mutual: bool = True) -> float:
    """Advantage G (tr Cov_RLOO - tr Cov_LOO) to second order, Cov(F,w)^2 / E w - (second coefficient) / (G-1).

    Without the mutual terms this is the rule of thumb: leave-one-out wins roughly iff Cov(F,w)^2 / E[w]^2 >
    (E[w^2 (F-b*)^2] / E[w]^2 - Var F) / (G-1).
    """
    first = float(prompt.covariance.square() / prompt.weight)
    return first - second_coefficient(prompt, mutual) / (G - 1)


def coefficients(world: World, smallest: int = 65, rounds: int = 4) -> list[Claim]:
    """Both coefficients, from exact differences at G - 1 = 64, 128, 256, 512 by Richardson's extrapolation, to 1 %."""
    prompt, sizes = Prompt.of(world), [(smallest - 1) * 2**k + 1 for k in range(rounds)]
    scaled = [G * difference(prompt, G) for G in sizes]
    first = -float(prompt.covariance.square() / prompt.weight)
    second = [(G - 1) * (value - first) for G, value in zip(sizes, scaled, strict=True)]
    where = f"{world.name}, G to {sizes[-1]}: to 1 %"
    return [
        Claim("leave-one-out less RLOO, large G: -Cov(F,w)^2 / (G E w)", "derived", first, romberg(scaled),
              tolerance=1e-2, note=where),
        Claim("leave-one-out less RLOO, large G: the next coefficient", "derived", second_coefficient(prompt),
              romberg(second), tolerance=1e-2, note=where),
    ]  # fmt: skip


def rules_of_thumb(worlds: list[World], G: int) -> list[Claim]:
    """Whether the sign of the expansion tells who wins, more often than the commoner answer for everyone would.

    Claimed: its share. Computed: the share of random policies with the right sign, without and with the mutual
    terms; the margin is of the difference.
    """
    prompts = [Prompt.of(world) for world in worlds]
    wins = torch.tensor([difference(prompt, G) < 0 for prompt in prompts])
    common = (wins if wins.double().mean() > 0.5 else ~wins).double()
    claims = []
    for mutual, what in ((False, "errors of b alone"), (True, "with the mutual terms")):
        said = torch.tensor([expected_advantage(prompt, G, mutual) > 0 for prompt in prompts])
        right = (wins == said).double()
        margin = interval(right - common)[1]
        note = (
            f"{len(worlds)} random {worlds[0].name}s, G = {G}: leave-one-out wins {int(wins.sum())}, is said to win "
            f"{int(said.sum())}, rightly {int((wins & said).sum())}; is said to lose {int((~said).sum())}, rightly "
            f"{int((~wins & ~said).sum())}"
        )
        claims.append(Claim(f"the expansion tells who wins, {what}", "derived", float(common.mean()),
                            float(right.mean()), ">=", margin=margin, note=note))  # fmt: skip
    return claims
