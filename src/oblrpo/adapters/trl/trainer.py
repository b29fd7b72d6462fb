"""TRL's GRPOTrainer with OBLR-PO's baseline and learning rate."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, set_seed
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from oblrpo.adapters.shared import finite, load_schedule, schedule_state, signal_metrics
from oblrpo.adapters.trl.config import OBLRPOConfig, check_trainer
from oblrpo.adapters.trl.gradient import BatchGradient, GatheredBatch, in_eval_mode, policy_of, sequences_of
from oblrpo.adapters.trl.sampling import check_reported
from oblrpo.errors import DivergedError, InputError
from oblrpo.estimators import SNRSchedule, headroom
from oblrpo.policy.load import check_values
from oblrpo.policy.rehearsal import check_lengths, rehearse
from oblrpo.policy.sequences import MicroBatches
from oblrpo.rewards.user import LARGEST
from oblrpo.rollout.weights import checkpoint_weights
from oblrpo.runs import write_atomically
from oblrpo.scores import UnsupportedModelError
from oblrpo.step.flow import NO_SIGNAL
from oblrpo.step.reference import Reference
from oblrpo.tables.algorithms import refusal

LOGGER = logging.getLogger(__name__)

STATE = "oblrpo_state.json"
"""The file beside TRL's optimizer state in a checkpoint."""


class OBLRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """The trainer `GRPOTrainer` with the variance-optimal baseline and a rate that follows the signal-to-noise ratio.

    It takes the same arguments, with an [`OBLRPOConfig`] in place of the `GRPOConfig`. Prompts, generation, rewards,
    logs and checkpoints are TRL's. The gradient of a batch is exactly (1/S) sum_s A_s grad log pi(o_s|q_s) over its S
    sequences, from one forward and one backward for activations, in place of TRL's loss and backward.
    """

    _tag_names = (*GRPOTrainer._tag_names, "oblrpo")
    train_dataset: Any
    _step: int

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: OBLRPOConfig | None = None, *others: Any, **named: Any
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = OBLRPOConfig(f"{name.split('/')[-1]}-OBLR-PO")
        if not isinstance(args, OBLRPOConfig):
            raise InputError(f"OBLRPOTrainer needs an OBLRPOConfig, got a {type(args).__name__}.")
        beta, args.beta = args.beta, 0.0  # without which TRL has a reference model, and a penalty in its loss
        try:
            super().__init__(model, reward_funcs, args, *others, **named)
        finally:
            args.beta = beta
        stands_in = named.get("train_dataset", *others[:1] or [None]) is None
        if stands_in:  # of TRL, for prompts that come from elsewhere: an epoch is one generation
            size = args.generation_batch_size * args.gradient_accumulation_steps // args.steps_per_generation
            self.train_dataset = self.train_dataset.select([0] * (size // args.num_generations))
        check_trainer(self)
        if args.use_vllm:
            self._take_over_vllm()
        check_values(self.model, "the model")
        self._policy = policy_of(self)
        counts = hasattr(self.train_dataset, "__len__") and not stands_in
        with in_eval_mode(self.model):
            rehearse(self._policy, 'give LoraConfig target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]')
            check_lengths(self._policy, lambda: self._longest_row(counts))
        try:
            rows = len(self.train_dataset) if counts else None
            self._gradient = BatchGradient(self._policy, args, self.accelerator, rows)
        except (UnsupportedModelError, ValueError) as error:
            raise InputError(f"OBLRPOTrainer cannot train this model: {error}") from None
        size = MicroBatches(args.per_device_train_batch_size)
        self._reference = Reference(self._policy, beta, args.temperature, size)
        if beta:  # the policy as it is now, before a checkpoint is loaded
            self._reference.load_state_dict({"weights": [p.detach().clone() for p in self._policy.parameters]})
        self._schedule: SNRSchedule
        self._rate: float | None = None
        self._update: tuple[float, float, Callable[[], Tensor] | None] | None = None  # factor, rate, and its measure
        self.add_callback(_Callback(self))

    def _take_over_vllm(self) -> None:
        """Hand vLLM the weights without touching them, and let the seed reach its completions.

        TRL merges adapters in place and takes them out again, which leaves rounding in the weights below them each
        time; and its engine seeds all random numbers with 0. Processes that share an engine must draw the same ones.
        """
        engine = self.vllm_generation
        assert hasattr(engine, "_iter_named_params")
        engine._iter_named_params = lambda: checkpoint_weights(self.model)
        if engine.mode != "colocate":
            return
        set_seed(self.args.seed + self.accelerator.process_index // engine.tensor_parallel_size)
        sampled, trained = engine.llm.llm_engine.model_config.dtype, {p.dtype for p in self.model.parameters()}
        if sampled not in trained and self.accelerator.is_main_process:
            LOGGER.warning(
                "vLLM samples in %s, and the weights that are trained are in %s: completions come from rounded "
                "weights. Watch sampling/sampling_logp_difference/mean, or load the model with "
                "model_init_kwargs={'dtype': 'bfloat16'}.",
                sampled,
                trained.pop(),
            )

    def _longest_row(self, counts: bool) -> int:
        """The most tokens of prompt and completion; where prompts are not known, all that the model takes."""
        if not counts or self.environment_factories is not None:
            return self._policy.longest
        prompts = self._tokenize_prompts(list(self.train_dataset["prompt"]))[0]
        return max(map(len, prompts)) + int(self.args.max_completion_length)

    # ---- the batch ----

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does, but in eval mode: by the policy that is scored, without dropout and its kin."""
        with in_eval_mode(self.model):
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args: Any) -> Tensor:
        """Keep what TRL gets from the reward functions."""
        rewards_SF: Tensor = super()._calculate_rewards(*args)
        weights_F = self.reward_weights.to(rewards_SF.device)
        if wrong := (rewards_SF.abs() * weights_F.abs().clamp(min=1) > LARGEST).nonzero().tolist():
            s, f = wrong[0]
            raise InputError(
                f"reward '{self.reward_func_names[f]}' is {rewards_SF[s, f]:g} for completion {s} of the batch (weight "
                f"{weights_F[f]:g}); with its weight and without, it must be at most {LARGEST:g} in size, or None."
            )
        self._rewards_per_func = rewards_SF
        return rewards_SF

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Generate as TRL does, and keep the rewards; TRL's advantages are replaced once score norms are known."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        rewards_SF = self._rewards_per_func
        rewards_S = (rewards_SF * self.reward_weights.to(rewards_SF.device)).nansum(1)
        rewards_S[rewards_SF.isnan().all(1)] = math.nan
        mine = slice(self.accelerator.process_index * len(inputs), (self.accelerator.process_index + 1) * len(inputs))
        output["rewards"] = rewards_S[mine]
        if self.args.beta:
            output["rewards"] = self._penalised(output)
        if not self._gradient.weighted:
            gathered = {"rewards": self.accelerator.gather(output["rewards"])}
            self._gradient.set_baselines(gathered)
            output |= {name: gathered[name][mine] for name in ("valid", "baseline")}
        return output

    def _penalised(self, batch: dict[str, Tensor]) -> Tensor:
        """The rewards less beta log(pi / pi_ref), which takes all of a completion; `kl` is its mean a token."""
        sequences = sequences_of(batch)
        with in_eval_mode(self.model):
            rewards_PG, kl_PG = self._reference.penalised(sequences, batch["rewards"].view(-1, self.num_generations))
        sums = torch.stack([kl_PG.double().sum(), sequences.lengths_S.double().sum()])
        kl, tokens = self.accelerator.reduce(sums).tolist()
        self._add_metrics({"kl": kl / tokens})
        return rewards_PG.flatten()

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Buffer the batch as TRL does, but do not shuffle it: the completions of a prompt stay together."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)  # type: ignore[no-any-return]
        parts = self.args.steps_per_generation
        if self._step % parts == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs: Any = split_tensor_dict(batch, parts)
        return self._buffered_inputs[self._step % parts]  # type: ignore[no-any-return]

    # ---- the gradient ----

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create TRL's scheduler, and ours, which multiplies its rate."""
        scheduler = super().create_scheduler(*args, **kwargs)
        settings: OBLRPOConfig = self.args
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        if refused := refusal(settings.schedule, type(optimizer).__name__, settings.learning_rate):
            raise InputError(refused)
        if self._rate is not None and self._schedule.optimizer is optimizer:
            return scheduler  # trained on
        try:
            self._schedule = SNRSchedule(
                optimizer,
                settings.schedule,
                kl=settings.schedule_kl,
                low_precision=self._policy.low_precision,
            )
        except ValueError as error:
            raise InputError(f"the schedule cannot be used: {error}") from None
        return scheduler

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Add this micro-batch's share to the gradient, and return a constant whose backward adds nothing.

        Its value is that of TRL's loss with one ratio a sequence: minus the mean advantage.

        Raises:
            DivergedError: it is NaN or infinite.
        """
        if not self.model.training:
            return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
        parts = self.current_gradient_accumulation_steps
        try:
            outputs = parts * len(inputs["rewards"])
            if self._gradient.measures_ahead and self._step % self.args.steps_per_generation == 0:
                self._gradient.measure(self._buffered_inputs, self.state.global_step)
            advantage = self._gradient.add(inputs, outputs, self.state.global_step)
            if self.rollout_func is not None or self.use_vllm:
                part, source = self._gradient.parts[-1], "rollout_func" if self.rollout_func else "vLLM"
                reported_SC, logps = inputs.get("sampling_per_token_logps"), part.logps
                self._add_metrics(check_reported(reported_SC, logps.token_logps_SC, logps.own_SC, source))
            rows = outputs * self.accelerator.num_processes
            if self.accelerator.sync_gradients and rows < 2 * self.num_generations:
                self._take_away({"skipped": 1.0})  # an epoch's last prompt, left alone: its noise cannot be measured
                unknown_S = torch.full((rows,), math.nan)
                self._log_outputs({"advantage": torch.zeros(rows), "baseline": unknown_S, "weight": unknown_S})
            elif self.accelerator.sync_gradients:
                self._set_rate(self._gradient.finish(self.state.global_step))
        except DivergedError:
            raise
        except (ValueError, UnsupportedModelError) as error:
            raise InputError(f"the gradient cannot be used: {error}") from None
        loss: Tensor = (-advantage / parts).detach().requires_grad_()
        return loss

    def _begin(self) -> None:
        """Begin with a new batch, whatever an interrupted run has left."""
        self._gradient.forget()
        self._update = self._buffered_inputs = None
        self._step = 0
        self._last_loaded_step = -1  # vLLM may hold an earlier run's weights of a step of the same number

    def _set_rate(self, batch: GatheredBatch) -> None:
        """Log the batch, set the rate of the update that comes next, and get ready to measure it.

        No signal, no step: where no reward differs from another, or the gradient is 0, it is taken away, and without
        one the optimizer does nothing.
        """
        self._log_outputs(batch.columns)
        schedule, columns, metrics = self._schedule, batch.columns, batch.metrics()
        if not batch.differs or batch.norm2 == 0:
            self._take_away(metrics | {"skipped": float(not batch.differs)})
            return
        mean_length, room = float(columns["length"].mean()), headroom(columns["reward"], columns["valid"])
        factor = schedule.step(batch.moments, mean_length=mean_length, headroom=room)
        change = self._gradient.watch() if schedule.measures_updates else None
        self._update = factor, schedule.learning_rates[0], change
        low, high = schedule.snr_interval()
        metrics |= signal_metrics(schedule, batch.moments)
        self._add_metrics(metrics | {"snr_low": low, "snr_high": high, "skipped": 0.0})

    def _take_away(self, metrics: dict[str, float]) -> None:
        """Let the optimizer do nothing."""
        self.model.zero_grad(set_to_none=True)
        self._rate = 0.0
        self._add_metrics(metrics | NO_SIGNAL)

    def _after_update(self) -> None:
        """Measure how far the update moved the policy, shorten it where it went too far, and log its rate."""
        if self._update is not None:
            factor, self._rate, change = self._update
            if change is not None:
                try:
                    step = self._schedule.confine(change)
                except ValueError as error:
                    raise InputError(f"the update cannot be measured: {error}") from None
                factor, self._rate = factor * step.share, self._rate * step.share
                self._add_metrics({"step_kl": step.kl, "step_kl_target": self._schedule.target_kl})
            self._add_metrics({"lr_factor": factor})
        self._update = None
        self._gradient.forget()

    # ---- calls from TRL ----

    def _get_learning_rate(self) -> float:
        """The rate of the last update, which the schedule has set."""
        return super()._get_learning_rate() if self._rate is None else self._rate

    def _add_metrics(self, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self._metrics["train"][key].append(finite(value))

    def _log_outputs(self, columns: dict[str, Tensor]) -> None:
        """Put the advantages that are used in the place of TRL's, with baseline and score norm beside them."""
        rows = self.args.per_device_train_batch_size * self.args.steps_per_generation  # of what was generated last
        processes = self.accelerator.num_processes
        extra = self._logs["extra"]
        shown = {"advantage": self._logs["advantages"], "baseline": extra["baseline"]}  # of one batch: TRL's drop out
        if self._gradient.weighted:
            shown["weight"] = extra["score_norm2"]
        for name, log in shown.items():
            log.extend(columns[name].view(processes, -1)[:, -rows:].flatten().tolist())

    # ---- checkpoints ----

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state = {"schedule": schedule_state(self._schedule), **self._gradient.state_dict()}
            write_atomically(Path(output_dir) / STATE, json.dumps(state))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load as TRL does; schedule, prior and proxy resume where they were."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint) / STATE
        if not file.is_file():
            raise InputError(f"{file} is missing: the checkpoint was written without OBLRPOTrainer's state.")
        try:
            state = json.loads(file.read_text())
            load_schedule(self._schedule, state.pop("schedule"), file, "schedule")
            self._gradient.load_state_dict(state)
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{file} is damaged, or of another version of oblrpo ({error}); resume from an earlier checkpoint."
            ) from None


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Notifies the trainer that training starts, and that the optimizer has stepped."""

    def __init__(self, trainer: OBLRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._last_loaded_step = -1  # the best checkpoint may have been loaded

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._after_update()
