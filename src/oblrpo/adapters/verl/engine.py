"""The FSDP2 engine of verl, which takes scores in its pass for log-probabilities and sets the rate of every update."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from oblrpo import estimators
from oblrpo.adapters.shared.metrics import signal_metrics
from oblrpo.adapters.shared.state import load_schedule, schedule_state
from oblrpo.adapters.verl import rehearsal
from oblrpo.adapters.verl.movement import EngineMovement, low_precision
from oblrpo.adapters.verl.scoring import FEATURES, SUM_PI2, forward_features, score_rows
from oblrpo.adapters.verl.settings import Settings
from oblrpo.errors import InputError
from oblrpo.scores import ScoreTape
from oblrpo.step.algorithm1 import NO_SIGNAL

VENDOR = "oblrpo"
"""The vendor name that the engine is registered under; verl chooses an engine by its hardware vendor."""

SLACK = 1.1
"""How far a mean of gradients may seem longer than they are: bfloat16 rounds the two apart by a percent or two."""


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cuda", "npu"], vendor=VENDOR)
class OBLREngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """The engine `FSDPEngineWithLMHead` with score norms and a rate that follows the signal-to-noise ratio."""

    _scoring = False
    _group_norm2_P: torch.Tensor | None = None
    _batch: Mapping[str, Any] = MappingProxyType({})

    def configure(self, settings: Settings, longest: int = 0) -> None:
        """Prepare tape and schedule, and rehearse; to be called once the optimizer is there, on every rank."""
        self._settings = settings
        self._tape = ScoreTape(self.module, "streamed")
        self._schedule = estimators.SNRSchedule(
            self.optimizer, settings.schedule, kl=settings.kl, low_precision=low_precision(self)
        )
        rehearsal.rehearse(self, settings.exact_pairs, longest)

    def infer_batch(self, data: TensorDict, loss_function: Any = None) -> Any:
        """Do as verl does; scores that the trainer requests come with the log-probabilities.

        Features that it requests come from verl's own pass, and scores then from one more over some prompts' rows.
        """
        scores = tu.get_non_tensor_data(data, "oblrpo_score", False)
        if not tu.get_non_tensor_data(data, "oblrpo_features", False):
            return self.score(data) if scores else super().infer_batch(data, loss_function)
        tu.assign_non_tensor(data, calculate_sum_pi_squared=True)
        output = super().infer_batch(data, loss_function)
        columns = output["model_output"]
        columns[FEATURES] = forward_features(columns, data)
        del columns[SUM_PI2]
        if scores:
            output["model_output"] = self.score(data)["model_output"] | columns
        return output

    def score(self, data: TensorDict) -> dict[str, Any]:
        """Take scores of these rows, and log-probabilities and entropy with them."""
        maybe_fix_3d_position_ids(data)
        self._scoring = True
        self.module.train()  # activations are checkpointed in training mode only; there is no dropout
        try:
            columns = score_rows(self, self._tape, self._settings, data)
        finally:
            self._scoring = False
            self.module.eval()
        return {"model_output": columns, "loss": [0.0], "metrics": {}}

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """Do as verl does, but keep no graph of the entropy while scores are taken."""
        arguments = (output, output_args, micro_batch, logits_processor_func)
        if not self._scoring:
            return super().prepare_model_outputs(*arguments)
        tu.assign_non_tensor(micro_batch, calculate_entropy=False)
        result = super().prepare_model_outputs(*arguments)
        tu.assign_non_tensor(micro_batch, calculate_entropy=True)
        with torch.no_grad():
            result["entropy"] = super().prepare_model_outputs(*arguments)["entropy"]
        return result

    def train_batch(self, data: TensorDict, loss_function: Any) -> Any:
        """Train as verl does, with the rate set just before the step; the metrics say what it was set from.

        Raises:
            ValueError: the trainer did not say how long the prompts' gradients are.
        """
        self._batch = batch = json.loads(tu.get_non_tensor_data(data, "oblrpo_batch", None) or "{}")
        group_norm2 = batch.get("group_norm2")
        measured = self._settings.needs_moments and batch.get("differs", True)
        if measured and group_norm2 is None and not self._settings.calibrated:
            raise ValueError("oblrpo: an update without its prompts' squared gradient norms; was another trainer used?")
        if measured and self._schedule.measures_updates:
            self._movement = EngineMovement(self, data)
        self._group_norm2_P = None if group_norm2 is None else torch.tensor(group_norm2, dtype=torch.float64)
        self._metrics: dict[str, float] = {}
        outputs = super().train_batch(data, loss_function)
        outputs["metrics"].update({key: [value] for key, value in self._metrics.items()})  # verl averages lists
        return outputs

    def optimizer_step(self) -> Any:
        """Set the rate, clip and step as verl does, and measure the update where the schedule wants it.

        Where no reward differs from another, or the gradient is 0, no step is made: weights and optimizer stay.
        """
        if not self._batch.get("differs", True):
            return self._leave_out(skipped=1.0)
        norm2 = estimators.squared_norm(list(self.module.parameters()))
        if norm2 == 0:
            return self._leave_out(skipped=0.0)
        if not self._settings.needs_moments:
            self._metrics["lr_used"] = self._schedule.learning_rates[0]
            return super().optimizer_step()
        usable = math.isfinite(norm2)
        if usable:
            self._set_rate(norm2)
        try:
            grad_norm = super().optimizer_step()
        finally:
            self._schedule.restore()  # verl leaves the step out where the gradient is not finite
        if usable and self._schedule.measures_updates:
            self._confine()
        return grad_norm

    def _leave_out(self, skipped: float) -> float:
        """Make no update, and return the norm of the gradient, which is 0."""
        self.optimizer_zero_grad()
        self._metrics = NO_SIGNAL | {"lr_used": 0.0, "skipped": skipped}
        return 0.0

    def _confine(self) -> None:
        """Measure how far the update moved the policy, on every rank's outputs, and shorten it if it went too far."""
        self.optimizer_zero_grad()  # its room, for what measures the update
        try:
            step = self._schedule.confine(self._movement.change)
        except ValueError as error:
            raise InputError(f"the update cannot be measured: {error}") from None
        self._metrics["lr_used"] *= step.share
        self._metrics["lr_factor"] *= step.share
        self._metrics["step_kl"] = step.kl
        self._metrics["step_kl_target"] = self._schedule.target_kl

    def _moments(self, norm2: float) -> estimators.Moments | None:
        """Return signal and noise of the gradient with this squared norm; None in a step in which no scores were taken.

        Raises:
            ValueError: the gradient is not the mean of the prompts' gradients that were measured.
        """
        if self._group_norm2_P is None:
            return None
        every = self._settings.exact_pairs and not self._settings.calibrated  # or the norms are estimates
        longest = float(self._group_norm2_P.mean())
        if norm2 > SLACK * longest and every:
            raise ValueError(
                f"oblrpo: verl's gradient has squared norm {norm2:.4g}, and the prompts' gradients of which it is to "
                f"be the mean only {longest:.4g} on average; a setting scales or adds to the loss."
            )
        moments = estimators.moments(self._group_norm2_P, norm2, estimated=not every)
        return moments.of_rows(self._batch["own2"], self._batch["rows"]) if "own2" in self._batch else moments

    def _set_rate(self, norm2: float) -> None:
        """Set the rate to eta_0 times the factor that signal and noise support, from the gradient before clipping."""
        batch = self._moments(norm2)
        mean_length, headroom = self._batch.get("mean_length"), self._batch.get("headroom", math.inf)
        factor = self._schedule.step(batch, mean_length=mean_length, headroom=headroom)
        self._metrics = {"skipped": 0.0, "lr_used": self._schedule.learning_rates[0], "lr_factor": factor}
        self._metrics |= signal_metrics(self._schedule, batch)

    def _state_file(self, folder: str) -> Path:
        return Path(folder) / f"oblrpo_schedule_rank_{self.rank}.json"

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save as verl does, with the schedule's state in a file of its own."""
        super().save_checkpoint(local_path, *args, **kwargs)
        self._state_file(local_path).write_text(json.dumps(schedule_state(self._schedule)))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load as verl does; the schedule resumes where it was."""
        file = self._state_file(local_path)
        if not file.exists():
            raise InputError(
                f"{file} is missing: the checkpoint was written without oblr_po or with more ranks; to use its weights "
                "alone, merge them with verl's model merger and set actor_rollout_ref.model.path to the result."
            )
        load_schedule(self._schedule, json.loads(file.read_text()), file, "+oblrpo.schedule")
        super().load_checkpoint(local_path, *args, **kwargs)
