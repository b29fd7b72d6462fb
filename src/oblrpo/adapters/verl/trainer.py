"""The synchronous trainer of verl with OBLR-PO: `trainer.v1.trainer_mode=oblr_po`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance

from oblrpo import estimators
from oblrpo.adapters.shared import with_tensors, without_tensors
from oblrpo.adapters.verl.advantages import EstimatorInputs, handed_over
from oblrpo.adapters.verl.batch_scores import BatchScores
from oblrpo.adapters.verl.checks import check_choice, check_config
from oblrpo.adapters.verl.engine import OBLRWorker
from oblrpo.adapters.verl.prompt_rows import place_on_ranks
from oblrpo.adapters.verl.settings import ESTIMATORS, read_settings
from oblrpo.errors import InputError
from oblrpo.step import StepBaseline
from oblrpo.step.ledger import counted
from oblrpo.tables.algorithms import Algorithm

STATE = "oblrpo_baseline.json"
"""The file beside verl's own in a checkpoint."""


@register_trainer("oblr_po")
class OBLRTrainer(PPOTrainerSync):  # type: ignore[misc]
    """The trainer `PPOTrainerSync`, with baselines from scores and a rate that follows the signal-to-noise ratio.

    Scores are taken in the pass for old log-probabilities.
    """

    def __init__(self, config: Any) -> None:
        check_config(config)
        self._oblrpo = read_settings(OmegaConf.to_container(config.get("oblrpo") or OmegaConf.create({})))
        check_choice(config, self._oblrpo)
        with open_dict(config):
            config.actor_rollout_ref.oblrpo = config.get("oblrpo") or {}  # the only settings that reach the workers
            config.trainer.v1.trainer_mode = "sync"  # verl compares this name in several places
        super().__init__(config)
        name = ESTIMATORS.get(str(config.algorithm.adv_estimator), "oblr")  # verl's own estimators need none
        self._baseline = StepBaseline(name, "calibrated" if self._oblrpo.calibrated else "exact")
        self._facts: dict[str, Any] = {}  # what the update needs to know of its batch
        self._measured = False  # whether signal and noise ever were

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            if "actor" in str(role).lower():
                self.role_worker_mapping[role] = ray.remote(OBLRWorker)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Balance the batch as verl does; a prompt's outputs stay on one rank where exact inner products need it."""
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        most = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        if len(batch) > most:
            raise InputError(
                f"{len(batch)} rows, not the {most} requested: agent loops that return several trajectories per "
                "session would need several updates per batch, which oblr_po does not do."
            )
        if not self._oblrpo.exact_pairs:
            return batch
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        lengths = [tag["seq_len"] for tag in batch.tags]
        loads = calculate_workload(torch.tensor(lengths)).tolist()
        order = place_on_ranks([_uid(key) for key in batch.keys], loads, ranks)
        if order is None:
            raise InputError(
                f"a prompt's completions must fit on one of {ranks} ranks with {len(batch) // ranks} rows each; make "
                "data.train_batch_size a multiple of the ranks, or set +oblrpo.inner_products=sketched."
            )
        batch.reorder(order)
        rows = len(batch) // ranks
        parts = [list(range(start, start + rows)) for start in range(0, len(batch), rows)]
        ordered = [lengths[row] for row in order]
        metrics.update(log_seqlen_unbalance(seqlen_list=ordered, partitions=parts, prefix="global_seqlen"))
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute old log-probabilities as verl does, and scores, or what stands for them, in the same pass."""
        uids = [_uid(key) for key in batch.keys]
        outputs = self.config.actor_rollout_ref.rollout.n
        self._scores = BatchScores(self._oblrpo, self.global_steps, outputs, uids, self._measured)
        batch.extra_info.update(self._scores.requests())
        batch = super()._compute_old_log_prob(batch, metrics)
        for key in self._scores.requests():
            batch.extra_info.pop(key, None)
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute advantages as verl does, from weights as well; then the prompts' gradient norms.

        A calibrated proxy sees exact norms only after it gave the weights, which therefore know nothing of the batch's
        other outputs: the gradient stays unbiased.
        """
        fields = ["uid", "response_mask", *self._scores.columns]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        self._scores.take(data)
        self._pass = self._baseline.begin(self.global_steps)
        inputs = EstimatorInputs(self._scores.weight_S(self._baseline.calibrated), self._pass)
        with handed_over(inputs):
            batch = super()._compute_advantage(batch, metrics)
        metrics.update(inputs.metrics)
        if self._oblrpo.calibrated and self._scores.exact:
            agreement = self._scores.teach(self._baseline.calibrated)
            metrics.update({} if math.isnan(agreement) else {"critic/score_norm2/agreement_calibrated": agreement})
        rewards = "token_level_rewards" if self.config.algorithm.use_kl_in_reward else "rm_scores"
        fields = ["advantages", "response_mask", rewards]
        after = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        scale = self._loss_scale()
        rewards_PG, valid_PG = self._scores.rewards(after, rewards), self._scores.groups.valid_PG
        differs = estimators.differ(rewards_PG, valid_PG)
        self._facts = {"differs": differs, "mean_length": self._scores.mean_length}
        if differs and self._oblrpo.needs_moments:
            self._facts |= self._scores.group_norm2(after, scale, rewards_PG, _rows(self.config, self.train_dataset))
            self._measured = self._measured or any(self._facts.get("group_norm2", ()))
            self._facts["headroom"] = estimators.headroom(rewards_PG, valid_PG)
        if self._scores.takes_ledger:
            metrics.update(self._scores.ledger(after, rewards, self._baseline.prior))
        return batch

    def _loss_scale(self) -> float:
        """The factor of an output's advantage in the gradient of verl's loss, beside minus grad log pi(o|q)."""
        actor = self.config.actor_rollout_ref.actor
        outputs = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        constant = actor.loss_scale_factor if actor.loss_agg_mode == "seq-mean-token-sum-norm" else 1
        return 1.0 / float(outputs * constant)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Update the actor as verl does, and describe the batch to it; nothing is learned where no reward differs."""
        batch.extra_info["oblrpo_batch"] = json.dumps(self._facts)
        batch = super()._update_actor(batch, metrics)
        batch.extra_info.pop("oblrpo_batch", None)
        if self._facts["differs"]:
            self._baseline.end_step(self._pass)
        return batch

    def _save_checkpoint(self) -> None:
        """Save as verl does, our file first, because verl ends by naming the checkpoint as the latest."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        state = without_tensors(self._baseline.state_dict()) | {"measured": self._measured}
        (folder / STATE).write_text(json.dumps(state))
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        """Load as verl does; the prior and the calibrated proxy resume where they were."""
        super()._load_checkpoint()
        if not self.global_steps:
            return
        if self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path)
        else:
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        file = folder / STATE
        if not file.exists():
            raise InputError(f"{file} is missing: the checkpoint was written without oblr_po.")
        state = json.loads(file.read_text())
        self._measured = state.pop("measured")
        self._baseline.load_state_dict(with_tensors(state))


def _rows(config: Any, dataset: Any) -> int | None:
    """The number of prompts, where batches are drawn by chance, and hold a good part of them."""
    name, data = str(config.algorithm.adv_estimator), config.data
    if name not in (*ESTIMATORS, "rloo") or not data.shuffle or not hasattr(dataset, "__len__"):
        return None
    algorithm = Algorithm(ESTIMATORS.get(name, name))
    return counted(len(dataset), data.train_batch_size, config.actor_rollout_ref.rollout.n, algorithm)


def _uid(key: str) -> str:
    """The uid of a row's prompt, with which the queue's key of the row begins."""
    return key.rsplit("_", 2)[0]
