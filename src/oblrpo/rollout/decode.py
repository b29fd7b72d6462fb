"""The loop that samples: prompts read once, rows that have ended leave the batch, keys and values written in place."""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from oblrpo.errors import DivergedError
from oblrpo.policy.adapters import without_adapters

WIDTH = 256  # entries of the vocabulary that are summed at once


class Drawn(NamedTuple):
    """One token a row."""

    next_token_S: Tensor  # the token; -1 where the logits give no probabilities
    logp_S: Tensor  # its log-probability, in nats
    entropy_S: Tensor | None = None  # the entropy of the distribution that it was drawn from, in nats
    logit_norm2_S: Tensor | None = None  # its `scores.logit_norm2`


@dataclass(frozen=True)
class Draw:
    """How the next token is chosen."""

    temperature: float  # temperature of the distribution; 0 takes the most probable token
    top_p: float = 1.0  # share of the distribution that is drawn from
    features: bool = False
    """Whether to take entropy and logit norm, at four more passes over the vocabulary; not at temperature 0."""

    def __call__(self, logits_SV: Tensor) -> Drawn:
        """Return a token a row."""
        if not self.temperature:
            return Drawn(logits_SV.argmax(-1), torch.zeros_like(logits_SV[:, 0], dtype=_wide(logits_SV)))
        scores_SV, probabilities_SV = self.distribution(logits_SV)
        return self.figures(choose(probabilities_SV), scores_SV, probabilities_SV)

    def distribution(self, logits_SV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled logits, -inf outside of `top_p`, and their probabilities, in float32 or wider."""
        scores_SV = logits_SV.to(_wide(logits_SV))
        if self.temperature != 1:
            scores_SV = scores_SV / self.temperature
        if self.top_p < 1:
            warp: Any = TopPLogitsWarper(self.top_p)
            scores_SV = warp(None, scores_SV)
        return scores_SV, scores_SV.softmax(-1)

    def figures(self, next_token_S: Tensor, scores_SV: Tensor, probabilities_SV: Tensor) -> Drawn:
        """Return tokens drawn from a `distribution` with their figures under it; its probabilities are used up."""
        drawn_S1 = next_token_S.clamp(min=0)[:, None]
        p_S1 = probabilities_SV.gather(1, drawn_S1)
        logp_S1 = p_S1.log()
        if not self.features:
            return Drawn(next_token_S, logp_S1[:, 0])
        # All sums go over the others: a token of probability near 1 would cost them their digits.
        others_SV = probabilities_SV.scatter_(1, drawn_S1, 0)
        others_S = others_SV.sum(-1)
        logit_norm2_S = others_S.square() + torch.linalg.vector_norm(others_SV, dim=-1).square()
        # -sum p log p = -p log p of the drawn one + sum over the others of p (log Z - score): no logarithm an entry.
        # A score of -inf counts 0: its product is NaN, which `nansum` leaves out.
        normaliser_S1 = scores_SV.gather(1, drawn_S1) - logp_S1
        cross_S = others_SV.mul_(scores_SV).nansum(-1)
        entropy_S = (normaliser_S1[:, 0] * others_S - cross_S) - (p_S1 * logp_S1)[:, 0]
        return Drawn(next_token_S, logp_S1[:, 0], entropy_S, logit_norm2_S)


def _wide(logits_SV: Tensor) -> torch.dtype:
    return torch.promote_types(logits_SV.dtype, torch.float32)


def choose(probabilities_SV: Tensor) -> Tensor:
    """Draw one entry a row in proportion to its value, by torch's global random state; -1 where a row is not finite.

    A block of entries is drawn by the blocks' sums, then an entry of that block: two uniform numbers a row in place of
    `torch.multinomial`'s one exponential number an entry, which takes longer than the softmax by far.
    """
    count, entries = probabilities_SV.shape
    full = entries - entries % WIDTH  # entries of full blocks
    sums_SK = torch.cat(
        [
            probabilities_SV[:, :full].unflatten(1, (full // WIDTH, WIDTH)).sum(-1),
            probabilities_SV[:, full:].sum(-1, keepdim=True),
        ],
        1,
    ).double()
    uniform_2S1 = torch.rand(2, count, 1, dtype=torch.float64, device=probabilities_SV.device)
    block_S1 = _place(sums_SK, uniform_2S1[0])
    index_SR = block_S1 * WIDTH + torch.arange(WIDTH, device=block_S1.device)
    inside_SR = probabilities_SV.gather(1, index_SR.clamp(max=entries - 1)).double() * (index_SR < entries)
    next_token_S = index_SR.gather(1, _place(inside_SR, uniform_2S1[1]))[:, 0].clamp(max=entries - 1)
    return next_token_S.where(sums_SK.sum(-1).isfinite(), -1)


def _place(weights_SN: Tensor, uniform_S1: Tensor) -> Tensor:
    """Return the first entry up to which the weights add up to more than this share of their sum, (S, 1)."""
    cumulative_SN = weights_SN.cumsum(1)
    place_S1 = torch.searchsorted(cumulative_SN, uniform_S1 * cumulative_SN[:, -1:], right=True)
    return place_S1.clamp(max=weights_SN.shape[1] - 1)


BLOCK = 128
"""Columns that are added when the room for keys and values is full. A copy of all of them once in so many tokens costs
next to nothing, and completions that end early never take the memory of the longest that could have been."""

OWN_STEPS = (
    "generate",
    "_sample",
    "_prefill",
    "prepare_inputs_for_generation",
    "_prepare_position_ids_for_generation",
    "_update_model_kwargs_for_generation",
)
"""What `generate` does for every model alike, and this loop does, too; a model with its own goes by `generate`."""


def applies(model: Any) -> bool:
    """Return whether the loop gives what `generate` gives.

    It does for decoders whose layers attend to tokens and keep nothing else (no state), and which read a next token as
    transformers does. Of a sliding window all keys are kept, and the mask leaves out what it has passed. Code from a
    hub, encoders, learned prompts (PEFT's prompt tuning and its kin) and adapters that act from a token on (aLoRA) go
    by `generate`.
    """
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
            return False
    inner = without_adapters(model)
    unchanged = all(getattr(type(inner), name, None) is getattr(GenerationMixin, name, None) for name in OWN_STEPS)
    foreign = inner.config.is_encoder_decoder or inner.is_remote_code()
    layers = DynamicCache(config=inner.config).layers
    attend = bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return unchanged and not foreign and attend


def cache_name(function: Callable[..., Any]) -> str:
    """The name of keys and values among a function's arguments and results: from transformers 5.24 on `cache`."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


@dataclass(frozen=True)
class Kept:
    """The keys and values of a row that has ended its turn: of all its tokens but the last, which no model has read."""

    layers: list[tuple[Tensor, Tensor]]
    """Of every layer, with those of other rows that ended at the same time: (rows, heads, columns, width)."""
    place: int
    """Its place among those rows."""
    begin: int
    """The column of its first token; the last one is its token's that was read last."""


Read = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]


def _reader(model: Any) -> Read:
    inner = without_adapters(model)
    names, cache_is = inspect.signature(inner.forward).parameters, cache_name(inner.forward)
    further = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    def read(ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Read tokens, with the inputs that `generate` gives; return the logits of what follows, and the cache."""
        given: dict[str, Any] = {"position_ids": positions} if "position_ids" in names else {}
        given |= further | {cache_is: cache}
        output = inner(input_ids=ids, attention_mask=mask, use_cache=True, return_dict=True, **given)
        return output.logits[:, -1], getattr(output, cache_is)

    return read


def decode(
    model: Any, prompt_PQ: Tensor, mask_PQ: Tensor, copies: int, longest: int, ends: Collection[int], pad: int,
    draw: Draw, kept: dict[int, Kept] | None = None,
) -> Drawn | None:  # fmt: skip
    """Return G completions of every prompt with the figures of their draws by token, (S, C) each.

    It is None where the caller has to use `generate`. C is the length of the longest completion; behind its end a row
    is padding. The model reads the rows that have not ended and no others. The host waits for the device once a token,
    to learn which have. What was read of rows that end by a token goes into `kept`, by row.
    """
    read, prompts = _reader(model), ShortCache()
    logits_SV, cache = read(prompt_PQ, mask_PQ, (mask_PQ.cumsum(1) - 1).clamp(min=0), prompts)
    plain = all(type(layer) is DynamicLayer and layer.get_seq_length() > 0 for layer in prompts.layers)
    if cache is not prompts or not prompts.layers or not plain:  # keys and values of all tokens, and nothing else
        return None
    logits_SV = logits_SV.repeat_interleave(copies, 0)
    for index in range(len(prompts.layers)):  # one after another: the prompts' own keys are let go
        prompts.layers[index] = PreallocatedLayer(prompts.layers[index], copies, mask_PQ.shape[1] + longest - 1)
    rooms = [longest] * len(logits_SV)
    return _draw(read, prompts, logits_SV, mask_PQ.repeat_interleave(copies, 0), rooms, ends, pad, draw, kept)


def decode_on(
    model: Any, contexts: Sequence[Sequence[int]], read_before: Sequence[Kept], rooms: Sequence[int],
    ends: Collection[int], pad: int, draw: Draw, kept: dict[int, Kept], still: Collection[int] = (),
) -> Drawn:  # fmt: skip
    """Return what `decode` returns, of rows whose contexts begin with what was `read_before`, (N, C) each.

    Tokens lie on the right, without gaps, as those of prompts do. Where a row has fewer new tokens than another, the
    model reads its last ones once more with them. `rooms` are the most tokens of each row. What was read before is let
    go layer by layer, but for the blocks (by `id` of their layers) that are `still` needed by other rows.
    """
    read, device = _reader(model), read_before[0].layers[0][0].device
    lengths = [len(context) for context in contexts]
    known = [row.layers[0][0].shape[2] - row.begin for row in read_before]
    new, width = max(map(int.__sub__, lengths, known)), max(lengths)
    length_N1 = torch.tensor(lengths, device=device)[:, None]
    mask_NW = (torch.arange(width, device=device) >= width - length_N1).long()
    # The token of column c is the row's token number c - (width - length), which was kept in column `begin` + that.
    shift_N1 = torch.tensor([row.begin for row in read_before], device=device)[:, None] - width + length_N1
    column_NB = (torch.arange(width - new, device=device) + shift_N1).clamp(min=0)
    sources: dict[int, list[int]] = {}
    for row, each in enumerate(read_before):
        sources.setdefault(id(each.layers), []).append(row)
    cache = ShortCache()
    for number in range(len(read_before[0].layers)):
        layer = DynamicLayer()
        for which in (0, 1):
            first = read_before[0].layers[number][which]
            values = first.new_zeros(len(contexts), first.shape[1], width - new, first.shape[3])
            for rows in sources.values():
                row_M = torch.tensor(rows, device=device)
                place_M = torch.tensor([read_before[row].place for row in rows], device=device)
                source = read_before[rows[0]].layers[number][which]
                column_MB = column_NB[row_M].clamp(max=source.shape[2] - 1)
                values[row_M] = source[place_M[:, None], :, column_MB].transpose(1, 2)
            setattr(layer, ("keys", "values")[which], values)
        for rows in sources.values():
            if id(block := read_before[rows[0]].layers) not in still:
                block[number] = (values[:0], values[:0])
        cache.layers.append(PreallocatedLayer(layer, 1, width + max(rooms) - 1))
    last_NC = torch.tensor([[pad] * (new - len(c)) + list(c[-new:]) for c in contexts], device=device)
    position_NC = (torch.arange(width - new, width, device=device) - (width - length_N1)).clamp(min=0)
    logits_NV, _ = read(last_NC, mask_NW, position_NC, cache)
    return _draw(read, cache, logits_NV, mask_NW, rooms, ends, pad, draw, kept)


def _draw(
    read: Read, cache: Any, logits_SV: Tensor, mask_SQ: Tensor, rooms: Sequence[int], ends: Collection[int], pad: int,
    draw: Draw, kept: dict[int, Kept] | None,
) -> Drawn:  # fmt: skip
    """Draw token after token behind what was read, until every row has ended or has as many as its room."""
    Q, longest = mask_SQ.shape[1], max(rooms)
    mask_ST = torch.cat([mask_SQ, mask_SQ.new_ones(len(mask_SQ), longest)], 1)
    rows, length_S = list(range(len(mask_SQ))), mask_SQ.sum(1)
    live = _Live(cache, rows, torch.arange(len(mask_SQ), device=mask_SQ.device), length_S, mask_ST)
    begins = (Q - length_S).tolist() if kept is not None else []
    completion_SC = mask_SQ.new_full((len(rows), longest), pad)
    wide = _wide(logits_SV)
    kinds = 3 if draw.features and draw.temperature else 1  # log-probability, entropy, logit norm
    values = [torch.zeros_like(completion_SC, dtype=wide) for _ in range(kinds)]
    for column in range(longest):
        token_N, *values_of_draw = (value_N for value_N in draw(logits_SV) if value_N is not None)
        completion_SC[live.row_N, column] = token_N
        for value_SC, value_N in zip(values, values_of_draw, strict=True):
            value_SC[live.row_N, column] = value_N.to(wide)
        tokens = token_N.tolist()
        if min(tokens) < 0:
            raise DivergedError("the policy's probabilities are NaN; lower learning_rate.")
        ended = [token in ends for token in tokens]
        if kept is not None and any(ended):
            layers = live.keys_and_values(ended)
            for place, row in enumerate(row for row, end in zip(live.rows, ended, strict=True) if end):
                kept[row] = Kept(layers, place, begins[row])
        ended = [end or column + 1 == rooms[row] for row, end in zip(live.rows, ended, strict=True)]
        token_N = live.without(ended, token_N)
        if not len(token_N):
            break
        mask_NT = live.mask_NT[:, : Q + column + 1]
        logits_SV, _ = read(token_N[:, None], mask_NT, (live.length_N + column)[:, None], cache)
    return Drawn(*(value_SC[:, : column + 1] for value_SC in (completion_SC, *values)))


class ShortCache(DynamicCache):  # type: ignore[misc]
    """Keys and values in the type that autocast gives attention, which otherwise would read them in it every time.

    Norms and rotations return float32 under autocast, and a layer of keys in float32 keeps its values so, too: twice
    the memory for the digits that attention drops.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *which: Any, **further: Any) -> tuple[Tensor, Tensor]:
        """Add the next tokens' keys and values, and return all of them."""
        if torch.is_autocast_enabled(device := key_states.device.type):
            short = torch.get_autocast_dtype(device)
            key_states, value_states = key_states.to(short), value_states.to(short)
        kept: tuple[Tensor, Tensor] = super().update(key_states, value_states, *which, **further)
        return kept


@dataclass
class _Live:
    """The N rows that have not ended, in the first N places of everything; they move up when others leave."""

    cache: DynamicCache
    rows: list[int]  # their places among the S rows
    row_N: Tensor  # the same on the device
    length_N: Tensor  # the length of each row's prompt
    mask_NT: Tensor  # which tokens are real, with all columns that may come

    def keys_and_values(self, chosen: list[bool]) -> list[tuple[Tensor, Tensor]]:
        """Return copies of what was read of some rows, by layer."""
        place_M = torch.tensor(chosen, device=self.row_N.device).nonzero().flatten()
        layers = [(layer.keys, layer.values, layer.get_seq_length()) for layer in self.cache.layers]
        return [(keys[place_M, :, :length], values[place_M, :, :length]) for keys, values, length in layers]

    def without(self, ended: list[bool], token_N: Tensor) -> Tensor:
        """Let rows leave, and return the tokens of the others in their new places.

        The last rows take the places of those that left: what is copied is at most what leaves.
        """
        if not any(ended):
            return token_N
        count = ended.count(False)
        holes = [place for place in range(count) if ended[place]]
        movers = [place for place in range(count, len(ended)) if not ended[place]]
        into, out_of = (torch.tensor(places, dtype=torch.long, device=token_N.device) for places in (holes, movers))
        for layer in self.cache.layers:
            layer.keep(count, into, out_of)
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
        del self.rows[count:]
        moved = [self.row_N, self.length_N, self.mask_NT, token_N]
        for values in moved:
            values[into] = values[out_of]
        self.row_N, self.length_N, self.mask_NT, token_N = (values[:count] for values in moved)
        return token_N


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values of S rows, (S, heads, columns, width), of which the first `rows` are in use.

    The memory is there before they are: they are written in place, and rows that have ended leave it. Row p G + j is
    copy j of prompt p; `limit` is the most columns that will ever be needed.
    """

    def __init__(self, prompts: DynamicLayer, copies: int, limit: int) -> None:
        super().__init__()
        self.length: int = prompts.keys.shape[2]
        self.limit = limit
        self.rows = len(prompts.keys) * copies
        self.dtype, self.device, self.is_initialized = prompts.keys.dtype, prompts.keys.device, True
        columns = min(limit, self.length + BLOCK)
        self.keys, self.values = (_roomy(kept, copies, columns) for kept in (prompts.keys, prompts.values))

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the next tokens' keys and values behind those that are there, and return all of them."""
        stop = self.length + key_states.shape[2]
        if stop > self.keys.shape[2]:
            columns = max(stop, min(self.limit, self.length + BLOCK))
            self.keys = _roomy(self.keys[: self.rows, :, : self.length], 1, columns)
            self.values = _roomy(self.values[: self.rows, :, : self.length], 1, columns)
        self.keys[: self.rows, :, self.length : stop] = key_states
        self.values[: self.rows, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[: self.rows, :, :stop], self.values[: self.rows, :, :stop]

    def get_seq_length(self) -> int:
        """Return the number of columns that have been written."""
        return self.length

    def keep(self, rows: int, into: Tensor, out_of: Tensor) -> None:
        """Copy rows `out_of` onto the rows `into`, and use the first `rows` from then on."""
        for kept in (self.keys, self.values):
            kept[into, :, : self.length] = kept[out_of, :, : self.length]
        self.rows = rows


def _roomy(kept: Tensor, copies: int, columns: int) -> Tensor:
    """Copies of every row's keys or values, in room for so many columns."""
    rows, heads, length, width = kept.shape
    room = kept.new_empty(rows, copies, heads, columns, width)
    room[:, :, :, :length] = kept[:, None]
    return room.flatten(0, 1)
