"""The synchronous trainer of verl with OBLR-PO, `trainer.v1.trainer_mode=oblr_po`, and its part in scores."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from torch import Tensor
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance

from oblrpo import estimators
from oblrpo.adapters.shared import baseline_metrics, norm_metrics, with_tensors, without_tensors
from oblrpo.adapters.verl.advantages import taken_from
from oblrpo.adapters.verl.engine import OBLRWorker
from oblrpo.adapters.verl.prompt_rows import PADDING, PromptRows, place_on_ranks
from oblrpo.adapters.verl.scoring import FEATURES, GRAM, SKETCH
from oblrpo.adapters.verl.settings import ESTIMATORS, Settings, check_config, read_settings
from oblrpo.errors import InputError
from oblrpo.scores import CalibratedProxy, Features
from oblrpo.step import BaselinePass, StepBaseline
from oblrpo.step.look import counted, gram_of, ledger_metrics, ledger_of
from oblrpo.tables.algorithms import Algorithm

STATE = "oblrpo_baseline.json"
"""The file beside verl's own in a checkpoint."""


class BatchScores:
    """The look at one batch: what is requested of the workers, and what follows from their answers.

    Args:
        settings: the settings of the adapter.
        step: the global step of verl.
        outputs: the greatest number G of outputs of a prompt.
        uids: the uid of every row, in any order.
        measured: whether signal and noise were measured before.
    """

    def __init__(
        self, settings: Settings, step: int, outputs: int, uids: Sequence[str] = (), measured: bool = True
    ) -> None:
        every = settings.ledger_steps
        self.takes_ledger = bool(every) and (step == 1 or step % every == 0)
        due = step == 1 or step % settings.calibration_steps == 0 or not measured
        self.exact = not settings.calibrated or due or self.takes_ledger
        self._chosen: tuple[str, ...] | None = None  # all
        if settings.calibrated and not self.takes_ledger:
            # A uid is drawn at random when its prompt is: the choice knows nothing of outputs or their lengths.
            prompts = sorted({uid for uid in uids if not uid.startswith(PADDING)})
            self._chosen = tuple(prompts[: math.ceil(len(prompts) * settings.calibration_share)])
        self._settings, self._outputs = settings, outputs
        sketched = self.takes_ledger or (settings.needs_moments and not settings.exact_pairs)
        self._seeds = (2 * step, 2 * step + 1) if sketched else ()

    def requests(self) -> dict[str, Any]:
        """Return the entries of the batch's `extra_info` that request scores of the workers."""
        return {
            "oblrpo_features": self._settings.calibrated,
            "oblrpo_score": self.exact,
            "oblrpo_prompts": self._chosen,
            "oblrpo_sketch_seeds": self._seeds,
            "oblrpo_group_size": self._outputs if self._settings.exact_pairs else 0,
        }

    @property
    def columns(self) -> list[str]:
        """The names of the columns in which the workers answer."""
        scores = [GRAM, SKETCH] if self._seeds else [GRAM]
        return ([FEATURES] if self._settings.calibrated else []) + (scores if self.exact else [])

    def take(self, data: Any) -> None:
        """Receive those columns, with uid and response_mask, in the batch's order."""
        uids, mask_SC = [str(uid) for uid in tu.get(data, "uid")], data["response_mask"].to_padded_tensor(0)
        self.groups = groups = PromptRows(uids, mask_SC.any(1))
        self._own_PGT = groups.take(mask_SC.double())
        self._known_P = torch.tensor([self._chosen is None or uids[own[0]] in self._chosen for own in groups.rows_of])
        self._columns = {name: groups.take(_dense(data[name]).double()) for name in self.columns}
        self._gram_PGK = self._columns[GRAM][..., : groups.size] if self.exact else None

    @property
    def mean_length(self) -> float:
        """The mean length of the outputs that count, in tokens."""
        return float(self._own_PGT.sum(2)[self.groups.valid_PG].mean())

    @property
    def norm2_PG(self) -> Tensor:
        """Squared score norms; 0 where they were not requested."""
        assert self._gram_PGK is not None
        return self._gram_PGK.diagonal(dim1=1, dim2=2) if self._settings.exact_pairs else self._gram_PGK[..., 0]

    def advantages(self, rewards_S: Tensor, baseline: BaselinePass, metrics: dict[str, float]) -> Tensor:
        """The advantage F - b of every output, in the batch's order; `metrics` gets those of the baseline."""
        groups, valid_PG, rewards_PG = self.groups, self.groups.valid_PG, self.groups.take(rewards_S)
        weight_PG = self.weight_PG(baseline.past.calibrated)
        baseline_PG = baseline.of(rewards_PG, valid_PG, self._own_PGT, weight_PG)
        found = baseline_metrics(valid_PG, baseline_PG) | norm_metrics(rewards_PG, valid_PG, weight_PG)
        metrics.update({f"critic/{name}": value for name, value in found.items()})
        return groups.put(estimators.advantages(rewards_PG, baseline_PG, valid_PG))

    def weight_PG(self, proxy: CalibratedProxy) -> Tensor:
        """The weight of every output's reward: its squared score norm, or what the proxy takes it for."""
        if not self._settings.calibrated:
            return self.norm2_PG
        return proxy.predict(self._features).view_as(self.groups.valid_PG)

    def teach(self, proxy: CalibratedProxy) -> float:
        """Let the proxy see this batch's exact norms; return how well it agreed with them before, NaN if unknown."""
        valid_PG = self.groups.valid_PG & self._known_P[:, None]
        return proxy.observe(self._features, self.norm2_PG.flatten(), self.groups.size, valid_PG.flatten())

    @property
    def _features(self) -> Features:
        """The features of outputs in the order of prompts; where there is none, those of a token that is certain."""
        certain = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
        table_PGK = torch.where(self.groups.valid_PG[..., None], self._columns[FEATURES], certain)
        return Features(*table_PGK.flatten(0, 1).unbind(1))

    def group_norm2(
        self, data: Any, scale: float, rewards_PG: Tensor | None = None, rows: int | None = None
    ) -> dict[str, Any]:
        """What the workers need for signal and noise: the squared norm of every prompt's gradient g_i, and `own2`.

        The mean of the g_i is the gradient of verl's loss. Where scores of some prompts alone were taken, their mean
        stands for each of the others, which is what `estimators.moments` needs of them. Nothing where no scores were
        taken, unless all gradients are known to be 0.

        Args:
            data: `advantages` and `response_mask` in the batch's order.
            scale: the factor of an output's advantage in the loss.
            rewards_PG: the rewards F; with `rows` only.
            rows: the number of prompts to train on, where they can be counted; then `own2` is `estimators.own_norm2`.
        """
        valid_PG, known_P = self.groups.valid_PG, self._known_P
        scale = scale * len(valid_PG)  # in g_i
        coef_PG = self.groups.take(_one_an_output(data)) * valid_PG * scale
        if not coef_PG.any():
            return {"group_norm2": [0.0] * len(coef_PG)}
        if self._gram_PGK is None:
            return {}
        gram_PGG = self._gram_PGK if self._settings.exact_pairs else self._estimated_PGG()
        norm2_P = estimators.group_norm2(gram_PGG, coef_PG)
        norm2_P[~known_P] = norm2_P[known_P].mean()
        norms = {"group_norm2": norm2_P.tolist()}
        if rows is None or rewards_PG is None:
            return norms
        unit_P = valid_PG.sum(1) * scale  # verl's g_i over the mean of A s
        gram_PGG = gram_PGG * unit_P.square()[:, None, None]
        own2 = estimators.own_norm2(gram_PGG[known_P], rewards_PG[known_P], valid_PG[known_P])
        return norms | {"own2": own2, "rows": rows}

    def _estimated_PGG(self) -> Tensor:
        """Inner products of prompts' scores from sketches, but exact squared norms."""
        sketch_PGKL = self._columns[SKETCH].unflatten(2, (len(self._seeds), -1))
        gram_PGG = torch.einsum("pgkl,phkl->pgh", sketch_PGKL, sketch_PGKL) / len(self._seeds)
        return gram_PGG.diagonal_scatter(self.norm2_PG, dim1=1, dim2=2)

    def ledger(self, rewards_PG: Tensor, prior: estimators.Prior) -> dict[str, float]:
        """What the noise of this batch's gradient would have been under every baseline but the token-level one."""
        assert self._gram_PGK is not None
        keep_P, K = self.groups.valid_PG.any(1), self._gram_PGK.shape[2]
        sketches = self._columns[SKETCH][keep_P].flatten(0, 1).tensor_split(len(self._seeds), 1)
        gram_SS = gram_of(sketches, self._gram_PGK[keep_P].reshape(-1, K, K))  # exact of prompts, or of single rows
        inputs = estimators.baseline_inputs(self._own_PGT[keep_P], self.norm2_PG[keep_P])
        ledger = ledger_of(gram_SS, rewards_PG[keep_P], self.groups.valid_PG[keep_P], inputs, prior)
        return {f"critic/{name}": value for name, value in ledger_metrics(ledger).items()}


