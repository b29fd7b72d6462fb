"""How far an update moves the policy, measured on some of every rank's outputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from oblrpo.estimators import ONE_IN


def measured(keys: Sequence[Sequence[int | None]], rank: int) -> tuple[list[int], int]:
    """This rank's rows of those that are measured, then others, so that all ranks have as many, and how many are meant.

    One row of `ONE_IN` is meant, over all ranks, those of the least keys: which rank has a row is chance in verl.

    Args:
        keys: of every rank's rows, by what the row says; None for padding.
        rank: whose rows.
    """
    own_keys = sorted(key for row in keys for key in row if key is not None)
    last = own_keys[math.ceil(len(own_keys) / ONE_IN) - 1]
    meant = [[place for place, key in enumerate(row) if key is not None and key <= last] for row in keys]
    mine, most = meant[rank], max(map(len, meant))
    others = [place for place in range(len(keys[rank])) if place not in mine]
    return [*mine, *others[: most - len(mine)]], len(mine)


def key_of(ids: Tensor) -> int:
    """A number by which a row is known from its tokens."""
    return zlib.crc32(ids.long().cpu().numpy().tobytes())


def low_precision(engine: Any) -> bool:
    """Whether an engine computes log-probabilities with fewer digits than float32."""
    return bool(engine._autocast_dtype != torch.float32)


class EngineMovement:
    """Takes log-probabilities of a subsample of the batch once more after the update.

    Every rank must make it and call it: the model is sharded over them.

    Args:
        engine: the engine that updates, before its update.
        data: the rows of this rank, padding too, with `old_log_probs`.
    """

    def __init__(self, engine: Any, data: TensorDict) -> None:
        self._engine = engine
        group = engine.get_data_parallel_group()
        keys: list[Any] = [None] * torch.distributed.get_world_size(group)
        own_S = data["response_mask"].to_padded_tensor(0).any(1).tolist()
        mine = [key_of(ids) if own else None for ids, own in zip(data["input_ids"].unbind(), own_S, strict=True)]
        torch.distributed.all_gather_object(keys, mine, group=group)
        rows, meant = measured(keys, torch.distributed.get_rank(group))
        self._rows = tu.index_select_tensor_dict(data, rows)
        tu.assign_non_tensor(self._rows, calculate_entropy=False)
        if size := tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", None):  # verl wants it to divide the rows
            tu.assign_non_tensor(self._rows, micro_batch_size_per_gpu=math.gcd(len(self._rows), size))
        self._mask_SC = self._rows["response_mask"].to_padded_tensor(0).bool().cpu()
        self._mask_SC[meant:] = False
        # In a short type the schedule compares forwards of these rows alone (`SNRSchedule`).
        self._before_SC = 0.0 if low_precision(engine) else self._own(self._rows["old_log_probs"].to_padded_tensor(0))

    def change(self) -> Tensor:
        """Return log pi after - log pi before by token, of all ranks' rows that are not padding, the same on each.

        In a short type it is log pi itself.
        """
        change_SC = (self._token_logps_SC() - self._before_SC)[self._mask_SC.any(1)]
        group = self._engine.get_data_parallel_group()
        parts: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(parts, change_SC, group=group)
        width = max(part.shape[1] for part in parts)
        return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])

    @torch.no_grad()
    def _token_logps_SC(self) -> Tensor:
        module = self._engine.module
        module.eval()
        try:
            output = self._engine.forward_backward_batch(self._rows, None, forward_only=True)["model_output"]
        finally:
            module.train()
            module.reshard()  # or the next forward would not see an update that was shortened
        return self._own(no_padding_2_padding(output["log_probs"].cpu(), self._rows))

    def _own(self, token_logps_SC: Tensor) -> Tensor:
        return torch.where(self._mask_SC, token_logps_SC.cpu().double(), 0.0)
