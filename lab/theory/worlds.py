"""Policies small enough to enumerate: every output of every prompt, its probability, its score, its reward, in float64.

Q prompts (all equally likely), O outputs, D parameters. Any function from parameters to log-probabilities is a policy
here; what follows from it is computed by automatic differentiation, never by a formula that is to be checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev


@dataclass(frozen=True)
class World:
    """A policy at one point of its parameters, with a reward for every output of every prompt.

    Args:
        logp: (D,) parameters -> (Q, O) log pi(o|q).
        theta_D: where the policy is.
        rewards_QO: F.
        smoothness: L, a bound on ||grad^2 log pi|| over *all* parameters, where one is known.
        score_bound: M, a bound on ||grad log pi||^2 over all parameters, where one is known.
    """

    name: str
    logp: Callable[[Tensor], Tensor]
    theta_D: Tensor
    rewards_QO: Tensor
    smoothness: float = float("nan")
    score_bound: float = float("nan")

    def at(self, theta_D: Tensor) -> World:
        """The same problem with other parameters."""
        return replace(self, theta_D=theta_D)

    def paid(self, rewards_QO: Tensor) -> World:
        """The same policy with other rewards."""
        return replace(self, rewards_QO=rewards_QO)

    def objective(self, theta_D: Tensor) -> Tensor:
        """The objective J = mean_q sum_o pi(o|q) F(q, o)."""
        return (self.logp(theta_D).exp() * self.rewards_QO).sum(1).mean()

    def objectives(self, theta_KD: Tensor) -> Tensor:
        """The objective at many places, (K,)."""
        values: Tensor = torch.vmap(self.objective, chunk_size=256)(theta_KD)
        return values

    @cached_property
    def logp_QO(self) -> Tensor:
        """Log-probability of each output, log pi(o|q)."""
        return self.logp(self.theta_D).detach()

    @cached_property
    def pi_QO(self) -> Tensor:
        """Probability of each output, pi(o|q)."""
        return self.logp_QO.exp()

    @cached_property
    def score_QOD(self) -> Tensor:
        """Score of each output, grad log pi(o|q)."""
        return _detached(jacrev(self.logp)(self.theta_D))

    @cached_property
    def norm2_QO(self) -> Tensor:
        """Squared score norm w of each output."""
        return self.score_QOD.square().sum(2)

    @cached_property
    def curvature_QODD(self) -> Tensor:
        """Hessian of each output's log-probability, grad^2 log pi(o|q)."""
        return _detached(hessian(self.logp)(self.theta_D))

    @cached_property
    def gradient_D(self) -> Tensor:
        """Gradient of J, by differentiating the sum over all outputs."""
        return _detached(jacrev(self.objective)(self.theta_D))

    @cached_property
    def width(self) -> float:
        """The greatest difference between the rewards of two outputs of one prompt, osc(F)."""
        return float((self.rewards_QO.max(1).values - self.rewards_QO.min(1).values).max())

    def only(self, q: int) -> World:
        """The world with a single one of its prompts."""
        alone = World(self.name, lambda theta: self.logp(theta)[q : q + 1], self.theta_D, self.rewards_QO[q : q + 1])
        return replace(alone, smoothness=self.smoothness, score_bound=self.score_bound)

    @cached_property
    def hessian_DD(self) -> Tensor:
        """Hessian of J."""
        return _detached(hessian(self.objective)(self.theta_D))

    def mean(self, value_QO: Tensor) -> Tensor:
        """Mean over outputs, E[value | q], (Q, ...), of a value (Q, O, ...)."""
        return torch.einsum("qo,qo...->q...", self.pi_QO, value_QO)


def _detached(value: Tensor) -> Tensor:
    return value.detach()


def random_rewards(Q: int, O: int, generator: torch.Generator) -> Tensor:
    """0 and 1 with a chance of each that differs by prompt; no prompt pays the same for everything."""
    chance_Q1 = 0.2 + 0.6 * torch.rand(Q, 1, generator=generator, dtype=torch.float64)
    rewards_QO = (torch.rand(Q, O, generator=generator, dtype=torch.float64) < chance_Q1).double()
    rewards_QO[:, 0], rewards_QO[:, 1] = 1.0, 0.0
    return rewards_QO


def bandit(seed: int = 0, Q: int = 2, O: int = 4, scale: float = 1.0) -> World:
    """Softmax over O actions with logits of their own for each prompt. L = 1/2, M = 2, everywhere."""
    generator = torch.Generator().manual_seed(seed)
    theta_D = scale * torch.randn(Q * O, generator=generator, dtype=torch.float64)
    return World(
        "bandit", lambda theta: theta.view(Q, O).log_softmax(1), theta_D, random_rewards(Q, O, generator), 0.5, 2.0
    )


