"""The loop that samples: prompts read once, rows that have ended leave the batch, keys and values written in place."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin

from oblrpo.errors import DivergedError
from oblrpo.rollout.cache import Room, cache_name, is_plain, keeps_all
from oblrpo.rollout.draw import Draw, Drawn

OWN_STEPS = (
    "generate",
    "_sample",
    "_prefill",
    "prepare_inputs_for_generation",
    "_prepare_position_ids_for_generation",
    "_update_model_kwargs_for_generation",
)
"""What `generate` does for every model alike, and this loop does, too; a model with its own goes by `generate`."""


def applies(model: Any, columns: int) -> bool:
    """Return whether the loop gives what `generate` gives on sequences of up to so many tokens.

    It does for decoders whose layers all keep the keys and values of all tokens and nothing else (no state, and no
    window that is shorter than the sequences), which take from transformers, unchanged, how a next token is read.
    Code from a hub, encoders, prompts that were learned (PEFT's prompt tuning and its kin) and adapters that act from a
    token on (aLoRA) go by `generate`.
    """
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
            return False
    inner = _inner(model)
    unchanged = all(getattr(type(inner), name, None) is getattr(GenerationMixin, name, None) for name in OWN_STEPS)
    return (
        unchanged
        and not inner.config.is_encoder_decoder
        and not inner.is_remote_code()
        and keeps_all(inner.config, columns)
    )


def decode(
    model: Any, prompt_PQ: Tensor, mask_PQ: Tensor, copies: int, longest: int, ends: Collection[int], pad: int,
    draw: Draw,
) -> Drawn | None:  # fmt: skip
    """Return G completions of every prompt with what is known of each token's draw, (S, C) each.

    It is None where the caller has to use `generate`.

    C is the length of the longest completion; behind its end a row is padding. The model reads the rows that have not
    ended and no others. The host waits for the device once a token, to learn which have.

    Raises:
        DivergedError: the logits give no probabilities any more.
    """
    step = _Step.of(model)
    read = DynamicCache()
    position_PQ = (mask_PQ.cumsum(1) - 1).clamp(min=0)
    logits_SV, cache = step(prompt_PQ, mask_PQ, position_PQ, read)
    if cache is not read or not is_plain(read):
        return None
    logits_SV = logits_SV.repeat_interleave(copies, 0)
    live = _Live.of(read, mask_PQ, copies, longest)
    completion_SC = prompt_PQ.new_full((live.rows, longest), pad)
    wide, told = torch.promote_types(logits_SV.dtype, torch.float32), 3 if draw.features and draw.temperature else 1
    known = [torch.zeros_like(completion_SC, dtype=wide) for _ in range(told)]
    del read, cache
    for column in range(longest):
        token_N, *others = (each_N for each_N in draw(logits_SV) if each_N is not None)
        completion_SC[live.row_N, column] = token_N
        for each_SC, values_N in zip(known, others, strict=True):
            each_SC[live.row_N, column] = values_N.to(wide)
        tokens = token_N.tolist()
        if min(tokens) < 0:
            raise DivergedError("the policy's probabilities are no numbers any more; lower learning_rate.")
        token_N = live.without([token in ends for token in tokens], token_N)
        if not live.rows or column + 1 == longest:
            break
        position_N1, mask_NT = live.next(prompt_PQ.shape[1] + column + 1)
        logits_SV, _ = step(token_N[:, None], mask_NT, position_N1, live.cache)
    return Drawn(*(each_SC[:, : column + 1] for each_SC in (completion_SC, *known)))


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass(frozen=True)
class _Step:
    """One forward, with the inputs that `generate` gives."""

    model: Any
    takes_positions: bool
    cache_name: str
    further: dict[str, Any]

    @classmethod
    def of(cls, model: Any) -> _Step:
        inner = _inner(model)  # LoRA lives in its layers
        names = inspect.signature(inner.forward).parameters
        further = {"use_cache": True, "return_dict": True} | (
            {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        )
        return cls(inner, "position_ids" in names, cache_name(inner.forward), further)

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Read tokens and return the logits of what follows the last, and the cache."""
        given = {self.cache_name: cache} | ({"position_ids": positions} if self.takes_positions else {})
        output = self.model(input_ids=ids, attention_mask=mask, **given, **self.further)
        return output.logits[:, -1], getattr(output, self.cache_name)


@dataclass
class _Live:
    """The N rows that have not ended, in the first N places of everything; they move up when others leave."""

    cache: DynamicCache
    row_N: Tensor
    """Which of the S rows each is."""
    position_N: Tensor
    """The position of each row's next token."""
    mask_NT: Tensor
    """Which tokens are real, with all columns that may come."""

    @classmethod
    def of(cls, read: DynamicCache, mask_PQ: Tensor, copies: int, longest: int) -> _Live:
        count, width = len(mask_PQ) * copies, mask_PQ.shape[1]
        for index, layer in enumerate(read.layers):  # one after another: the prompts' own are let go
            read.layers[index] = Room(layer, copies, width + longest - 1)
        mask_SQ = mask_PQ.repeat_interleave(copies, 0)
        mask_ST = torch.cat([mask_SQ, mask_SQ.new_ones(count, longest)], 1)
        return cls(read, torch.arange(count, device=mask_PQ.device), mask_SQ.sum(1), mask_ST)

    @property
    def rows(self) -> int:
        """N, the number of rows that have not ended."""
        return len(self.row_N)

    def next(self, columns: int) -> tuple[Tensor, Tensor]:
        """Return the next tokens' positions, and the mask up to their column, the last of so many."""
        position_N1 = self.position_N[:, None]
        self.position_N = self.position_N + 1
        return position_N1, self.mask_NT[:, :columns]

    def without(self, ended: list[bool], token_N: Tensor) -> Tensor:
        """Let rows leave, and return the tokens of the others in their new places.

        The last rows take the places of those that left: what is copied is at most what leaves.
        """
        if not any(ended):
            return token_N
        left = ended.count(False)
        holes = [place for place in range(left) if ended[place]]
        movers = [place for place in range(left, len(ended)) if not ended[place]]
        into, out_of = (torch.tensor(each, dtype=torch.long, device=token_N.device) for each in (holes, movers))
        for layer in self.cache.layers:
            layer.keep(left, into, out_of)
        for each in (self.row_N, self.position_N, self.mask_NT, token_N):
            each[into] = each[out_of]
        self.row_N, self.position_N, self.mask_NT = (
            each[:left] for each in (self.row_N, self.position_N, self.mask_NT)
        )
        return token_N[:left]
