"""What every method of the bench is given: a Qwen3-style model with random weights, token ids, coefficients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch and of the model that reads it.

    Args:
        name: what the table calls it.
        sequences: S.
        tokens: T, tokens of each sequence; T - 1 of them are predicted.
        group_size: G, consecutive sequences that share a baseline.
        hidden: width of the residual stream.
        intermediate: width of the gated layer.
        layers: transformer blocks.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocabulary: V.
        tied: whether the head is the embedding's weight.
    """

    name: str
    sequences: int
    tokens: int
    group_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def groups(self) -> int:
        """Number of groups, S / G."""
        return self.sequences // self.group_size


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        # name, S, T, G, hidden, intermediate, layers, heads, kv heads, head dim, V, tied
        Shape("short", 256, 24, 8, 64, 192, 6, 4, 2, 16, 258, True),
        Shape("medium", 16, 128, 8, 384, 1280, 8, 8, 4, 64, 4096, False),
        Shape("long", 4, 512, 4, 384, 1280, 8, 8, 4, 64, 8192, False),
        Shape("qwen3-4b", 8, 512, 8, 2560, 9728, 36, 32, 8, 128, 151936, True),
    )
}
"""Shapes by name. The first three are for one thread of a processor; the last has the sizes of Qwen3-4B, and its T can
be raised with `dataclasses.replace`."""


@dataclass(frozen=True)
class Workload:
    """A model, a batch, and coefficients coef_s = F_s - b_p(s), the same for every method.

    Rewards and baselines are random numbers drawn beforehand. In use the baseline follows from the norms, so a method
    may read `coef_S` and `baseline_P` only where it could: once the norms of the group are known. The form F - b is
    there because the way with one trajectory per backward can do no other.

    Args:
        model: a causal language model of transformers, in eval mode.
        ids_ST: token ids without padding.
        rewards_S: F, known before any gradient.
        baseline_P: b of each group.
        group_size: G; sequences [p G, (p + 1) G) are group p.
    """

    model: Any
    ids_ST: Tensor
    rewards_S: Tensor
    baseline_P: Tensor
    group_size: int

    @property
    def coef_S(self) -> Tensor:
        """Coefficient of each sequence, a_s = F_s - b_p(s)."""
        return self.rewards_S - self.baseline_P.repeat_interleave(self.group_size)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained; a tied weight is there once."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def logps(self) -> Tensor:
        """Log-probability of every sequence, in one forward, (S,)."""
        return sequence_logps(self.model, self.ids_ST)

    def logps_of(self, rows: slice) -> Tensor:
        """Log-probabilities of some sequences, in a forward of their own, (rows,)."""
        return sequence_logps(self.model, self.ids_ST[rows])


def sequence_logps(call: Callable[..., Any], ids_ST: Tensor) -> Tensor:
    """Log-probability of each sequence under `call`, sum_{t > 1} log pi(ids_t | ids_<t), (S,), in float32 or wider."""
    logits_STV: Tensor = call(input_ids=ids_ST, use_cache=False).logits[:, :-1]
    # Rounded to bfloat16, the normaliser would put an error of percents into every probability of the backward.
    logits_STV = logits_STV.to(torch.promote_types(logits_STV.dtype, torch.float32))
    chosen_ST = logits_STV.gather(2, ids_ST[:, 1:, None])[..., 0]
    return (chosen_ST - logits_STV.logsumexp(-1)).sum(1)


def build(
    shape: Shape, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Workload:
    """A workload of this shape, drawn from `seed` alone; torch's global seed is set.

    Raises:
        ValueError: S is no multiple of G.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    if shape.sequences % shape.group_size:
        raise ValueError(f"{shape.name}: {shape.sequences} sequences are no whole groups of {shape.group_size}.")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
    with torch.device(device):  # drawn where it is used: billions of weights would take minutes on one thread
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        wide = torch.promote_types(dtype, torch.float32)
        return Workload(
            model=model,
            ids_ST=torch.randint(shape.vocabulary, (shape.sequences, shape.tokens)),
            rewards_S=torch.randn(shape.sequences, dtype=wide),
            baseline_P=torch.randn(shape.groups, dtype=wide),
            group_size=shape.group_size,
        )
