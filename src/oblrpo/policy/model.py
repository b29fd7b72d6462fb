"""The policy: a causal language model, its tokenizer, and the log-probability of whole completions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from oblrpo.config import PolicyConfig
from oblrpo.errors import InputError
from oblrpo.policy.sequences import Sequences, pad
from oblrpo.policy.tokenizer import byte_tokenizer
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
        """Most tokens the model can read."""
        return int(self.model.config.max_position_embeddings)

    def encode(self, texts: list[str], room: int) -> list[list[int]]:
        """Token ids of prompts, each with `room` tokens left in the model's context.

        Raises:
            InputError: a prompt is empty or too long.
        """
        rows: list[list[int]] = self.tokenizer(texts, padding=False).input_ids
        for text, row in zip(texts, rows, strict=True):
            if not row:
                raise InputError("a prompt is empty: it has no token for the policy to go on from.")
            if len(row) + room > self.longest:
                raise InputError(
                    f"the prompt {text[:40]!r}... has {len(row)} tokens; with completions of {room} it does not fit "
                    f"the model's {self.longest}: shorten it or lower max_completion_length."
                )
        return rows

    def pad_prompts(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and mask of prompts, padded on the left."""
        return pad(rows, self.tokenizer.pad_token_id, left=True, device=self.device)

    def sequences(self, prompts: list[str], completions: list[str]) -> Sequences:
        """Given prompts and completions as tokens, an end token after each completion."""
        answers = [
            [*row, self.end_tokens[0]]
            for row in self.tokenizer(completions, padding=False, add_special_tokens=False).input_ids
        ]
        prompt_SQ, prompt_mask_SQ = self.pad_prompts(self.encode(prompts, room=max(map(len, answers))))
        return Sequences(
            prompt_SQ,
            prompt_mask_SQ,
            *pad(answers, self.tokenizer.pad_token_id, left=False, device=self.device),
        )

    def logps(self, batch: Sequences, temperature: float = 1.0, features: bool = False) -> Logps:
        """Log pi(o|q) of every completion, the entropy of its tokens, and, if asked for, what proxies go by.

        pi is the distribution that is sampled from: softmax(logits / temperature) token by token, the end token
        included; a completion cut at its longest length ends without one.
        """
        ids_ST = torch.cat([batch.prompt_SQ, batch.completion_SC], 1)
        mask_ST = torch.cat([batch.prompt_mask_SQ, batch.completion_mask_SC], 1)
        # Padding on the right needs no mask under causal attention; without one the fast attention kernels apply.
        padded_left = not bool(batch.prompt_mask_SQ.all())
        output = self.model(
            input_ids=ids_ST,
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
            mask_SC, known, norm2_SC = batch.completion_mask_SC, None, None
            if features:
                norm2_SC = logit_norm2(logits_SCV, batch.completion_SC)  # the temperature is in the logits already
                known = Features.from_tokens(norm2_SC, logp_SC, entropy_SC, mask_SC)
        return Logps((logp_SC * mask_SC).sum(1), logp_SC, entropy_SC, norm2_SC, known)

    def save(self, folder: Path) -> None:
        """Write model (safetensors) and tokenizer so that transformers' `from_pretrained(folder)` loads them."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def make_policy(config: PolicyConfig) -> Policy:
    """The policy that the config asks for: built with random weights, or loaded.

    Raises:
        InputError: no such device, or the model cannot be loaded.
    """
    if config.model:
        return load_policy(config.model, config)
    device = _device(config.device)
    tokenizer = byte_tokenizer()
    heads = config.num_attention_heads
    if heads < 2 or heads % 2 or config.hidden_size < 1 or config.hidden_size % (2 * heads):
        raise InputError("num_attention_heads must be even, and hidden_size a multiple of twice that.")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_attention_heads // 2,
            head_dim=config.hidden_size // config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=True,
            initializer_range=config.initializer_range,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return Policy(model.to(device).eval(), tokenizer)


def load_policy(name: str, config: PolicyConfig) -> Policy:
    """A causal LM and its tokenizer from a local folder or, by name, from the hub.

    The weights are float32: small updates would be lost to the rounding of shorter types.

    Raises:
        InputError: transformers cannot load it, or its tokenizer has neither padding nor end token.
    """
    device, trust = _device(config.device), config.trust_remote_code
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=trust, use_safetensors=True
        )
    except Exception as error:  # transformers raises many kinds; all mean that this model cannot be had
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise InputError(f"cannot load the model {name!r}: {reason}.") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(f"the tokenizer of {name!r} has neither a padding nor an end token; set one in it.")
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return Policy(model.to(device).eval(), tokenizer)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
