"""Saves what the trainer knew of its first batch, for a test to compute again. Loaded by VERL_USE_EXTERNAL_MODULES."""

import os

import torch
import transfer_queue as tq
from verl.utils import tensordict_utils as tu

from oblrpo.adapters.verl.scoring import GRAM
from oblrpo.adapters.verl.trainer import OBLRTrainer

_update_actor = OBLRTrainer._update_actor


def _and_dump(self, batch, metrics):
    if self.global_steps == 1:
        fields = ["uid", "prompts", "responses", "response_mask", "rm_scores", "advantages", "rollout_log_probs", GRAM]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        columns = {key: [row.clone() for row in data[key].unbind()] for key in fields[1:]}
        uids = [str(uid) for uid in tu.get(data, "uid")]
        torch.save({"uid": uids, "facts": self._facts, **columns}, os.environ["OBLRPO_TEST_DUMP"])
    return _update_actor(self, batch, metrics)


OBLRTrainer._update_actor = _and_dump
