"""TRL's GRPOTrainer with OBLR-PO's baseline and learning rate."""

import json
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, set_seed
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from oblrpo.adapters.shared import finite, load_schedule, schedule_state, signal_metrics
from oblrpo.adapters.trl.accumulated import Accumulated
from oblrpo.adapters.trl.advantages import Advantages, Generation, draws_recorded, in_eval_mode, own_SC, policy_of
from oblrpo.adapters.trl.config import OBLRPOConfig, beside_the_reward, check_trainer, noise_to_come
from oblrpo.adapters.trl.sampling import check_reported, not_the_policy_s
from oblrpo.errors import DivergedError, InputError
from oblrpo.estimators import SNRSchedule, headroom
from oblrpo.policy.checks import check_lengths, check_scores, noise
from oblrpo.policy.load import check_values
from oblrpo.rewards.user import LARGEST
from oblrpo.rollout.decode import Drawn
from oblrpo.rollout.variety import answers_of, token_counts, variety
from oblrpo.rollout.weights import checkpoint_weights
from oblrpo.runs import write_atomically
from oblrpo.scores import Features, UnsupportedModelError
from oblrpo.step.flow import NO_SIGNAL
from oblrpo.tables.algorithms import SCHEDULES, refusal

LOGGER = logging.getLogger(__name__)

STATE = "oblrpo_state.json"
"""The file beside TRL's optimizer state in a checkpoint."""


class OBLRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """The trainer `GRPOTrainer` with the variance-optimal baseline and a rate that follows the signal-to-noise ratio.

    It takes the same arguments, with an [`OBLRPOConfig`] in place of the `GRPOConfig`. Advantages are F - b with the
    baseline b, and the learning rate follows signal and noise of the gradient. All else is TRL's: prompts, generation,
    rewards, loss, backward, logs and checkpoints.
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
        super().__init__(model, reward_funcs, args, *others, **named)
        stands_in = named.get("train_dataset", *others[:1] or [None]) is None
        if stands_in:  # of TRL, for prompts that come from elsewhere: an epoch is one generation
            size = args.generation_batch_size * max(1, args.gradient_accumulation_steps // args.steps_per_generation)
            self.train_dataset = self.train_dataset.select([0] * (size // args.num_generations))
        check_trainer(self)
        if args.use_vllm:
            self._take_over_vllm()
        check_values(self.model, "the model")
        self._policy = policy_of(self)
        counts = hasattr(self.train_dataset, "__len__") and not stands_in
        with in_eval_mode(self.model):
            check_scores(self._policy, 'give LoraConfig target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]')
            check_lengths(self._policy, lambda: self._longest_row(counts))
            self.model.train()  # as TRL takes its loss
            noisy = noise(self._policy) or noise_to_come(self.model, args)
        altered = {} if self.rollout_func is not None else not_the_policy_s(self)
        self._draws_altered, self._comparable = bool(altered), not altered and not noisy
        said = beside_the_reward(self, noisy, altered)
        if said and self.accelerator.is_main_process:
            LOGGER.warning(
                "The gradient is that of TRL's objective, which is not the expected reward alone: %s. The baseline "
                "does not depend on the completion that it is subtracted from; signal and noise are this gradient's.",
                "; ".join(said),
            )
        try:
            rows = len(self.train_dataset) if counts else None
            self._advantages = Advantages(self._policy, args, self.accelerator, rows, plain=not said)
        except (UnsupportedModelError, ValueError) as error:
            raise InputError(f"OBLRPOTrainer cannot train this model: {error}") from None
        self._update = Accumulated(self._policy, args, self.accelerator, bool(noisy))
        needs_signal = SCHEDULES[args.schedule].needs_signal  # type: ignore[index]
        if needs_signal and not (self._update.has_halves or self._advantages.knows_norms):
            raise InputError(
                f"schedule={args.schedule!r} needs signal and noise. Looks at all prompts (look_steps=1) measure "
                "them only for an oblr baseline whose objective is the expected reward alone; set "
                "gradient_accumulation_steps=2, for two halves of whole prompts, or schedule='off'."
            )
        self._schedule: SNRSchedule
        self._rate: float | None = None
        self._drawn: list[Drawn] = []
        self._generation: Generation
        self._token_logps_SC: Tensor
        self._taken: tuple[float, float, Callable[[], Tensor] | None] | None = None  # factor, rate, and its measure
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
        recorded: Any = nullcontext([]) if self._draws_altered else draws_recorded(self.model, self.temperature)
        with in_eval_mode(self.model), recorded as self._drawn:
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
        """Generate as TRL does, and put our advantages in the place of TRL's.

        Raises:
            DivergedError: a log-probability or a score norm is NaN or infinite.
        """
        self._drawn = []
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        rewards_SF = self._rewards_per_func
        rewards_S = (rewards_SF * self.reward_weights.to(rewards_SF.device)).nansum(1)
        rewards_S[rewards_SF.isnan().all(1)] = math.nan
        try:
            generation = self._advantages.of(output, rewards_S, self._features(output))
        except DivergedError:
            raise
        except (ValueError, UnsupportedModelError) as error:
            raise InputError(f"the advantages cannot be computed: {error}") from None
        self._generation = generation
        self._add_metrics(generation.metrics | self._variety(inputs, output))
        first, advantages_S = len(inputs) * self.accelerator.process_index, generation.advantages_PG.flatten()
        output["advantages"] = advantages_S[first : first + len(inputs)].to(output["advantages"])
        for _ in advantages_S:  # those of TRL
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(advantages_S.tolist())
        self._logs["extra"]["baseline"].extend(generation.baseline_PG.flatten().tolist())
        if generation.norm2_PG is not None:
            self._logs["extra"]["score_norm2"].extend(generation.norm2_PG.flatten().tolist())
        return output

    def _variety(self, inputs: Any, output: dict[str, Any]) -> dict[str, float]:
        """How much the completions of all processes differ."""
        answers = gather_object(["" if (known := row.get("answer")) is None else str(known) for row in inputs])
        columns = gather_object([{key: value for key, value in row.items() if key != "prompt"} for row in inputs])
        said, prompts = ([*self._logs[key]][-len(answers) :] for key in ("completion", "prompt"))
        # Without what tools have said, which tells nothing of the policy.
        parts = ([part for part in each if part.get("role") != "tool"] if type(each) is list else each for each in said)
        policy = self._advantages.policy
        count_V = token_counts(output["completion_ids"], own_SC(output), policy.end_tokens, policy.vocabulary)
        count_V = self.accelerator.gather(count_V[None]).sum(0)
        return variety([*map(str, parts)], count_V, answers_of(answers, columns, map(str, prompts)))

    def _features(self, output: dict[str, Any]) -> Features | None:
        """What the draws tell of completions: all figures, or log-probabilities; None where nothing was kept."""
        mask_SC, reported_SC = own_SC(output), output.get("sampling_per_token_logps")
        if reported_SC is not None and reported_SC.shape == mask_SC.shape:
            return Features.of_logps(reported_SC.nan_to_num().clamp(max=0), mask_SC)
        if len(self._drawn) != 1 or self.tools or len(self._drawn[0].logp_S) != len(mask_SC):
            return None
        _, logps_SC, entropy_SC, logit_norm2_SC = self._drawn[0]
        assert entropy_SC is not None
        assert logit_norm2_SC is not None
        width = min(mask_SC.shape[1], logps_SC.shape[1])
        figures = (figures_SC[:, :width] for figures_SC in (logit_norm2_SC, logps_SC, entropy_SC, mask_SC))
        return Features.from_tokens(*figures)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Buffer the batch as TRL does, but do not shuffle it: the completions of a prompt stay together."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)  # type: ignore[no-any-return]
        parts = self.args.steps_per_generation
        if self._step % (parts * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs: Any = split_tensor_dict(batch, parts)
        return self._buffered_inputs[self._step % parts]  # type: ignore[no-any-return]

    # ---- the update ----

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create TRL's scheduler, and ours, which multiplies its rate."""
        scheduler = super().create_scheduler(*args, **kwargs)
        settings: OBLRPOConfig = self.args
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        assert settings.schedule is not None  # the configuration has chosen
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

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the log-probabilities of TRL's loss."""
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._token_logps_SC = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss; its log-probabilities are compared with those that completions are said to have been drawn with.

        Raises:
            InputError: these are of another policy.
        """
        loss: Tensor = super()._compute_loss(model, inputs)
        if not self.model.training:
            return loss
        of_generation = self._step % (self.args.steps_per_generation * self.num_iterations)
        unmoved = of_generation < self.current_gradient_accumulation_steps  # no update has been made since
        if unmoved and self._comparable and (self.rollout_func is not None or self.use_vllm):
            reported_SC = inputs.get("sampling_per_token_logps")
            source = "rollout_func" if self.rollout_func is not None else "vLLM"
            self._add_metrics(check_reported(reported_SC, self._token_logps_SC, own_SC(inputs), source))
        if self._schedule.measures_updates:
            self._update.note(inputs, self._token_logps_SC, self.current_gradient_accumulation_steps)
        return loss

    @property
    def _fresh(self) -> bool:
        """Whether no update has been made on this micro-batch's completions."""
        return bool(self._step // self.args.steps_per_generation % self.num_iterations == 0)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch as TRL does; the last one of an update is followed by its rate.

        Raises:
            DivergedError: the gradient is NaN or infinite.
        """
        fresh = self._fresh
        loss = super().training_step(*args, **kwargs)
        self._update.end_micro_batch(self.current_gradient_accumulation_steps)
        if self.accelerator.sync_gradients:
            self._set_rate(fresh)
        return loss

    def _begin(self) -> None:
        """Begin with a new batch, whatever an interrupted run has left."""
        self._update.forget()
        self._taken = self._buffered_inputs = None
        self._step = 0
        self._last_loaded_step = -1  # vLLM may hold an earlier run's weights of a step of the same number

    def _set_rate(self, fresh: bool) -> None:
        """Set the rate of the update that comes next, and get ready to measure it.

        No signal, no step: where the gradient is 0, it is taken away, and without one the optimizer does nothing.
        """
        schedule, update, generation, args = self._schedule, self._update, self._generation, self.args
        norm2 = update.norm2()
        whole = fresh and args.steps_per_generation == update.micro_batches  # an update of a generation, and all of it
        moments = update.moments(norm2, generation.group_norm2_P if whole else None)
        if norm2 == 0 or (moments is None and SCHEDULES[args.schedule].needs_signal):
            # An epoch's last prompt, left alone, is left out, too: its noise cannot be measured.
            self.model.zero_grad(set_to_none=True)
            self._rate = 0.0
            self._add_metrics(NO_SIGNAL | {"skipped": float(norm2 > 0 or not generation.differs)})
            return
        if moments is not None:
            own2 = generation.own2 if whole else math.nan
            moments = self._advantages.looks.of_rows(moments, own2, self._advantages.rows)
        room = headroom(generation.rewards_PG, generation.valid_PG)
        factor = schedule.step(moments, mean_length=generation.mean_length, fresh=fresh, headroom=room)
        change = update.watch() if schedule.measures_updates else None
        self._taken = factor, schedule.learning_rates[0], change
        self._add_metrics({"skipped": 0.0})
        if moments is not None:
            low, high = schedule.snr_interval()
            self._add_metrics(signal_metrics(schedule, moments) | {"snr_low": low, "snr_high": high})

    def _after_update(self) -> None:
        """Measure how far the update moved the policy, shorten it where it went too far, and log its rate."""
        if self._taken is not None:
            factor, self._rate, change = self._taken
            self.model.zero_grad(set_to_none=True)  # its room, for what measures the update
            if change is not None:
                try:
                    step = self._schedule.limit_step(change)
                except ValueError as error:
                    raise InputError(f"the update cannot be measured: {error}") from None
                factor, self._rate = factor * step.share, self._rate * step.share
                self._add_metrics({"step_kl": step.kl, "step_kl_target": self._schedule.target_kl})
            self._add_metrics({"lr_factor": factor})
        self._taken = None
        self._update.forget()

    # ---- calls from TRL ----

    def _get_learning_rate(self) -> float:
        """The rate of the last update, which the schedule has set."""
        return super()._get_learning_rate() if self._rate is None else self._rate

    def _add_metrics(self, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self._metrics["train"][key].append(finite(value))

    # ---- checkpoints ----

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state = {"schedule": schedule_state(self._schedule), **self._advantages.state_dict()}
            write_atomically(Path(output_dir) / STATE, json.dumps(state))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load as TRL does; schedule, prior, proxy and looks resume where they were."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint) / STATE
        if not file.is_file():
            raise InputError(f"{file} is missing: the checkpoint was written without OBLRPOTrainer's state.")
        try:
            state = json.loads(file.read_text())
            load_schedule(self._schedule, state.pop("schedule"), file, "schedule")
            self._advantages.load_state_dict(state)
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
