"""The pass over a rank's rows that takes scores: log-probabilities, their squared norms, and inner products.

It stands in for verl's own pass for old log-probabilities. FSDP2 gathers the parameters in it as in any forward and
backward, so every rank must make the same number of passes; ranks with fewer micro-batches repeat their last.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.padding import no_padding_2_padding

from oblrpo.adapters.verl.prompt_rows import PADDING, PromptRows
from oblrpo.adapters.verl.settings import Settings
from oblrpo.scores import ScoreTape, Sketch

NORM2, GRAM, SKETCH = "oblrpo_norm2", "oblrpo_gram", "oblrpo_sketch"
"""The columns of scores: squared norms (B,), inner products with the outputs of the same prompt (B, G), and sketches
one after another (B, K L)."""

FEATURES = "oblrpo_features"
"""The column of what a forward alone knows of an output, (B, 4): the fields of `scores.Features`."""


def forward_features(model_output: dict[str, Tensor], data: TensorDict) -> Tensor:
    """Sum log_probs, entropy and logit norms, 1 - 2 pi + sum pi^2, over every row's own tokens, (B, 4)."""
    mask_SC = data["response_mask"].to_padded_tensor(0).cpu()
    logp_SC, entropy_SC, pi2_SC = (
        no_padding_2_padding(model_output[name].cpu(), data).double() for name in ("log_probs", "entropy", SUM_PI2)
    )
    logit_norm2_SC = (1 - 2 * logp_SC.exp() + pi2_SC).clamp(min=0)  # verl's float32 can put 0 below 0
    sums = [(value_SC * mask_SC).sum(1) for value_SC in (torch.ones_like(logp_SC), logit_norm2_SC, logp_SC, entropy_SC)]
    return torch.stack(sums, 1)


SUM_PI2 = "sum_pi_squared"
"""The name by which verl gives the sum of a distribution's squared probabilities, token by token."""


def score_rows(engine: Any, tape: ScoreTape, settings: Settings, data: TensorDict) -> dict[str, Tensor]:
    """Return the columns of this rank's rows, in their order: log_probs and entropy, as in verl's own pass, and scores.

    Args:
        engine: the engine whose `forward_step` runs the model.
        tape: a tape on its module, with the method "streamed".
        settings: the settings that say which inner products to take.
        data: the rows of this rank; carries `oblrpo_sketch_seeds`, `oblrpo_group_size` G with exact inner products, and
            in `oblrpo_prompts` the uids of the prompts whose scores to take, or None for all. Other rows keep zeros.
    """
    sketches = [
        Sketch(seed, settings.sketch_directions, settings.sketch_dimensions)
        for seed in tu.get_non_tensor_data(data, "oblrpo_sketch_seeds", [])
    ]
    columns = _Columns(len(data), tu.get_non_tensor_data(data, "oblrpo_group_size", 0), sketches)
    for groups, counts in _micro_batches(engine, settings, data):
        rows = list(chain.from_iterable(groups))
        micro_batch = tu.index_select_tensor_dict(data, rows)
        log_probs, entropy = _record(engine, tape, micro_batch, settings.exact_pairs, sketches)
        if counts:
            columns.add(rows, tape, log_probs, entropy)
        if counts and settings.exact_pairs:
            columns.add_gram(groups, tape.gram())
    return columns.finish(data["input_ids"].offsets().diff().tolist())


