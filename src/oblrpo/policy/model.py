"""The policy: a causal language model, its tokenizer, and the log-probability of whole completions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from oblrpo.errors import InputError, check_finite
from oblrpo.policy.prompts import Prompt, PromptFormat
from oblrpo.policy.sequences import Sequences, pad
from oblrpo.scores import Features, logit_norm2


class Logps(NamedTuple):
    """What one forward says of completions."""

    logps_S: Tensor
    """Log-probability of each completion, differentiable."""
    logp_SC: Tensor
    """Log-probability of each token, differentiable; whatever stands where there is none."""
    entropy_SC: Tensor
    """Entropy of each token's distribution, without gradient."""
    logit_norm2_SC: Tensor | None
    """`scores.logit_norm2` of each token, without gradient, if asked for."""
    features: Features | None
    """What proxies of score norms go by, without gradient, if asked for."""

    def detached(self) -> Logps:
        """The same without a graph."""
        return self._replace(logps_S=self.logps_S.detach(), logp_SC=self.logp_SC.detach())


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer. The model stays in eval mode: dropout would make sampler and trainer differ."""

    model: Any
    tokenizer: Any
    format: PromptFormat = field(default_factory=PromptFormat)
    bf16: bool = False
    """Do arithmetic in bfloat16 (autocast) on weights that stay float32."""
    checkpointing: bool = False
    """Keep only what enters each layer, and compute the rest again in the backward."""
    name: str = ""
    """Folder or hub name that it was loaded from; of adapters, theirs."""

    @property
    def rounds(self) -> bool:
        """Whether it computes with fewer digits than float32."""
        return self.bf16 or any(p.dtype in {torch.bfloat16, torch.float16} for p in self.model.parameters())

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device  # type: ignore[no-any-return]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def end_tokens(self) -> list[int]:
        """Token ids that end a completion."""
        end = self.model.generation_config.eos_token_id
        end = self.tokenizer.eos_token_id if end is None else end
        return [end] if isinstance(end, int) else list(end)

    @property
    def longest(self) -> int:
        """Most tokens the model can read; of one whose config names no limit (BLOOM), more than there are."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize)

    def tokens(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of prompts, texts or messages.

        Raises:
            InputError: a prompt is empty, or the chat template refuses it.
        """
        return self.format.tokens(self.tokenizer, prompts)

    def encode(self, prompts: Sequence[Prompt], room: int) -> list[list[int]]:
        """Token ids of prompts, each with `room` tokens left in the model's context.

        Raises:
            InputError: a prompt is empty or too long, or the chat template refuses it.
        """
        rows = self.tokens(prompts)
        for prompt, row in zip(prompts, rows, strict=True):
            if len(row) + room > self.longest:
                text = self.format.text(self.tokenizer, prompt)
                raise InputError(
                    f"the prompt {text[:40]!r}... has {len(row)} tokens; with completions of {room} it does not fit "
                    f"the model's {self.longest}: shorten it, lower max_completion_length, or set max_prompt_length."
                )
        return rows

    def pad_prompts(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and mask of prompts, padded on the left."""
        return pad(rows, self.tokenizer.pad_token_id, left=True, device=self.device)

    def sequences(self, prompts: Sequence[Prompt], completions: list[str]) -> Sequences:
        """Given prompts and completions as tokens, an end token after each completion."""
        answers = [
            [*row, self.end_tokens[0]]
            for row in self.tokenizer(completions, padding=False, add_special_tokens=False).input_ids
        ]
        prompt_SQ, prompt_mask_SQ = self.pad_prompts(self.encode(prompts, room=max(map(len, answers))))
        return Sequences.of(
            prompt_SQ,
            prompt_mask_SQ,
            *pad(answers, self.tokenizer.pad_token_id, left=False, device=self.device),
        )

    def logps(self, batch: Sequences, temperature: float = 1.0, features: bool = False) -> Logps:
        """Log pi(o|q) of every completion, the entropy of its tokens, and, if asked for, what proxies go by.

        pi is the distribution that is sampled from: softmax(logits / temperature) token by token, the end token
        included; a completion cut at its longest length ends without one.

        Raises:
            DivergedError: with `features`, one is NaN or infinite.
        """
        mask_ST = batch.mask_ST
        # Padding on the right needs no mask under causal attention; without one the fast attention kernels apply.
        padded_left = not bool(batch.prompt_mask_SQ.all())
        with self.arithmetic(), self._layers_checkpointed():
            output = self.model(
                input_ids=batch.ids_ST,
                attention_mask=mask_ST if padded_left else None,
                position_ids=(mask_ST.cumsum(1) - 1).clamp(min=0) if padded_left else None,
                logits_to_keep=batch.completion_SC.shape[1] + 1,
                use_cache=False,
            )
        logits_SCV = output.logits[:, :-1]
        logits_SCV = logits_SCV.to(torch.promote_types(logits_SCV.dtype, torch.float32)) / temperature
        logp_SCV = logits_SCV.log_softmax(-1)
        logp_SC = logp_SCV.gather(2, batch.completion_SC[..., None])[..., 0]
        with torch.no_grad():
            entropy_SC = -(logp_SCV.exp() * logp_SCV).sum(-1)
            mask_SC, known, norm2_SC = batch.own_SC, None, None
            if features:
                check_finite("log-probability", logp_SC[mask_SC.bool()])
                norm2_SC = logit_norm2(logits_SCV, batch.completion_SC)  # the temperature is in the logits already
                known = Features.from_tokens(norm2_SC, logp_SC, entropy_SC, mask_SC)
        return Logps((logp_SC * mask_SC).sum(1), logp_SC, entropy_SC, norm2_SC, known)

    def arithmetic(self) -> torch.autocast:
        """The precision of forwards, the sampler's and the trainer's alike."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    @contextmanager
    def _layers_checkpointed(self) -> Iterator[None]:
        """Layers checkpoint in training mode only: they are in it until they begin, and compute out of it."""
        modules = (each for each in self.model.modules() if isinstance(each, GradientCheckpointingLayer))
        layers = [each for each in modules if each.gradient_checkpointing]
        functions = [layer._gradient_checkpointing_func for layer in layers]
        for layer, function in zip(layers, functions, strict=True):
            layer.training = self.checkpointing and torch.is_grad_enabled()
            layer._gradient_checkpointing_func = _without_dropout(layer, function)
        try:
            yield
        finally:
            for layer, function in zip(layers, functions, strict=True):
                layer.training, layer._gradient_checkpointing_func = False, function

    def save(self, folder: Path) -> None:
        """Write model or adapters (safetensors) and tokenizer; transformers' `from_pretrained(folder)` loads them."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def save_merged(self, folder: Path) -> None:
        """Write the model with its adapters added to its weights; the policy cannot be trained on after that."""
        self.model.merge_and_unload().save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def _without_dropout(layer: Any, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """What checkpoints a layer, with the layer in eval mode; some call dropout themselves (OPT), not in modules."""

    def checkpointed(forward: Callable[..., Any], *inputs: Any) -> Any:
        def evaluate(*inputs: Any) -> Any:
            before, layer.training = layer.training, False
            try:
                return forward(*inputs)
            finally:
                layer.training = before

        return checkpoint(evaluate, *inputs)

    return checkpointed
