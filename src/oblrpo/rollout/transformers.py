"""Completions sampled from the policy itself: by our loop, or by transformers' `generate` where that does not apply."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

from oblrpo.errors import DivergedError
from oblrpo.policy import Policy, Prompt, Sequences
from oblrpo.policy.adapters import without_adapters
from oblrpo.policy.saving import own_settings_aside
from oblrpo.rollout.decode import Draw, Drawn, Kept, ShortCache, applies, cache_name, decode, decode_on
from oblrpo.rollout.rollouts import Rollouts, Turn, ended, in_groups, join, texts_of
from oblrpo.scores import Features

CACHE = cache_name(GenerationMixin.prepare_inputs_for_generation)
"""What `generate` calls the keys and values that it takes; its own signature does not show it."""


@dataclass
class TransformersSampler:
    """Samples from the policy itself, so that there is nothing to take over after an update.

    A token's log-probability differs from the trainer's by rounding alone: sampling runs token by token on a cache.
    """

    policy: Policy
    logps: bool = False
    features: bool = False
    max_num_seqs: int = 0
    """Most rows that are drawn together, in whole groups, one at least; 0: all. Other blocks are other draws."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        max_completion_length: int,
        temperature: float,
        top_p: float = 1.0,
    ) -> Rollouts:
        """Return completions as the function `sample` does, one block of prompts after another."""
        size = max(1, self.max_num_seqs // num_generations) if self.max_num_seqs else len(prompts)
        how = (num_generations, max_completion_length, temperature, top_p, self.logps, self.features)
        return join([sample(self.policy, prompts[at : at + size], *how) for at in range(0, len(prompts), size)])

    def turns(self, temperature: float) -> "KeptTurns":
        """Return what draws the turns of new conversations."""
        return KeptTurns(self.policy, Draw(temperature, features=self.features))

    def sync(self, policy: Policy) -> None:
        """Sample from this policy from now on."""
        self.policy = policy


class KeptTurns:
    """Draws turns of conversations, whose keys and values it keeps from turn to turn where `decode.applies`."""

    def __init__(self, policy: Policy, draw: Draw) -> None:
        self.policy, self._draw = policy, draw
        self._kept: dict[int, Kept] = {}

    @torch.no_grad()
    def draw(self, rows: Sequence[int], contexts: Sequence[list[int]], rooms: Sequence[int]) -> list[Turn]:
        """Return the next turn of some rows (`rollouts.Turns`)."""
        policy, kept = self.policy, dict[int, Kept]()
        before = [self._kept.pop(row) for row in rows if row in self._kept]
        if len(before) == len(rows):
            still = {id(each.layers) for each in self._kept.values()}
            ends, pad = policy.end_tokens, policy.pad_token
            with policy.arithmetic():
                drawn = decode_on(policy.model, contexts, before, rooms, ends, pad, self._draw, kept, still)
        else:
            once, copies = in_groups(contexts)
            drawn = draw_tokens(policy, *policy.pad_prompts(once), copies, max(rooms), self._draw, True, kept)
        self._kept |= {rows[index]: each for index, each in kept.items()}
        lengths = (~ended(policy, drawn.next_token_S)).cumprod(1).sum(1) + 1  # up to and including the end token
        most = [min(*pair) for pair in zip(lengths.tolist(), rooms, strict=True)]
        figures_SKC = torch.stack([values for values in drawn[1:] if values is not None], 1).cpu()
        return [
            Turn(ids[:count], figures_KC[:, :count])
            for ids, figures_KC, count in zip(drawn.next_token_S.tolist(), figures_SKC, most, strict=True)
        ]

    def end(self, row: int) -> None:
        """Let go what was read of a row."""
        self._kept.pop(row, None)


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    num_generations: int,
    max_completion_length: int,
    temperature: float,
    top_p: float = 1.0,
    logps: bool = False,
    features: bool = False,
) -> Rollouts:
    """Return G completions of every prompt from softmax(logits / temperature), by torch's global random state.

    Prompts are read once for their group. Where `decode.applies`, rows that have ended are read no further; other
    models go by `generate`, in which every row runs until the last has ended. Temperature 0 always takes the most
    probable token, of which there are no features; training leaves `top_p` at 1, where the policy is the whole
    distribution. `logps` and `features` are kept where they are wanted.
    """
    prompt_PQ, mask_PQ = policy.pad_prompts(policy.encode(prompts, room=max_completion_length))
    draw = Draw(temperature, top_p, features)
    drawn = draw_tokens(policy, prompt_PQ, mask_PQ, num_generations, max_completion_length, draw, logps)
    completion_SC, token_logps_SC, entropy_SC, logit_norm2_SC = drawn
    ended_SC = ended(policy, completion_SC)
    mask_SC = (ended_SC.cumsum(1) - ended_SC.long() == 0).long()  # up to and including the first end token
    of_draws = None
    if entropy_SC is not None and logit_norm2_SC is not None:
        of_draws = Features.from_tokens(logit_norm2_SC, token_logps_SC, entropy_SC, mask_SC)
    prompt_SQ, prompt_mask_SQ = (values.repeat_interleave(num_generations, 0) for values in (prompt_PQ, mask_PQ))
    return Rollouts(
        Sequences.of(prompt_SQ, prompt_mask_SQ, completion_SC, mask_SC),
        texts_of(policy, completion_SC, mask_SC),
        ~ended_SC.any(1),
        token_logps_SC if logps else None,
        of_draws,
    )