def _micro_batches(engine: Any, settings: Settings, data: TensorDict) -> Iterator[tuple[list[list[int]], bool]]:
    """Yield the rows of each pass, by prompt where that matters, and whether they count or only keep ranks in step."""
    uids = [str(uid) for uid in tu.get(data, "uid")]
    chosen = tu.get_non_tensor_data(data, "oblrpo_prompts", None)
    if settings.exact_pairs:
        groups = [] if all(uid.startswith(PADDING) for uid in uids) else PromptRows(uids).rows_of
        groups = [rows for rows in groups if chosen is None or uids[rows[0]] in chosen]
        size = settings.prompts_per_micro_batch
        passes = [groups[start : start + size] for start in range(0, len(groups), size)]
    else:  # verl's own, which are as many on every rank
        chunks, indices = prepare_micro_batches(data, dp_group=engine.get_data_parallel_group())
        if indices is None:
            ends = torch.tensor([len(chunk) for chunk in chunks]).cumsum(0).tolist()
            indices = [list(range(end - len(chunk), end)) for chunk, end in zip(chunks, ends, strict=True)]
        wanted = [[row for row in rows if chosen is None or uids[row] in chosen] for rows in indices]
        passes = [[rows] for rows in wanted if rows]
    most = torch.tensor(len(passes), device=data["input_ids"].device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
    for index in range(int(most)):
        yield (passes[index] if index < len(passes) else (passes[-1] if passes else [[0]])), index < len(passes)


def _record(
    engine: Any, tape: ScoreTape, micro_batch: TensorDict, gram: bool, sketches: list[Sketch]
) -> tuple[list[Tensor], list[Tensor]]:
    """Record one forward and backward; return log-probabilities and entropies of every token, row by row."""
    kept: dict[str, Tensor] = {}

    def capture(
        model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["response_mask"].to_padded_tensor(0)
        logps_SC = no_padding_2_padding(model_output["log_probs"], data)
        kept["logps_S"] = (logps_SC.float() if logps_SC.dtype.itemsize < 4 else logps_SC).mul(mask).sum(1)
        kept.update({name: value.detach() for name, value in model_output.items()})
        return kept["logps_S"].detach().sum(), {}

    with torch.enable_grad(), tape:
        engine.forward_step(micro_batch, loss_function=capture, forward_only=False)
        packed = tu.get_non_tensor_data(micro_batch, "use_remove_padding", True)
        sequence_ids = _sequence_ids(engine, micro_batch) if packed else None
        tape.record(kept["logps_S"], sequence_ids=sequence_ids, gram=gram, sketches=sketches)
    return list(kept["log_probs"].unbind()), list(kept["entropy"].unbind())


def _sequence_ids(engine: Any, micro_batch: TensorDict) -> Tensor:
    """The sequence that each packed token belongs to, (1, L); -1 for tokens that only fill up."""
    lengths_S = micro_batch["input_ids"].offsets().diff()
    ids_L = torch.arange(len(lengths_S), device=lengths_S.device).repeat_interleave(lengths_S)
    fill = engine._get_packed_pad_size(len(ids_L))
    return torch.nn.functional.pad(ids_L, (0, fill), value=-1)[None]


class _Columns:
    """The columns of the rank's rows as far as they are known; rows of padding keep zeros."""

    def __init__(self, rows: int, group_size: int, sketches: list[Sketch]) -> None:
        self.log_probs: list[Tensor | None] = [None] * rows
        self.entropy: list[Tensor | None] = [None] * rows
        self._sketches = sketches
        self.scores = {NORM2: torch.zeros(rows, dtype=torch.float64)}
        if group_size:
            self.scores[GRAM] = torch.zeros(rows, group_size, dtype=torch.float64)
        if sketches:
            self.scores[SKETCH] = torch.zeros(rows, len(sketches) * sketches[0].dimensions)

    def add(self, rows: list[int], tape: ScoreTape, log_probs: list[Tensor], entropy: list[Tensor]) -> None:
        """Put in the results of a micro-batch."""
        self.scores[NORM2][rows] = tape.norm2().double().cpu()
        for place, row in enumerate(rows):
            self.log_probs[row], self.entropy[row] = log_probs[place].float().cpu(), entropy[place].float().cpu()
        if self._sketches:
            self.scores[SKETCH][rows] = torch.cat([tape.sketch(*spec).float().cpu() for spec in self._sketches], 1)

    def add_gram(self, groups: list[list[int]], gram_SS: Tensor) -> None:
        """Put in the inner products of a micro-batch, prompt by prompt."""
        start = 0
        for rows in groups:
            block = slice(start, start + len(rows))
            self.scores[GRAM][rows, : len(rows)] = gram_SS[block, block].double().cpu()
            start = block.stop

    def finish(self, lengths: list[int]) -> dict[str, Tensor]:
        """Return all columns."""
        nested = {}
        for name, values in (("log_probs", self.log_probs), ("entropy", self.entropy)):
            whole = [torch.zeros(n) if row is None else row for row, n in zip(values, lengths, strict=True)]
            nested[name] = torch.nested.as_nested_tensor(whole, layout=torch.jagged)
        return nested | self.scores
