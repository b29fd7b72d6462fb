"""Policies small enough to list every batch: two or three outputs a prompt, of one or two binary tokens."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

D = 4
THETA = torch.tensor([0.3, -0.5, 0.2, 0.4], dtype=torch.float64)
OTHER_THETA = torch.tensor([-0.2, 0.1, 0.5, -0.3], dtype=torch.float64)


@dataclass
class Bandit:
    """Everything about every output: "0", "10", "11" (or "0", "10" with two, whose second token is certain).

    A outputs a prompt, T = 2 tokens, D parameters shared by all prompts.
    """

    probability_PA: Tensor
    reward_PA: Tensor
    score_PATD: Tensor
    logit_norm2_PAT: Tensor
    mask_AT: Tensor

    @property
    def norm2_PA(self) -> Tensor:
        return self.score_PATD.sum(2).square().sum(-1)

    def outputs(self, index_PG):
        """Rewards and the inputs of every baseline, of these outputs."""
        rows = torch.arange(len(index_PG))[:, None]
        mask_PGT = self.mask_AT[index_PG]
        return self.reward_PA[rows, index_PG], {
            "norm2_PG": self.norm2_PA[rows, index_PG],
            "length_PG": mask_PGT.sum(2),
            "logit_norm2_PGT": self.logit_norm2_PAT[rows, index_PG],
            "token_mask_PGT": mask_PGT,
        }

    def gradient(self, index_PG, coef):
        """(1/P) sum_p (1/G) sum_j coef s, with coefficients of outputs, (P, G), or of tokens, (P, G, T)."""
        score_PGTD = self.score_PATD[torch.arange(len(index_PG))[:, None], index_PG]
        coef = coef if coef.ndim == 3 else coef[..., None]
        return (coef[..., None] * score_PGTD).sum(2).mean((0, 1))

    def objective(self, reward_PA=None):
        """J, differentiable in theta."""
        return (self.probability_PA * (self.reward_PA if reward_PA is None else reward_PA)).sum(1).mean()

    def true_gradient(self, reward_PA=None):
        weight_PA = self.probability_PA * (self.reward_PA if reward_PA is None else reward_PA)
        return (weight_PA[..., None] * self.score_PATD.sum(2)).sum(1).mean(0).detach()

    def batches(self, G):
        """Every batch of G outputs a prompt, with its probability."""
        P, A = self.probability_PA.shape
        for draw in itertools.product(range(A), repeat=P * G):
            index_PG = torch.tensor(draw).view(P, G)
            yield index_PG, self.probability_PA.detach().gather(1, index_PG).prod()


def bandit(prompts=1, outputs=3, seed=0, theta=THETA):
    """Rewards and features depend on the seed only, so that two policies (theta) share them."""
    generator = torch.Generator().manual_seed(seed)
    feature_P2D = torch.randn(prompts, 2, D, generator=generator, dtype=torch.float64)
    reward_PA = torch.randn(prompts, 3, generator=generator, dtype=torch.float64)[:, :outputs]
    first_P, second_P = (feature_P2D @ theta).sigmoid().unbind(1)
    if outputs == 2:
        second_P = torch.zeros_like(second_P)
    probability_PA = torch.stack([1 - first_P, first_P * (1 - second_P), first_P * second_P], 1)[:, :outputs]
    token_AT = torch.tensor([[0, 0], [1, 0], [1, 1]], dtype=torch.float64)[:outputs]
    mask_AT = torch.tensor([[1, 0], [1, 1], [1, 1]], dtype=torch.float64)[:outputs]
    on_PT = torch.stack([first_P, second_P], 1).detach()
    residual_PAT = (token_AT - on_PT[:, None]) * mask_AT
    return Bandit(
        probability_PA,
        reward_PA,
        score_PATD=residual_PAT[..., None] * feature_P2D[:, None],
        logit_norm2_PAT=2 * residual_PAT.square(),  # 1 - 2 pi + sum pi^2 of two tokens
        mask_AT=mask_AT,
    )
