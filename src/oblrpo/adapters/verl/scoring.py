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
    """Sum 1, log_probs, entropy and logit norms, 1 - 2 pi + sum pi^2, over every row's own tokens, (B, 4)."""
    mask_SC = data["response_mask"].to_padded_tensor(0).cpu()
    token_logps_SC, entropy_SC, pi2_SC = (
        no_padding_2_padding(model_output[name].cpu(), data).double() for name in ("log_probs", "entropy", SUM_PI2)
    )
    logit_norm2_SC = (1 - 2 * token_logps_SC.exp() + pi2_SC).clamp(min=0)  # verl's float32 can put 0 below 0
    sums = [
        (value_SC * mask_SC).sum(1)
        for value_SC in (torch.ones_like(token_logps_SC), token_logps_SC, entropy_SC, logit_norm2_SC)
    ]
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
    rows, G = len(data), tu.get_non_tensor_data(data, "oblrpo_group_size", 0)
    columns = {NORM2: torch.zeros(rows, dtype=torch.float64)}
    if G:
        columns[GRAM] = torch.zeros(rows, G, dtype=torch.float64)
    if sketches:
        columns[SKETCH] = torch.zeros(rows, len(sketches) * sketches[0].dimensions)
    lengths = data["input_ids"].offsets().diff().tolist()
    by_token = {name: [torch.zeros(length) for length in lengths] for name in ("log_probs", "entropy")}
    for groups, counts in _micro_batches(engine, settings, data):
        chosen = list(chain.from_iterable(groups))
        together = len(chosen) if settings.exact_pairs else 0
        output = _record(engine, tape, tu.index_select_tensor_dict(data, chosen), together, sketches)
        if not counts:
            continue
        columns[NORM2][chosen] = tape.norm2().double().cpu()
        if sketches:
            columns[SKETCH][chosen] = torch.cat([tape.sketch(*sketch).float().cpu() for sketch in sketches], 1)
        for name, values in by_token.items():
            for row, value in zip(chosen, output[name].unbind(), strict=True):
                values[row] = value.float().cpu()
        if settings.exact_pairs:
            gram_SS, blocks = tape.gram()[0], torch.arange(len(chosen)).split([len(group) for group in groups])
            for group, block in zip(groups, blocks, strict=True):
                columns[GRAM][group, : len(group)] = gram_SS[block][:, block].double().cpu()
    nested = {name: torch.nested.as_nested_tensor(row, layout=torch.jagged) for name, row in by_token.items()}
    return nested | columns


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
        requested = [[row for row in rows if chosen is None or uids[row] in chosen] for rows in indices]
        passes = [[rows] for rows in requested if rows]
    most = torch.tensor(len(passes), device=data["input_ids"].device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
    for index in range(int(most)):
        yield (passes[index] if index < len(passes) else (passes[-1] if passes else [[0]])), index < len(passes)


def _record(
    engine: Any, tape: ScoreTape, micro_batch: TensorDict, gram: int, sketches: list[Sketch]
) -> dict[str, Tensor]:
    """Record one forward and backward; return verl's columns, nested: log_probs and entropy of every token."""
    output: dict[str, Tensor] = {}

    def capture(
        model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["response_mask"].to_padded_tensor(0)
        token_logps_SC = no_padding_2_padding(model_output["log_probs"], data)
        output["logps_S"] = (
            (token_logps_SC.float() if token_logps_SC.dtype.itemsize < 4 else token_logps_SC).mul(mask).sum(1)
        )
        output.update({name: value.detach() for name, value in model_output.items()})
        return output["logps_S"].detach().sum(), {}

    with torch.enable_grad(), tape:
        engine.forward_step(micro_batch, loss_function=capture, forward_only=False)
        packed = tu.get_non_tensor_data(micro_batch, "use_remove_padding", True)
        sequence_ids = _sequence_ids(engine, micro_batch) if packed else None
        tape.record(output["logps_S"], sequence_ids=sequence_ids, gram=gram, sketches=sketches)
    return output


def _sequence_ids(engine: Any, micro_batch: TensorDict) -> Tensor:
    """The sequence that each packed token belongs to, (1, L); -1 for tokens that only fill up."""
    lengths_S = micro_batch["input_ids"].offsets().diff()
    ids_L = torch.arange(len(lengths_S), device=lengths_S.device).repeat_interleave(lengths_S)
    fill = engine._get_packed_pad_size(len(ids_L))
    return torch.nn.functional.pad(ids_L, (0, fill), value=-1)[None]
