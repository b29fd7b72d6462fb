"""The FSDP2 engine of verl with scores and a rate of its own: measuring, the check of a model, the worker."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from oblrpo import estimators
from oblrpo.adapters import shared
from oblrpo.adapters.verl.scoring import FEATURES, SUM_PI2, forward_features, score_rows
from oblrpo.adapters.verl.settings import MODEL, Settings, check_tools, read_settings
from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.policy.checks import MIXES, MIXES_SHORT, check_lengths, noise, two_rows
from oblrpo.scores import UnsupportedModelError
from oblrpo.step.flow import NO_SIGNAL

VENDOR = "oblrpo"
"""The vendor name that the engine is registered under; verl chooses an engine by its hardware vendor."""

SLACK = 1.1
"""How far a mean of gradients may seem longer than they are: bfloat16 rounds the two apart by a percent or two."""


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cuda", "npu"], vendor=VENDOR)
class OBLREngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """The engine `FSDPEngineWithLMHead` with looks at scores and a rate that follows the signal-to-noise ratio."""

    def configure(self, settings: Settings, longest: int = 0) -> None:
        """Prepare the schedule, and check the model; to be called once the optimizer is there, on every rank."""
        self.settings = settings
        self._schedule = estimators.SNRSchedule(
            self.optimizer, settings.schedule, kl=settings.kl, low_precision=low_precision(self)
        )
        check_engine(self, longest)

    def infer_batch(self, data: TensorDict, loss_function: Any = None) -> Any:
        """Do as verl does; with a look where the trainer requests scores.

        Features that it requests come from verl's own pass, and the look is then one more over some prompts' rows.
        """
        scores = tu.get_non_tensor_data(data, "oblrpo_score", False)
        if not tu.get_non_tensor_data(data, "oblrpo_features", False):
            return self.score(data) if scores else super().infer_batch(data, loss_function)
        tu.assign_non_tensor(data, calculate_sum_pi_squared=True)
        output = super().infer_batch(data, loss_function)
        tu.assign_non_tensor(data, calculate_sum_pi_squared=False)
        columns = output["model_output"]
        columns[FEATURES] = forward_features(columns, data)
        del columns[SUM_PI2]
        if scores:
            output["model_output"] = self.score(data)["model_output"] | columns
        return output

    def score(self, data: TensorDict) -> dict[str, Any]:
        """Look at these rows; log-probabilities and entropy come with their scores."""
        maybe_fix_3d_position_ids(data)
        self.module.train()  # activations are checkpointed in training mode only; there is no dropout
        try:
            columns = score_rows(self, self.settings, data)
        finally:
            self.module.eval()
        return {"model_output": columns, "loss": [0.0], "metrics": {}}

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """Do as verl does, but keep no graph of the entropy, of which nothing takes a gradient."""
        arguments = (output, output_args, micro_batch, logits_processor_func)
        if not (torch.is_grad_enabled() and tu.get_non_tensor_data(micro_batch, "calculate_entropy", False)):
            return super().prepare_model_outputs(*arguments)
        tu.assign_non_tensor(micro_batch, calculate_entropy=False)
        result = super().prepare_model_outputs(*arguments)
        tu.assign_non_tensor(micro_batch, calculate_entropy=True)
        with torch.no_grad():
            result["entropy"] = super().prepare_model_outputs(*arguments)["entropy"]
        return result

    def train_batch(self, data: TensorDict, loss_function: Any) -> Any:
        """Train as verl does, with the rate set just before the step; the metrics say what it was set from."""
        self._batch: dict[str, Any] = json.loads(data["oblrpo_batch"])  # the trainer's facts
        self._metrics: dict[str, float] = {}
        if self._batch["differs"] and self._schedule.measures_updates:
            self._movement = EngineMovement(self, data)
        outputs = super().train_batch(data, loss_function)
        outputs["metrics"].update({key: [value] for key, value in self._metrics.items()})  # verl averages lists
        return outputs

    def optimizer_step(self) -> Any:
        """Set the rate, clip and step as verl does, and measure the update where the schedule wants it.

        Where no reward differs from another, or the gradient is 0, no step is made: weights and optimizer stay.
        """
        differs, norm2 = self._batch["differs"], estimators.squared_norm(list(self.module.parameters()))
        if not differs or norm2 == 0:
            self.optimizer_zero_grad()
            self._metrics = NO_SIGNAL | {"lr_used": 0.0, "skipped": float(not differs)}
            return 0.0
        if not self.settings.needs_moments:
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

    def _confine(self) -> None:
        """Measure how far the update moved the policy, on every rank's outputs, and shorten it if it went too far."""
        self.optimizer_zero_grad()  # its room, for what measures the update
        try:
            step = self._schedule.limit_step(self._movement.change)
        except ValueError as error:
            raise InputError(f"the update cannot be measured: {error}") from None
        self._metrics["lr_used"] *= step.share
        self._metrics["lr_factor"] *= step.share
        self._metrics["step_kl"] = step.kl
        self._metrics["step_kl_target"] = self._schedule.target_kl

    def _set_rate(self, norm2: float) -> None:
        """Set the rate to eta_0 times the factor that signal and noise support, from the gradient before clipping."""
        moments = self._moments(norm2) if "group_norm2" in self._batch else None  # no scores were taken
        factor = self._schedule.step(
            moments, mean_length=self._batch["mean_length"], headroom=self._batch.get("headroom", math.inf)
        )
        self._metrics = {"skipped": 0.0, "lr_used": self._schedule.learning_rates[0], "lr_factor": factor}
        self._metrics |= shared.signal_metrics(self._schedule, moments)

    def _moments(self, norm2: float) -> estimators.Moments:
        """Return signal and noise of the gradient with this squared norm.

        Raises:
            ValueError: the gradient is not the mean of the prompts' gradients that were measured.
        """
        group_norm2_P = torch.tensor(self._batch["group_norm2"], dtype=torch.float64)
        every = self.settings.exact_pairs and not self.settings.calibrated  # or the norms are estimates
        longest = float(group_norm2_P.mean())
        if norm2 > SLACK * longest and every:
            raise ValueError(
                f"oblrpo: verl's gradient has squared norm {norm2:.4g}, and the prompts' gradients of which it is to "
                f"be the mean only {longest:.4g} on average; a setting scales or adds to the loss."
            )
        moments = estimators.moments(group_norm2_P, norm2, estimated=not every)
        return moments.of_rows(self._batch["own2"], self._batch["rows"]) if "own2" in self._batch else moments

    def _state_file(self, folder: str) -> Path:
        return Path(folder) / f"oblrpo_schedule_rank_{self.rank}.json"

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save as verl does, with the schedule's state in a file of its own."""
        super().save_checkpoint(local_path, *args, **kwargs)
        self._state_file(local_path).write_text(json.dumps(shared.schedule_state(self._schedule)))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load as verl does; the schedule resumes where it was."""
        file = self._state_file(local_path)
        if not file.exists():
            raise InputError(
                f"{file} is missing: the checkpoint was written without oblr_po or with more ranks; to use its weights "
                "alone, merge them with verl's model merger and set actor_rollout_ref.model.path to the result."
            )
        shared.load_schedule(self._schedule, json.loads(file.read_text()), file, "+oblrpo.schedule")
        super().load_checkpoint(local_path, *args, **kwargs)


def low_precision(engine: Any) -> bool:
    """Whether an engine computes log-probabilities with fewer digits than float32."""
    return bool(engine._autocast_dtype != torch.float32)


class EngineMovement:
    """Takes log-probabilities of a subsample of the batch once more after the update; made before it.

    Every rank must make it and call it: the model is sharded over them. `data` are the rows of this rank, padding too.
    """

    def __init__(self, engine: Any, data: TensorDict) -> None:
        self._engine, self._group = engine, engine.get_data_parallel_group()
        own_S = data["response_mask"].to_padded_tensor(0).any(1).tolist()
        rows = zip(data["input_ids"].unbind(), own_S, strict=True)
        keys = shared.of_all_ranks([shared.key_of(ids) if own else None for ids, own in rows], self._group)
        places, meant = shared.measured(keys, torch.distributed.get_rank(self._group))
        self._rows = tu.index_select_tensor_dict(data, places)
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
        change_SC = self._token_logps_SC() - self._before_SC
        return shared.rows_of_all_ranks(change_SC[self._mask_SC.any(1)], self._group)

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


PROMPT, RESPONSE = 3, 5
"""Tokens of each row's parts."""

