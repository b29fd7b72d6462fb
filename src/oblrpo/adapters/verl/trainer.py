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
from oblrpo.adapters.shared import with_tensors, without_tensors
from oblrpo.adapters.verl.advantages import EstimatorInputs, handed_over
from oblrpo.adapters.verl.engine import OBLRWorker
from oblrpo.adapters.verl.prompt_rows import PADDING, PromptRows, place_on_ranks
from oblrpo.adapters.verl.scoring import FEATURES, GRAM, NORM2, SKETCH
from oblrpo.adapters.verl.settings import ESTIMATORS, Settings, check_choice, check_config, read_settings
from oblrpo.errors import InputError
from oblrpo.scores import CalibratedProxy, Features
from oblrpo.step import StepBaseline
from oblrpo.step.look import counted, gram_of, ledger_metrics, ledger_of
from oblrpo.tables.algorithms import Algorithm

STATE = "oblrpo_baseline.json"
"""The file beside verl's own in a checkpoint."""


class BatchScores:
    """The scores of one batch: what is requested of the workers, and what follows from their answers.

    That is the prompts' gradient norms and the variance ledger.

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
        self._settings, self._step, self._outputs = settings, step, outputs
        self._pairs_sketched = settings.needs_moments and not settings.exact_pairs
        self._seeds = [2 * step, 2 * step + 1] if self.takes_ledger or self._pairs_sketched else []

    def requests(self) -> dict[str, Any]:
        """Return the entries of the batch's `extra_info` that request scores of the workers."""
        size = self._outputs if self._settings.exact_pairs else 0
        return {
            "oblrpo_features": self._settings.calibrated,
            "oblrpo_score": self.exact,
            "oblrpo_prompts": self._chosen,
            "oblrpo_sketch_seeds": tuple(self._seeds),
            "oblrpo_group_size": size,
        }

    @property
    def columns(self) -> list[str]:
        """The names of the columns in which the workers answer."""
        features = [FEATURES] if self._settings.calibrated else []
        if not self.exact:
            return features
        return [*features, NORM2, *([GRAM] if self._settings.exact_pairs else []), *([SKETCH] if self._seeds else [])]

    def take(self, data: Any) -> None:
        """Receive those columns, with uid and response_mask, in the batch's order."""
        uids = [str(uid) for uid in tu.get(data, "uid")]
        mask = data["response_mask"].to_padded_tensor(0)
        self.groups = PromptRows(uids, mask.any(1))
        self.mean_length = float(mask.sum(1)[mask.any(1)].double().mean())
        firsts = [uids[rows[0]] for rows in self.groups.rows_of]
        self._known_P = torch.tensor([self._chosen is None or uid in self._chosen for uid in firsts])
        columns = {name: _dense(data[name]) for name in self.columns}
        self._norm2, self._gram, self._features = columns.get(NORM2), columns.get(GRAM), columns.get(FEATURES)
        self._sketch = columns[SKETCH].unflatten(1, (len(self._seeds), -1)) if SKETCH in columns else None

    @property
    def norm2_S(self) -> Tensor:
        """Squared score norms, in the batch's order; 0 where they were not requested."""
        assert self._norm2 is not None
        return self._norm2

    def weight_S(self, proxy: CalibratedProxy) -> Tensor:
        """The weight of every output's reward: its squared score norm, or what the proxy takes it for."""
        if not self._settings.calibrated:
            return self.norm2_S
        valid_PG = self.groups.valid_PG
        return self.groups.put(torch.where(valid_PG, proxy.predict(self._taken_features()).view_as(valid_PG), 0))

    def teach(self, proxy: CalibratedProxy) -> float:
        """Let the proxy see this batch's exact norms; return how well it agreed with them before, NaN if unknown."""
        valid_PG = self.groups.valid_PG & self._known_P[:, None]
        norm2_S = self.groups.take(self.norm2_S).flatten()
        return proxy.observe(self._taken_features(), norm2_S, self.groups.size, valid_PG.flatten())

    def _taken_features(self) -> Features:
        """The features of outputs in the order of prompts; where there is none, those of a token that is certain."""
        assert self._features is not None
        valid_S = self.groups.valid_PG.flatten()
        table_SK = self.groups.take(self._features).flatten(0, 1) * valid_S[:, None]
        table_SK[~valid_S, 0] = 1
        return Features(*table_SK.unbind(1))

    def group_norm2(
        self, data: Any, scale: float, rewards_PG: Tensor | None = None, rows: int | None = None
    ) -> dict[str, Any]:
        """What the workers need for signal and noise: the squared norm of every prompt's gradient g_i, and `own2`.

        The mean of the g_i is the gradient of verl's loss; `own2` is the mean of the squared norms of prompts' own mean
        gradients (`estimators.own_norm2`), where prompts can be counted, and `rows` their number. Where scores of some
        prompts alone were taken, their mean stands for each of the others, which is what `estimators.moments` needs
        of them. Nothing where no scores were taken, unless all gradients are known to be 0.

        Args:
            data: `advantages` and `response_mask` in the batch's order.
            scale: the factor of an output's advantage in the loss.
            rewards_PG: the rewards F; with `rows` only.
            rows: the number of prompts to train on, where batches hold a good part of them.
        """
        groups = self.groups
        coef_PG = groups.take(_one_an_output(data)) * groups.valid_PG * scale * len(groups.rows_of)
        if not coef_PG.any():
            return {"group_norm2": [0.0] * len(coef_PG)}
        if not self.exact:
            return {}
        gram_PGG, known_P = self._gram_PGG(), self._known_P
        norm2_P = estimators.group_norm2(gram_PGG, coef_PG)
        norm2_P[~known_P] = norm2_P[known_P].mean()
        norms = {"group_norm2": norm2_P.tolist()}
        if rows is None or rewards_PG is None:
            return norms
        unit_P = groups.valid_PG.sum(1) * scale * len(groups.rows_of)  # verl's g_i over the mean of A s
        gram_PGG = gram_PGG.double() * unit_P.square()[:, None, None]
        own2 = estimators.own_norm2(gram_PGG[known_P], rewards_PG[known_P], groups.valid_PG[known_P])
        return norms | {"own2": own2, "rows": rows}

    def rewards(self, data: Any, column: str) -> Tensor:
        """The reward of every output, (P, G), from the column that holds rewards token by token."""
        return self.groups.take(data[column].to_padded_tensor(0).double().sum(1))

    def _gram_PGG(self) -> Tensor:
        groups, size = self.groups, self.groups.size
        if self._gram is not None:
            return groups.take(self._gram)[:, :, :size]
        assert self._sketch is not None
        sketch_PGKL = groups.take(self._sketch.double())
        gram_PGG = torch.einsum("pgkl,phkl->pgh", sketch_PGKL, sketch_PGKL) / len(self._seeds)
        return gram_PGG.diagonal_scatter(groups.take(self.norm2_S.double()), dim1=1, dim2=2)

    def ledger(self, data: Any, rewards: str, prior: estimators.Prior) -> dict[str, float]:
        """What the noise of this batch's gradient would have been under every baseline but the token-level one.

        Args:
            data: `response_mask` and rewards token by token.
            rewards: the name of the column that holds these rewards.
            prior: the prior of `oblr_shrunk`.
        """
        groups, valid_PG = self.groups, self.groups.valid_PG
        assert self._sketch is not None
        rewards_PG = self.rewards(data, rewards)
        own_PGT, norm2_PG = groups.take(data["response_mask"].to_padded_tensor(0).double()), groups.take(self.norm2_S)
        sketches = groups.take(self._sketch.double()).flatten(0, 1).unbind(1)
        known_P = valid_PG.any(1)
        rows_S = known_P.repeat_interleave(groups.size)
        gram_KSS = gram_of(sketches, norm2_PG.flatten())[:, rows_S][:, :, rows_S]
        inputs = estimators.baseline_inputs(own_PGT[known_P], norm2_PG[known_P].double())
        ledger = ledger_of(gram_KSS, rewards_PG[known_P], valid_PG[known_P], inputs, prior)
        return {f"critic/{name}": value for name, value in ledger_metrics(ledger).items()}


def _dense(column: Tensor) -> Tensor:
    """Return a column as it was put in: rows of equal length come back from the queue as a nested tensor."""
    return column.to_padded_tensor(0) if column.is_nested else column


def _one_an_output(data: Any) -> Tensor:
    """The advantage of every output, (S,)."""
    mask = data["response_mask"].to_padded_tensor(0).bool()
    advantages = data["advantages"].to_padded_tensor(0).double()
    highest = advantages.masked_fill(~mask, -torch.inf).amax(1)
    lowest = advantages.masked_fill(~mask, torch.inf).amin(1)
    if not torch.allclose(highest[mask.any(1)], lowest[mask.any(1)]):
        raise InputError(
            "trainer_mode oblr_po measures signal and noise of gradients with one advantage per completion, and "
            "algorithm.adv_estimator gives its tokens different ones; set +oblrpo.schedule=off."
        )
    return torch.where(mask.any(1), highest, 0)


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
        self._pass = self._baseline.begin()
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
