"""What verl's forward says of a rank's rows, and a look at their scores: the columns in which workers answer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.padding import no_padding_2_padding

from oblrpo.adapters.verl.prompt_rows import rows_by_prompt
from oblrpo.adapters.verl.settings import Settings
from oblrpo.policy import Logps
from oblrpo.scores import Sketch
from oblrpo.step.look import look_by

GRAM, SKETCH = "oblrpo_gram", "oblrpo_sketch"
"""The columns of scores: inner products with the outputs of the same prompt, (B, G), or squared norms alone, (B, 1);
and sketches one after another, (B, K L)."""

FEATURES = "oblrpo_features"
"""The column of what a forward alone knows of an output, (B, 4): the fields of `scores.Features`."""

SUM_PI2 = "sum_pi_squared"
"""The name by which verl gives the sum of a distribution's squared probabilities, token by token."""


def logps_of(columns: dict[str, Tensor], data: TensorDict) -> Logps:
    """What verl's forward says of some rows; logit norms are NaN where it was not asked for `SUM_PI2`."""

    def of_response(name: str) -> Tensor:
        value_SC: Tensor = no_padding_2_padding(columns[name], data)
        return value_SC.to(torch.promote_types(value_SC.dtype, torch.float32))

    token_logps_SC, entropy_SC = of_response("log_probs"), of_response("entropy")
    own_SC, logit_norm2_SC = data["response_mask"].to_padded_tensor(0), torch.full_like(entropy_SC, torch.nan)
    if SUM_PI2 in columns:
        logit_norm2_SC = 1 - 2 * token_logps_SC.exp() + of_response(SUM_PI2)  # verl's float32 can put 0 below 0
    logps_S = (token_logps_SC * own_SC).sum(1)
    return Logps(logps_S, token_logps_SC, entropy_SC, logit_norm2_SC.clamp(min=0), own_SC)


def forward_features(columns: dict[str, Tensor], data: TensorDict) -> Tensor:
    """The features of every row, (B, 4); 0 where it has no token of the policy's own."""
    logps = logps_of({name: value.cpu() for name, value in columns.items()}, data.cpu())
    table_SK, known_S = torch.zeros(len(data), 4, dtype=torch.float64), logps.own_SC.any(1)
    features = Logps(*(values[known_S] for values in vars(logps).values())).features
    table_SK[known_S] = torch.stack([*vars(features).values()], 1).double()
    return table_SK


def score_rows(engine: Any, settings: Settings, data: TensorDict) -> dict[str, Tensor]:
    """Look at this rank's rows; return log_probs, entropy and scores as columns, in the order of the rows.

    Args:
        engine: the engine whose `forward_step` runs the model.
        settings: the settings that say which inner products to take.
        data: the rows of this rank; carries `oblrpo_sketch_seeds`, `oblrpo_group_size` with exact inner products, and
            in `oblrpo_prompts` the uids of the prompts whose scores to take, or None for all. Other rows keep zeros.
    """
    seeds = tu.get_non_tensor_data(data, "oblrpo_sketch_seeds", [])
    sketches = [Sketch(seed, settings.sketch_directions, settings.sketch_dimensions) for seed in seeds]
    passes, G = _passes(engine, settings, data)
    # FSDP2 gathers the parameters in every pass, so all ranks make as many.
    most = torch.tensor(len(passes), device=data["input_ids"].device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
    taken = passes or [[0] * G]
    row_S = [row for rows in taken for row in rows]

    def forward(places_S: Tensor) -> tuple[Tensor, Logps, Tensor | None]:
        found = list[Logps]()

        def keep(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
            found.append(logps_of(model_output, data))
            return found[0].logps_S.detach().sum(), {}

        part = tu.index_select_tensor_dict(data, [row_S[place] for place in places_S.tolist()])
        engine.forward_step(part, loss_function=keep, forward_only=False)
        packed = tu.get_non_tensor_data(part, "use_remove_padding", True)
        return found[0].logps_S, found[0], _sequence_ids(engine, part) if packed else None

    blocks = [*torch.arange(len(row_S)).split([len(rows) for rows in taken])]
    with torch.enable_grad():
        seen = look_by(engine.module, forward, blocks, G, sketches, idle=max(0, int(most) - len(taken)))
    written = row_S if passes else []  # what was taken in step with the other ranks alone is nobody's

    def column(values_SN: Tensor) -> Tensor:
        whole_BN = torch.zeros(len(data), *values_SN.shape[1:], dtype=values_SN.dtype)
        whole_BN[written] = values_SN[: len(written)].cpu()
        return whole_BN

    width = tu.get_non_tensor_data(data, "oblrpo_group_size", 0) or 1
    columns = {GRAM: column(pad(seen.gram_PGG.flatten(0, 1).double(), (0, width - G)))}
    if sketches:
        columns[SKETCH] = column(torch.cat(seen.sketches, 1).float())
    by_token = {"log_probs": seen.logps.token_logps_SC, "entropy": seen.logps.entropy_SC}
    return columns | {name: _of_whole_rows(column(value_SC.float()), data) for name, value_SC in by_token.items()}


def _passes(engine: Any, settings: Settings, data: TensorDict) -> tuple[list[list[int]], int]:
    """The rows of each pass in whole groups, and their size G: a prompt's outputs, or single rows.

    A prompt that lacks outputs has its first one several times.
    """
    uids, chosen = [str(uid) for uid in tu.get(data, "uid")], tu.get_non_tensor_data(data, "oblrpo_prompts", None)
    if settings.exact_pairs:
        groups = [rows for rows in rows_by_prompt(uids) if chosen is None or uids[rows[0]] in chosen]
        G, size = max(map(len, groups), default=1), settings.prompts_per_micro_batch
        rows = [row for group in groups for row in group + group[:1] * (G - len(group))]
        return [rows[start : start + size * G] for start in range(0, len(rows), size * G)], G
    chunks, indices = prepare_micro_batches(data, dp_group=engine.get_data_parallel_group())
    if indices is None:
        indices = [part.tolist() for part in torch.arange(len(data)).split([len(chunk) for chunk in chunks])]
    wanted = [[row for row in rows if chosen is None or uids[row] in chosen] for rows in indices]
    return [rows for rows in wanted if rows], 1


def _of_whole_rows(values_SC: Tensor, data: TensorDict) -> Tensor:
    """Values of responses as verl has those of whole rows: the token before has a response's first one."""
    lengths = (data[name].offsets().diff().tolist() for name in ("prompts", "responses"))
    rows = [pad(value_C[:own], (asked - 1, 1)) for value_C, asked, own in zip(values_SC, *lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _sequence_ids(engine: Any, micro_batch: TensorDict) -> Tensor:
    """The sequence that each packed token belongs to, (1, L); -1 for tokens that only fill up."""
    lengths_S = micro_batch["input_ids"].offsets().diff()
    ids_L = torch.arange(len(lengths_S), device=lengths_S.device).repeat_interleave(lengths_S)
    return pad(ids_L, (0, engine._get_packed_pad_size(len(ids_L))), value=-1)[None]