UNPACK = f"set {MODEL}.use_remove_padding=False."


def check_engine(engine: Any, longest: int) -> None:
    """Take scores of two short rows, as a step would; the model stays what it is. Every rank must call it.

    It runs before anything is sampled: what would not be exact is refused then, with its cure. `longest` is the most
    tokens of a row; 0: the model's context.
    """
    policy, packed = Policy(engine.module, None, bf16=low_precision(engine)), engine.use_remove_padding
    with engine.eval_mode():
        check_lengths(policy, lambda: longest or policy.longest)  # vLLM goes by the longest row that it allows
        engine.module.train()  # in which verl takes its gradient
        if found := noise(policy):
            raise InputError(f"oblr_po allows no noise in forwards ({found}): set it to 0 in {MODEL}.override_config.")
        engine.module.eval()
    try:
        logp_C = _log_probs(engine, 0)
    except UnsupportedModelError as error:
        raise InputError(f"oblr_po cannot take this model's scores: {error}{_cure(str(error), packed)}") from None
    if not packed:
        return
    if names := [name for name, module in engine.module.named_modules() if isinstance(module, torch.nn.Conv1d)]:
        raise InputError(  # frozen ones, too; what they do to random weights may be too little to be seen below
            f"oblr_po does not work with {MODEL}.use_remove_padding=True and this model: {names[0]} is a convolution "
            f"over tokens, as in hybrid models, which continues from one packed row into the next; {UNPACK}"
        )
    change = float((_log_probs(engine, 1) - logp_C).abs().max())
    if not change <= (MIXES_SHORT if low_precision(engine) else MIXES):
        raise InputError(
            f"oblr_po does not work with {MODEL}.use_remove_padding=True and this model: a token's log-probability "
            f"changes with the row before it, by {change:.2g} nats, as in linear attention, Mamba and convolutions "
            f"that continue from row to row; {UNPACK}"
        )