def draw_tokens(
    policy: Policy, prompt_PQ: Tensor, mask_PQ: Tensor, copies: int, longest: int, draw: Draw, logps: bool = False,
    kept: dict[int, Kept] | None = None,
) -> Drawn:  # fmt: skip
    """Return G completions of every prompt with the figures of their draws by token, (S, C) each.

    The loop gives figures always, and what it has read (`decode`); `generate` gives figures where they are asked for.
    """
    if applies(policy.model):
        ends, pad = policy.end_tokens, policy.pad_token
        with policy.arithmetic():
            drawn = decode(policy.model, prompt_PQ, mask_PQ, copies, longest, ends, pad, draw, kept)
        if drawn is not None:
            return drawn
    record = Record(draw) if draw.temperature and (logps or draw.features) else None
    return _by_generate(policy, prompt_PQ, mask_PQ, copies, longest, draw, record)


def _by_generate(
    policy: Policy, prompt_PQ: Tensor, mask_PQ: Tensor, num_generations: int, max_completion_length: int, draw: Draw,
    record: "Record | None",
) -> Drawn:  # fmt: skip
    """Return completions with the recorded figures of their draws by token, (S, C) each; rows run until all have ended.

    Without a record their log-probabilities are 0.
    """
    prompt_SQ, mask_SQ = (values.repeat_interleave(num_generations, 0) for values in (prompt_PQ, mask_PQ))
    temperature = draw.temperature
    settings = GenerationConfig(
        **({"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": draw.top_p} if temperature else {}),
        max_new_tokens=max_completion_length,
        eos_token_id=policy.end_tokens,
        pad_token_id=policy.pad_token,
    )
    further: dict[str, Any] = {} if record is None else {"logits_processor": LogitsProcessorList([record])}
    with own_settings_aside(policy.model), policy.arithmetic():
        cache, pad = _short_cache(policy), settings.pad_token_id
        if num_generations > 1 and (read := _read_once(policy.model, prompt_PQ, mask_PQ, num_generations, pad, cache)):
            further[CACHE] = read
        elif cache is not None:
            further[CACHE] = _short_cache(policy)
        try:
            ids_ST = policy.model.generate(
                input_ids=prompt_SQ, attention_mask=mask_SQ, generation_config=settings, **further
            )
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise DivergedError("the policy's probabilities are NaN; lower learning_rate.") from None
    completion_SC = ids_ST[:, prompt_SQ.shape[1] :]
    if record is None:
        return Drawn(completion_SC, torch.zeros_like(completion_SC, dtype=torch.float32))
    return record.drawn(completion_SC)


