"""The FSDP2 engine of verl, which takes scores in its pass for log-probabilities and sets the rate of every update."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from oblrpo import estimators
from oblrpo.adapters.verl.checks import check_dropout
from oblrpo.adapters.verl.scoring import score_rows
from oblrpo.adapters.verl.settings import Settings
from oblrpo.errors import InputError
from oblrpo.scores import ScoreTape

VENDOR = "oblrpo"
"""The vendor name that the engine is registered under; verl chooses an engine by its hardware vendor."""

SLACK = 1.1
"""How far a mean of gradients may seem longer than they are: bfloat16 rounds the two apart by a percent or two."""


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cuda", "npu"], vendor=VENDOR)
class OBLREngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """The engine `FSDPEngineWithLMHead` with score norms and a rate that follows the signal-to-noise ratio."""

    _scoring = False
    _group_norm2_P: torch.Tensor | None = None

    def configure(self, settings: Settings) -> None:
        """Prepare tape and schedule; to be called once the optimizer is there.

        Raises:
            InputError: the model has dropout.
            UnsupportedModelError: a layer has no rule.
        """
        check_dropout(self.module)
        self._settings = settings
        self._tape = ScoreTape(self.module, "streamed")
        self._schedule = estimators.SNRSchedule(
            self.optimizer,
            settings.schedule,  # type: ignore[arg-type]
            ema=settings.ema,
            floor=settings.floor,
            ceiling=settings.ceiling,
        )

    def infer_batch(self, data: TensorDict, loss_function: Any = None) -> Any:
        """Do as verl does; where the trainer asks for scores, they come with the log-probabilities."""
        if not tu.get_non_tensor_data(data, "oblrpo_score", False):
            return super().infer_batch(data, loss_function)
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
        given = (output, output_args, micro_batch, logits_processor_func)
        if not self._scoring:
            return super().prepare_model_outputs(*given)
        tu.assign_non_tensor(micro_batch, calculate_entropy=False)
        result = super().prepare_model_outputs(*given)
        tu.assign_non_tensor(micro_batch, calculate_entropy=True)
        with torch.no_grad():
            result["entropy"] = super().prepare_model_outputs(*given)["entropy"]
        return result

    def train_batch(self, data: TensorDict, loss_function: Any) -> Any:
        """Train as verl does, with the rate set just before the step; the metrics say what it was set from.

        Raises:
            ValueError: the trainer did not say how long the prompts' gradients are.
        """
        group_norm2 = tu.get_non_tensor_data(data, "oblrpo_group_norm2", None)
        if self._settings.needs_moments and group_norm2 is None:
            raise ValueError("oblrpo: an update without its prompts' squared gradient norms; was another trainer used?")
        self._group_norm2_P = None if group_norm2 is None else torch.tensor(group_norm2, dtype=torch.float64)
        self._metrics: dict[str, float] = {}
        outputs = super().train_batch(data, loss_function)
        outputs["metrics"].update({key: [value] for key, value in self._metrics.items()})  # verl averages lists
        return outputs

    def optimizer_step(self) -> Any:
        """Set the rate, then clip and step as verl does."""
        if self._settings.needs_moments:
            self._set_rate()
        else:
            self._metrics["lr_used"] = self._schedule.learning_rates[0]
        try:
            return super().optimizer_step()
        finally:
            self._schedule.restore()  # verl leaves the step out where the gradient is not finite

    def _set_rate(self) -> None:
        """Set the rate to eta_0 times the factor that signal and noise support, from the gradient before clipping.

        Raises:
            ValueError: the gradient is not the mean of the prompts' gradients that were measured.
        """
        assert self._group_norm2_P is not None
        norm2 = estimators.squared_norm(list(self.module.parameters()))
        if not math.isfinite(norm2):
            return
        longest = float(self._group_norm2_P.mean())
        if norm2 > SLACK * longest and self._settings.exact_pairs:
            raise ValueError(
                f"oblrpo: verl's gradient has squared norm {norm2:.4g}, and the prompts' gradients of which it is to "
                f"be the mean only {longest:.4g} on average; a setting scales or adds to the loss."
            )
        sketched = not self._settings.exact_pairs
        batch = estimators.moments(self._group_norm2_P, norm2, estimated=sketched)
        factor = self._schedule.step(batch)
        smoothed = self._schedule.smoothed
        self._metrics = {
            "lr_used": self._schedule.learning_rates[0],
            "lr_factor": factor,
            "snr": smoothed.snr,
            "n_snr": smoothed.n_snr,
            "critical_batch_size": smoothed.critical_batch_size,
            "signal2": batch.signal2,
            "trace_cov": batch.trace_cov,
        }

    def _state_file(self, folder: str) -> Path:
        return Path(folder) / f"oblrpo_schedule_rank_{self.rank}.json"

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save as verl does, with the schedule's averages in a file of their own."""
        super().save_checkpoint(local_path, *args, **kwargs)
        self._state_file(local_path).write_text(json.dumps(self._schedule.state_dict()))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load as verl does; the schedule goes on where it was.

        Raises:
            InputError: the checkpoint was written without this adapter, or by another version of it.
        """
        file = self._state_file(local_path)
        if not file.exists():
            raise InputError(
                f"{file} is missing: the checkpoint was written without oblr_po or with more ranks; to go on from its "
                "weights alone, merge them with verl's model merger and set actor_rollout_ref.model.path to the result."
            )
        state = json.loads(file.read_text())
        super().load_checkpoint(local_path, *args, **kwargs)
        try:
            self._schedule.load_state_dict(state)
        except KeyError as error:
            raise InputError(f"{file} was written by another version of oblrpo ({error} is missing).") from None