def _cure(error: str, packed: bool) -> str:
    if "lora_" in error:
        return f" Adapters of linear layers work: set {MODEL}.target_modules=[q_proj,k_proj,v_proj,o_proj]."
    if packed:
        return f" Hybrid models (linear attention, Mamba, convolutions) work if rows are not packed: {UNPACK}"
    return ""


def _log_probs(engine: Any, shift: int) -> Tensor:
    """Log-probabilities of the second row's response, after a first row of tokens that are `shift` others."""
    rows_ST = two_rows(PROMPT + RESPONSE, engine.module.config.get_text_config().vocab_size, shift)
    tensors = {
        "input_ids": rows_ST,
        "position_ids": torch.arange(PROMPT + RESPONSE).expand_as(rows_ST),
        "prompts": rows_ST[:, :PROMPT],
        "responses": rows_ST[:, PROMPT:],
        "response_mask": torch.ones_like(rows_ST[:, PROMPT:]),
    }
    settings = {
        "use_remove_padding": engine.use_remove_padding,
        "use_dynamic_bsz": False,
        "use_fused_kernels": False,
        "micro_batch_size_per_gpu": len(rows_ST),
        "temperature": 1.0,
        "calculate_entropy": True,
        "oblrpo_group_size": len(rows_ST) if engine.settings.exact_pairs else 0,
    }
    nested = {key: torch.nested.as_nested_tensor([*each], layout=torch.jagged) for key, each in tensors.items()}
    with engine.eval_mode():
        data = tu.get_tensordict({**nested, "uid": ["check"] * len(rows_ST)}, settings)
        log_probs: Tensor = engine.score(data)["model_output"]["log_probs"].unbind()[1]
    return log_probs[PROMPT - 1 : -1]


ENGINE_VENDOR = "VERL_ENGINE_VENDOR"


class OBLRTrainingWorker(TrainingWorker):  # type: ignore[misc]
    """A training worker on our engine; the reference model beside it keeps the engine of verl."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        before = os.environ.get(ENGINE_VENDOR)
        os.environ[ENGINE_VENDOR] = VENDOR  # read by verl where it looks the engine up, and nowhere else
        try:
            super().__init__(*args, **kwargs)
        finally:
            del os.environ[ENGINE_VENDOR]
            if before is not None:
                os.environ[ENGINE_VENDOR] = before


class OBLRWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """The worker `ActorRolloutRefWorker` with that actor; `config.oblrpo` holds the adapter's settings."""

    actor_worker_cls = OBLRTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """Build the models as verl does, then hand the adapter's settings to the engine."""
        super().init_model()
        if self.actor is not None:
            settings = read_settings(OmegaConf.to_container(self.config.oblrpo))
            rollout, policy = self.config.rollout, Policy(self.actor.engine.module, None)
            check_tools(rollout, policy.model.config.model_type, rollout.max_model_len or policy.longest)
            self.actor.engine.configure(settings, rollout.max_model_len or 0)