def _takes_cache(model: Any) -> bool:
    """Return whether a model reads on from keys and values that it is given."""
    inner = without_adapters(model)
    own, common = (
        getattr(each, "_prepare_position_ids_for_generation", None) for each in (type(inner), GenerationMixin)
    )
    return CACHE in inspect.signature(inner.forward).parameters and own is common  # others note the prompts' positions


def _short_cache(policy: Policy) -> ShortCache | None:
    """Return a cache for `generate` where its own would be in a wider type; None: its own is as good."""
    inner = without_adapters(policy.model)
    fits = _takes_cache(inner) and not inner.config.is_encoder_decoder and inner._supports_default_dynamic_cache()
    return ShortCache(config=inner.config.get_text_config(decoder=True)) if policy.bf16 and fits else None


def _read_once(
    model: Any, prompt_PQ: Tensor, mask_PQ: Tensor, num_generations: int, pad: int, into: ShortCache | None = None
) -> DynamicCache | None:
    """Return what a model keeps of every prompt but its last token, read once and repeated for its G outputs.

    Keys and values, of a window or of all tokens, and states; they are read `into` a cache that is given. Where some
    prompt has one token, and where a model keeps anything in its own way, this is None, and `generate` reads the
    prompts itself.
    """
    if not _takes_cache(model) or not mask_PQ[:, :-1].any(1).all():
        return None
    settings = GenerationConfig(
        max_new_tokens=1, eos_token_id=None, pad_token_id=pad, return_dict_in_generate=True
    )  # it knows best what the model wants beside the tokens; the token it adds is thrown away
    but_last = {"input_ids": prompt_PQ[:, :-1], "attention_mask": mask_PQ[:, :-1]}
    given = {} if into is None else {CACHE: into}
    cache = getattr(model.generate(**but_last, generation_config=settings, **given), CACHE)
    if type(cache) not in {DynamicCache, ShortCache} or not all(map(_is_kept, cache.layers)):
        return None
    if all(getattr(layer, "keys", None) is None for layer in cache.layers):
        return None  # states count no tokens, and `generate` would read all of them again
    cache.reorder_cache(torch.arange(len(prompt_PQ), device=prompt_PQ.device).repeat_interleave(num_generations))
    return cache


def _is_kept(layer: Any) -> bool:
    """Return whether a layer of a cache holds what its model has read, in a way of transformers' own."""
    kept = [getattr(layer, name, None) for name in ("keys", "conv_states", "recurrent_states")]
    tensors = [tensor for each in kept for tensor in (each.values() if isinstance(each, dict) else [each])]
    is_own, needs_none = type(layer).__module__ == DynamicCache.__module__, type(layer).__name__ == "DummyLayer"
    return is_own and (needs_none or any(tensor is not None and tensor.numel() for tensor in tensors))


class Record(LogitsProcessor):  # type: ignore[misc]
    """Records the figures of each drawn token: sees the logits before a draw, and the token one call later."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self._before: tuple[Tensor, Tensor] | None = None
        self._drawn: list[Drawn] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Take note of the logits for the next token and return them as they are."""
        self._record(input_ids[:, -1])
        self._before = self.draw.distribution(scores)
        return scores

    @property
    def rows(self) -> int:
        """How many rows were drawn for; 0 where it was not asked."""
        return 0 if self._before is None else len(self._before[0])

    def drawn(self, completion_SC: Tensor) -> Drawn:
        """Return the completions with the figures of their tokens, (S, C) each."""
        self._record(completion_SC[:, -1])
        figures = zip(*self._drawn, strict=True)
        return Drawn(*(torch.stack(values, 1) for values in figures if values[0] is not None))

    def _record(self, drawn_S: Tensor) -> None:
        if self._before is not None:
            self._drawn.append(self.draw.figures(drawn_S, *self._before))