def linear_bandit(seed: int = 0, Q: int = 2, O: int = 4, D: int = 3, scale: float = 1.0) -> World:
    """Softmax of features (Q, O, D) times parameters: prompts share them, and scores differ in length."""
    generator = torch.Generator().manual_seed(seed)
    feature_QOD = torch.randn(Q, O, D, generator=generator, dtype=torch.float64)
    spread_QO1 = torch.randn(Q, O, 1, generator=generator, dtype=torch.float64).exp()
    feature_QOD *= spread_QO1
    theta_D = scale * torch.randn(D, generator=generator, dtype=torch.float64)
    diameter2 = float((feature_QOD[:, :, None] - feature_QOD[:, None]).square().sum(-1).max())
    # Var of v'f within a range of |v'(f - f')| is at most a quarter of its square; a score is f - E f.
    return World(
        "linear bandit",
        lambda theta: (feature_QOD @ theta).log_softmax(1),
        theta_D,
        random_rewards(Q, O, generator),
        diameter2 / 4,
        diameter2,
    )


def tree(seed: int = 0, Q: int = 2, vocabulary: int = 2, length: int = 2) -> World:
    """A logit for every token after every prefix, all outputs of one length. L = 1/2, M = 2 length, everywhere."""
    generator = torch.Generator().manual_seed(seed)
    V, T = vocabulary, length
    outputs = list(product(range(V), repeat=T))
    every = (prefix for t in range(T) for prefix in product(range(V), repeat=t))
    prefixes = {prefix: index for index, prefix in enumerate(every)}
    place_OT = torch.tensor([[prefixes[o[:t]] for t in range(T)] for o in outputs])
    token_OT = torch.tensor(outputs)

    def logp(theta: Tensor) -> Tensor:
        return theta.view(Q, len(prefixes), V).log_softmax(2)[:, place_OT, token_OT].sum(2)

    theta_D = torch.randn(Q * len(prefixes) * V, generator=generator, dtype=torch.float64)
    return World("token tree", logp, theta_D, random_rewards(Q, len(outputs), generator), 0.5, 2.0 * T)


class _Transformer(nn.Module):
    """One block, one head: token and place embeddings, causal attention, a small MLP, tied output."""

    def __init__(self, vocabulary: int, places: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(vocabulary + 1, width))  # the last row starts an output
        self.place = nn.Parameter(torch.empty(places, width))
        self.qkv = nn.Parameter(torch.empty(3, width, width))
        self.up, self.down = nn.Parameter(torch.empty(2 * width, width)), nn.Parameter(torch.empty(width, 2 * width))

    def forward(self, ids_ST: Tensor) -> Tensor:
        x = self.token[ids_ST] + self.place[: ids_ST.shape[1]]
        q, k, v = (x @ w.T for w in self.qkv)
        future = torch.ones(ids_ST.shape[1], ids_ST.shape[1]).triu(1).bool()
        attention = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf).softmax(-1)
        x = x + attention @ v
        x = x + torch.tanh(x @ self.up.T) @ self.down.T
        logits: Tensor = x @ self.token[:-1].T
        return logits


def transformer(seed: int = 0, Q: int = 2, vocabulary: int = 3, length: int = 4, width: int = 4) -> World:
    """A transformer over a 3-token vocabulary: token 0 ends an output, cut at `length`; a prompt is a first token.

    Raises:
        ValueError: more prompts than tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    V = vocabulary
    if Q > V:
        raise ValueError(f"a prompt is one of {V} tokens; {Q} prompts are too many.")
    outputs = [
        o for t in range(1, length + 1) for o in product(range(V), repeat=t)
        if 0 not in o[:-1] and (o[-1] == 0 or t == length)
    ]  # fmt: skip
    model = _Transformer(V, length + 1, width).double()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    ids_ST = torch.tensor([[V, q, *o, *[0] * (length - len(o))] for q in range(Q) for o in outputs])
    mask_ST = torch.tensor([[1.0] * len(o) + [0.0] * (length - len(o)) for _ in range(Q) for o in outputs])

    def logp(theta: Tensor) -> Tensor:
        parts = theta.split(sizes)
        weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        logits_STV = functional_call(model, weights, (ids_ST[:, :-1],))[:, 1:]
        logp_ST = logits_STV.log_softmax(2).gather(2, ids_ST[:, 2:, None])[..., 0]
        summed: Tensor = (logp_ST * mask_ST).sum(1)
        return summed.view(Q, len(outputs))

    theta_D = 0.7 * torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    return World("transformer", logp, theta_D, random_rewards(Q, len(outputs), generator))


FAMILIES: dict[str, Callable[..., World]] = {
    "bandit": bandit,
    "linear bandit": linear_bandit,
    "token tree": tree,
    "transformer": transformer,
}
