"""The policy: a causal language model, its tokenizer, and the log-probability of whole completions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import nlargest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from oblrpo.errors import InputError, check_finite
from oblrpo.policy.adapters import merge, save_adapter, without_adapters
from oblrpo.policy.prompts import Completion, Prompt, PromptFormat
from oblrpo.policy.saving import save_model
from oblrpo.policy.sequences import Sequences, pad, take_columns
from oblrpo.scores import Features, TokenLogps, logit_norm2, token_logps
from oblrpo.tasks.rows import Lazy

READING, CALLS = 24, {"cpu": 10**8, "cuda": 2 * 10**12}
"""What a forward with its backward takes beside its tokens: in tokens, and in tokens times parameters.

On a CPU SmolLM2's took as long as about 24 tokens; a GPU's is a reckoning (30 ms of calls, 400 TFLOP/s), not measured.
"""
BLOCK = 1024  # prompts that are tokenized at a time where only their lengths are kept
LEAST_COMPLETION = 64
"""Tokens that a completion keeps, where no number is set and the model's context leaves few."""


@dataclass(frozen=True)
class Logps:
    """The results of one forward over completions."""

    logps_S: Tensor
    """Log-probability of each completion, differentiable."""
    token_logps_SC: Tensor
    """Log-probability of each token, differentiable; values at padding mean nothing."""
    entropy_SC: Tensor
    """Entropy of each token's distribution, without gradient."""
    logit_norm2_SC: Tensor
    """`scores.logit_norm2` of each token, without gradient."""
    own_SC: Tensor
    """1 for the policy's own tokens."""

    @property
    def features(self) -> Features:
        """The features that proxies of score norms use, without gradient."""
        check_finite("log-probability", self.token_logps_SC[self.own_SC.bool()])
        return Features.from_tokens(self.logit_norm2_SC, self.token_logps_SC, self.entropy_SC, self.own_SC)

    @property
    def entropy(self) -> float:
        """The sum of the entropies of the policy's own tokens, in nats."""
        return float((self.entropy_SC * self.own_SC).sum())

    def detached(self) -> Logps:
        """Return the same without a graph."""
        return replace(self, logps_S=self.logps_S.detach(), token_logps_SC=self.token_logps_SC.detach())

    @classmethod
    def join(cls, blocks: Sequence[Logps], order_S: Tensor) -> Logps:
        """The results of several forwards in this order of their rows; 0 where no token is the policy's own."""
        width = max(block.own_SC.shape[1] for block in blocks)

        def joined(name: str) -> Tensor:
            parts = [getattr(block, name).masked_fill(block.own_SC == 0, 0) for block in blocks]
            return torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])[order_S]

        names = ("token_logps_SC", "entropy_SC", "logit_norm2_SC", "own_SC")
        return cls(torch.cat([block.logps_S for block in blocks])[order_S], *map(joined, names))


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer. The model stays in eval mode: dropout would make sampler and trainer differ."""

    model: Any
    tokenizer: Any
    format: PromptFormat = field(default_factory=PromptFormat)
    bf16: bool = False
    """Whether arithmetic is done in bfloat16 (autocast), on weights that stay float32."""
    checkpointing: bool = False
    """Whether only what enters each layer is kept, and the rest computed again in the backward."""
    name: str = ""
    """Folder or hub name that the model, or its adapters, were loaded from."""

    @property
    def low_precision(self) -> bool:
        """Whether the policy computes with fewer digits than float32."""
        return self.bf16 or any(p.dtype in {torch.bfloat16, torch.float16} for p in self.model.parameters())

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.model.device  # type: ignore[no-any-return]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def end_tokens(self) -> list[int]:
        """Token ids that end a completion: the generation config's, the tokenizer's own, as in TRL, and a turn's."""
        named = self.model.generation_config.eos_token_id
        ends = [named] if isinstance(named, int) else list(named or ())
        own = self.tokenizer.eos_token_id
        if own is not None and own not in ends and (own < self.vocabulary or not ends):
            ends.append(own)
        return ends + [token for token in self._ends_of_turn if token not in ends]

    @property
    def end_words(self) -> list[str]:
        """The tokens that end a completion, as the tokenizer calls them."""
        return [str(word) for word in self.tokenizer.convert_ids_to_tokens(self.end_tokens)]

    @cached_property
    def _ends_of_turn(self) -> list[int]:
        """The first token that the chat template puts behind an answer and that no plain text has, if there is one."""
        if self.tokenizer.chat_template is None:
            return []
        question = {"role": "user", "content": "A question"}
        # Some templates end a turn only where another follows.
        turns = (self.format.turn_ends(self.tokenizer, [question], *behind) for behind in ((), (question,)))
        added = {token for token, word in self.tokenizer.added_tokens_decoder.items() if word.content.strip()}
        return [token for turn in turns for token in turn if token in added and token < self.vocabulary][:1]

    @property
    def pad_token(self) -> int:
        """The token that stands where there is none: the tokenizer's, or else one that ends a completion."""
        pad, ends = self.tokenizer.pad_token_id, (self.tokenizer.eos_token_id, *self.end_tokens)
        return next(int(token) for token in (pad, *ends) if token is not None)

    @property
    def longest(self) -> int:
        """Most tokens the model can read; a huge number if its config names no limit, as BLOOM's."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize)

    def tokens(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of prompts, which are texts or messages (`PromptFormat.tokens`)."""
        rows = self.format.tokens(self.tokenizer, prompts)
        self.check_known("prompt", rows)
        return rows

    def encode(self, prompts: Sequence[Prompt], room: int) -> list[list[int]]:
        """Return the token ids of prompts, each of which leaves `room` tokens of the model's context."""
        rows = self.tokens(prompts)
        self._check_fit(prompts, map(len, rows), room)
        return rows

    def lengths(self, prompts: Sequence[Prompt], room: int | None = 0) -> list[int]:
        """Return the number of tokens of each prompt, checked as in `encode` unless `room` is None; none are kept."""
        blocks = (prompts[start : start + BLOCK] for start in range(0, len(prompts), BLOCK))
        lengths = [len(row) for block in blocks for row in self.tokens(block)]
        if room is not None:
            self._check_fit(prompts, lengths, room)
        return lengths

    def long(self, prompts: Sequence[Prompt], sizes: Sequence[int], most: int) -> dict[int, int]:
        """Return the lengths of all prompts with more than `most` tokens, and of some others, by their places.

        `sizes` are the bytes of each prompt, by which most need not be counted; 0 where it has to be. The others are
        those that have the most bytes.
        """
        sizes = sizes or [0] * len(prompts)
        first = nlargest(BLOCK, range(len(prompts)), key=sizes.__getitem__)
        first = sorted({*first, *(place for place, size in enumerate(sizes) if not size)})
        shown = [prompts[place] for place in first]
        found = dict(zip(first, self.lengths(shown, None), strict=True))
        bounded = self._knows_all and len(first) < len(prompts)
        times, beside = self.format.bound(self.tokenizer, shown) if bounded else (math.inf, 0)
        rest = [place for place, size in enumerate(sizes) if times * (size + beside) > most and place not in found]
        found |= zip(rest, self.lengths(Lazy(prompts.__getitem__, rest), None), strict=True)
        return dict(sorted(found.items()))

    def room(
        self,
        prompts: Sequence[Prompt],
        most: int,
        least: int = LEAST_COMPLETION,
        spare: int = 1,
        sizes: Sequence[int] = (),
        enough: int = sys.maxsize,
    ) -> tuple[int, int]:
        """Return the tokens of the longest prompt, and those that a context with `spare` such leaves, up to `most`.

        A context must leave `least`. With `sizes` (see `long`) the first is exact where it is over `enough` or leaves
        less than `most`; else it may be that of a shorter prompt.
        """
        least = min(most, least)
        lengths = self.long(prompts, sizes, min(enough, (self.longest - most) // spare))
        self._check_fit(Lazy(prompts.__getitem__, list(lengths)), lengths.values(), least)
        longest = max(lengths.values())
        return longest, max(least, min(most, self.longest - spare * longest))

    @cached_property
    def _knows_all(self) -> bool:
        return max(self.tokenizer.get_vocab().values(), default=0) < self.vocabulary

    def check_known(self, kind: str, rows: Sequence[Sequence[int]]) -> None:
        """Refuse tokens that the model has no embedding for."""
        for row in [] if self._knows_all else rows:
            if row and (token := max(row)) >= self.vocabulary:
                raise InputError(
                    f"the {kind} {self.tokenizer.decode(row)[:40]!r}... has the token "
                    f"{self.tokenizer.convert_ids_to_tokens(token)!r} ({token}), beyond the {self.vocabulary} that the "
                    "model knows: resize the model (model.resize_token_embeddings(len(tokenizer))) and save it with "
                    "its tokenizer, or take the token out of text, system prompt or chat template."
                )

    def _check_fit(self, prompts: Sequence[Prompt], lengths: Iterable[int], room: int) -> None:
        longest = self.longest
        for place, length in enumerate(lengths):
            if length + room > longest:
                text = self.format.text(self.tokenizer, prompts[place])
                raise InputError(
                    f"the prompt {text[:40]!r}... has {length} tokens; with completions of {room} it does not fit "
                    f"the model's {longest}: shorten it, lower max_completion_length, or set max_prompt_length."
                )

    def pad_prompts(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask of prompts, padded on the left."""
        return pad(rows, self.pad_token, left=True, device=self.device)

    def sequences(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequences:
        """Return demonstrations as one rectangle of tokens, an end token after each turn (`tokens_of`)."""
        prompt_rows, answer_rows, own_rows = tokens_of(self, prompts, completions)
        answer_SC, answer_mask_SC = pad(answer_rows, self.pad_token, left=False, device=self.device)
        own_SC, _ = pad(own_rows, 0, left=False, device=self.device)
        batch = Sequences.of(*self.pad_prompts(prompt_rows), answer_SC, answer_mask_SC)
        return replace(batch, own_ST=torch.cat([batch.own_ST[:, : batch.start], own_SC], 1))

    def logps(self, batch: Sequences, temperature: float = 1.0) -> Logps:
        """Return log pi(o|q) of every completion, and what the same forward says of its tokens.

        The distribution pi is the one that is sampled from, softmax(logits / temperature) token by token, the end token
        included. A completion that was cut at the longest length ends without one.
        """
        tokens = self._tokens(batch, temperature)
        logps_S = (tokens.logp_ST * batch.own_SC).sum(1)
        return Logps(logps_S, tokens.logp_ST, tokens.entropy_ST, tokens.logit_norm2_ST, batch.own_SC)

    def _tokens(self, batch: Sequences, temperature: float) -> TokenLogps:
        """What the distributions of every column of the completions say; values at padding mean nothing.

        Rows have no padding on the left: attention is causal, so they need no mask, and the fast kernels apply.
        """
        ids_ST, first_S = batch.flush_left()
        target_SC, first = batch.completion_SC, int(first_S.min())
        # The column before a token's own is the one whose distribution it was drawn from.
        column_SC = first_S[:, None] - 1 + torch.arange(target_SC.shape[1], device=first_S.device)
        column_SC = column_SC.clamp(max=ids_ST.shape[1] - 1)
        with self.arithmetic(), self._layers_checkpointed():
            if self.head is not None:
                return token_logps(self.head, take_columns(self._hidden(ids_ST), column_SC), target_SC, temperature)
            keep = ids_ST.shape[1] - first + 1
            logits_SCV = self.model(input_ids=ids_ST, logits_to_keep=keep, use_cache=False).logits
        logits_SCV = take_columns(logits_SCV, column_SC - (first - 1))
        logits_SCV = logits_SCV.to(torch.promote_types(logits_SCV.dtype, torch.float32)) / temperature
        logp_SCV = logits_SCV.log_softmax(-1)
        token_logps_SC = logp_SCV.gather(2, target_SC[..., None])[..., 0]
        with torch.no_grad():
            entropy_SC = -(logp_SCV.exp() * logp_SCV).sum(-1)
            return TokenLogps(token_logps_SC, entropy_SC, logit_norm2(logits_SCV, target_SC))

    @cached_property
    @torch.no_grad()
    def head(self) -> nn.Linear | None:
        """The output layer, if its product with the last hidden states of two tokens is their logits, bit by bit.

        It is None where logits are more: soft-capped, scaled, or adapted.
        """
        full = without_adapters(self.model)
        linear = full.get_output_embeddings()
        if type(linear) is not nn.Linear or full.base_model is full:
            return None
        ids_ST = torch.tensor([[0, 1]], device=self.device)
        with self.arithmetic():
            same = torch.equal(self.model(input_ids=ids_ST, use_cache=False).logits, linear(self._hidden(ids_ST)))
        return linear if same else None

    @cached_property
    def tokens_of_a_forward(self) -> int:
        """What one more forward and backward costs beside its tokens, in tokens: its calls, and reading the weights."""
        calls: int = CALLS["cuda" if self.device.type == "cuda" else "cpu"]
        return READING + calls // max(1, sum(int(p.numel()) for p in self.model.parameters()))

    def _hidden(self, ids_ST: Tensor) -> Tensor:
        """The last hidden states of rows without padding on the left, (S, T, C)."""
        inner = without_adapters(self.model).base_model
        return inner(input_ids=ids_ST, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def arithmetic(self) -> torch.autocast:
        """Return the context for the precision of forwards, the sampler's and the trainer's alike."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw from this seed for a while; torch's random state is put back after."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    @contextmanager
    def _layers_checkpointed(self) -> Iterator[None]:
        """Have layers computed again in the backward; transformers does in training mode, in which some add noise."""
        before: dict[Any, dict[str, Any]] = {}
        for layer in self.model.modules() if self.checkpointing and torch.is_grad_enabled() else ():
            if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
                before[layer] = {name: value for name, value in vars(layer).items() if name == "forward"}
                layer.forward = partial(layer._gradient_checkpointing_func, layer.forward)
        try:
            yield
        finally:
            for layer, own in before.items():
                del layer.forward
                vars(layer).update(own)

    def save(self, folder: Path) -> None:
        """Write model or adapters (safetensors) and tokenizer; transformers' `from_pretrained(folder)` loads them."""
        if getattr(self.model, "peft_config", None):
            save_adapter(self.model, folder)
        else:
            save_model(self.model, folder, self.end_tokens)
        self.tokenizer.save_pretrained(folder)

    def save_merged(self, folder: Path) -> None:
        """Write the model with its adapters added to its weights; the policy cannot be trained on after that."""
        save_model(merge(self.model), folder, self.end_tokens)
        self.tokenizer.save_pretrained(folder)


def tokens_of(
    policy: Policy, prompts: Sequence[Prompt], completions: Sequence[Completion], places: Sequence[str] = ()
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return the token ids of prompts, of their completions with end tokens, and 1 for the policy's own of these.

    `places` names the completions in messages.
    """
    places = places or [f"the demonstration {str(completion)[:40]!r}..." for completion in completions]
    prompt_rows, answer_rows, ends = policy.tokens(prompts), list[list[int]](), policy.end_tokens
    own_rows = list[list[int]]()
    for place, prompt, row, completion in zip(places, prompts, prompt_rows, completions, strict=True):
        answer, own = policy.format.answer(policy.tokenizer, prompt, completion, ends, place)
        answer_rows.append(answer)
        own_rows.append(own)
        if (length := len(row) + len(answer)) > policy.longest:
            raise InputError(
                f"{place}: prompt and completion have {length} tokens with the end token, but the model reads "
                f"{policy.longest}; shorten or remove it."
            )
    policy.check_known("demonstration", answer_rows)
    return prompt_rows, answer_rows, own_rows