def _dense(column: Tensor) -> Tensor:
    """Return a column as it was put in: rows of equal length come back from the queue as a nested tensor."""
    return column.to_padded_tensor(0) if column.is_nested else column


def _one_an_output(data: Any) -> Tensor:
    """The advantage of every output, (S,)."""
    mask_SC = data["response_mask"].to_padded_tensor(0)
    advantage_SC = data["advantages"].to_padded_tensor(0).double() * mask_SC
    advantage_S: Tensor = advantage_SC.sum(1) / mask_SC.sum(1).clamp(min=1)
    if not torch.allclose(advantage_SC, advantage_S[:, None] * mask_SC):
        raise InputError(
            "trainer_mode oblr_po measures signal and noise with one advantage per completion, but "
            "algorithm.adv_estimator gives its tokens different advantages; set +oblrpo.schedule=off."
        )
    return advantage_S


@register_trainer("oblr_po")
class OBLRTrainer(PPOTrainerSync):  # type: ignore[misc]
    """The trainer `PPOTrainerSync`, with baselines from scores and a rate that follows the signal-to-noise ratio.

    Scores are taken in the pass for old log-probabilities.
    """

    def __init__(self, config: Any) -> None:
        self._oblrpo = read_settings(OmegaConf.to_container(config.get("oblrpo") or OmegaConf.create({})))
        check_config(config, self._oblrpo)
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
        uids, outputs = [_uid(key) for key in batch.keys], self.config.actor_rollout_ref.rollout.n
        self._scores = BatchScores(self._oblrpo, self.global_steps, outputs, uids, self._measured)
        requests = self._scores.requests()
        batch.extra_info.update(requests)
        batch = super()._compute_old_log_prob(batch, metrics)
        for key in requests:
            batch.extra_info.pop(key, None)
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute advantages as verl does, from weights as well; then the prompts' gradient norms.

        A calibrated proxy sees exact norms only after it gave the weights, which therefore know nothing of the batch's
        other outputs: the gradient stays unbiased.
        """
        scores, past = self._scores, self._baseline
        scores.take(self._fetched(batch, "uid", "response_mask", *scores.columns))
        self._pass = past.begin()
        with taken_from(lambda rewards_S: scores.advantages(rewards_S, self._pass, metrics)):
            batch = super()._compute_advantage(batch, metrics)
        if self._oblrpo.calibrated and scores.exact:
            agreement = scores.teach(past.calibrated)
            metrics.update({} if math.isnan(agreement) else {"critic/score_norm2/agreement_calibrated": agreement})
        rewards = "token_level_rewards" if self.config.algorithm.use_kl_in_reward else "rm_scores"
        after = self._fetched(batch, "advantages", "response_mask", rewards)
        rewards_PG = scores.groups.take(after[rewards].to_padded_tensor(0).double().sum(1))
        differs = estimators.differ(rewards_PG, scores.groups.valid_PG)
        self._facts = {"differs": differs, "mean_length": scores.mean_length}
        if differs and self._oblrpo.needs_moments:
            rows = _rows(self.config, self.train_dataset)
            self._facts |= scores.group_norm2(after, self._loss_scale(), rewards_PG, rows)
            self._measured = self._measured or any(self._facts.get("group_norm2", ()))
            self._facts["headroom"] = estimators.headroom(rewards_PG, scores.groups.valid_PG)
        if scores.takes_ledger:
            metrics.update(scores.ledger(rewards_PG, past.prior))
        return batch

    def _fetched(self, batch: Any, *columns: str) -> Any:
        return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*columns])

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
