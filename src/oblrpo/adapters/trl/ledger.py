"""Measures the gradient of TRL's own trainers and changes nothing: noise, and what baselines would make of it.

It needs no series of TRL that it knows: where another TRL, or anything else, makes a look fail, it says so and stops.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from oblrpo import estimators
from oblrpo.adapters.shared import finite
from oblrpo.adapters.trl.advantages import in_eval_mode, policy_of, sequences_of
from oblrpo.adapters.trl.sampling import not_the_policy_s
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES, Moments
from oblrpo.estimators.averages import MomentAverage
from oblrpo.policy.checks import noise
from oblrpo.policy.sequences import MicroBatches
from oblrpo.scores import ScoreTape, UnsupportedModelError
from oblrpo.step.look import gram_of, ledger_metrics, ledger_of, look

LOGGER = logging.getLogger(__name__)


class VarianceLedgerCallback(TrainerCallback):  # type: ignore[misc]
    """Logs signal and noise of the policy gradient, and its variance under each baseline on the very same batch.

    Use::

        trainer = GRPOTrainer(...)  # or RLOOTrainer, as they are
        trainer.add_callback(VarianceLedgerCallback(trainer, every=20))

    In the first step and every `every` after it, the batch goes through the model once more just before the update: one
    forward and one backward for activations, which leaves weights, gradients, random numbers and modes as they are.
    Where a look fails, on any of the processes, it logs one warning that says why, and measures no more.

    The gradients compared are (1/S) sum_s A_s grad log pi(o_s|q_s) with the advantages of each baseline, divided by
    what its authors divide them by (`grpo`: the group's deviation), not with the trainer's own weighting of tokens.
    `variance/NAME` and `signal2/NAME` are this batch's, and so are `signal2` and `trace_cov` (of one prompt) with
    `baseline`; its `snr`, `n_snr` and `critical_batch_size` (in prompts) are averaged over looks. Rewards are those of
    the reward functions, with their weights and without a KL penalty. The token-level baseline is left out. Where
    completions are not sampled from the whole policy (top-p and its kin, dropout), a warning says that they are wrong.

    Args:
        trainer: a `GRPOTrainer`, an `RLOOTrainer` or a subclass that generates as they do.
        every: steps between looks.
        baseline: the name in `estimators.BASELINES` whose signal-to-noise ratio is logged.
    """

    def __init__(self, trainer: Any, every: int = 20, baseline: str = "rloo") -> None:
        args = trainer.args
        if every < 1:
            raise InputError(f"every must be at least 1 step, got {every}.")
        if baseline not in BASELINES or BASELINES[baseline].by_token:
            raise InputError(f"the ledger has no baseline {baseline!r}.")
        if args.generation_batch_size < 2 * trainer.num_generations:
            raise InputError(
                "the ledger needs two prompts per batch, because one prompt's gradient has no measurable noise."
            )
        if trainer.accelerator.distributed_type in {"FSDP", "DEEPSPEED", "MEGATRON_LM"}:
            raise InputError("the ledger needs whole weights on each process; it does not work with sharded ones.")
        self.every, self.baseline, self._trainer = every, baseline, trainer
        self._policy = policy_of(trainer)
        try:
            ScoreTape(trainer.model, "streamed")
        except UnsupportedModelError as error:
            raise InputError(f"the ledger cannot look at this model: {error}") from None
        others = not_the_policy_s(trainer)
        with in_eval_mode(trainer.model):  # which puts every mode back
            trainer.model.train()  # as TRL generates
            if not trainer.args.use_vllm and (found := noise(self._policy)):
                others["noise"] = found
        if others and trainer.accelerator.is_main_process:
            altered = ", ".join(f"{name}={value!r}" for name, value in others.items())
            LOGGER.warning(
                "VarianceLedgerCallback: completions may not be sampled from the full policy (%s), whose scores are "
                "taken. If they are not, its signal and variances are wrong.",
                altered,
            )
        self._prior = estimators.Prior()
        self._average = MomentAverage(0.9)
        self._rewards: Tensor | None = None
        self._batch: dict[str, Tensor] | None = None
        self._next = 0  # the number of updates after which the next batch is looked at
        self._stopped = False
        self._listen()

    def _listen(self) -> None:
        """Read what the trainer's own methods return, and hand it on."""
        trainer = self._trainer
        try:
            calculate, generate = trainer._calculate_rewards, trainer._generate_and_score_completions
        except AttributeError as error:
            raise InputError(f"the ledger needs a trainer that generates as GRPOTrainer does: {error}.") from None

        def calculate_rewards(*args: Any, **kwargs: Any) -> Tensor:
            rewards: Tensor = calculate(*args, **kwargs)
            self._rewards = rewards
            return rewards

        def generate_and_score(*args: Any, **kwargs: Any) -> dict[str, Any]:
            output: dict[str, Any] = generate(*args, **kwargs)
            if not self._stopped and trainer.model.training and trainer.state.global_step >= self._next:
                self._batch, self._next = {**output}, trainer.state.global_step + self.every
            return output

        trainer._calculate_rewards, trainer._generate_and_score_completions = calculate_rewards, generate_and_score

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the ledger of a batch that was just generated, with the weights that generated it."""
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        try:
            metrics = self._metrics(batch, state.global_step + 1)
        except Exception as error:  # whatever it is, the run is the user's
            self._stopped, self._rewards = True, None
            LOGGER.warning(
                "VarianceLedgerCallback has stopped measuring; training continues without it: %s: %s",
                type(error).__name__,
                error,
            )
            return
        for key, value in metrics.items():
            self._trainer._metrics["train"][key].append(finite(value))

    def _metrics(self, batch: dict[str, Tensor], step: int) -> dict[str, float]:
        """What is logged of the whole batch of all processes: nothing where too few prompts have rewards."""
        G = self._trainer.num_generations
        norm2_S1, mask_ST, *sketches = self._gathered(batch, step)
        assert self._rewards is not None
        rewards_S = (self._rewards * self._trainer.reward_weights.to(self._rewards.device)).nansum(1)
        rewards_PG = torch.where(self._rewards.isnan().all(1), torch.nan, rewards_S).view(-1, G)
        valid_PG = ~rewards_PG.isnan()
        valid_PG &= valid_PG.sum(1, keepdim=True) > 1
        keep_P = valid_PG.any(1)
        if (prompts := int(keep_P.sum())) < 2:
            return {}
        rows_S = keep_P.repeat_interleave(G)
        gram_KSS = gram_of([sketch_SL[rows_S].double() for sketch_SL in sketches], norm2_S1[rows_S, 0])
        norm2_PG, mask_PGT = norm2_S1.view(-1, G)[keep_P], mask_ST.view(-1, G, mask_ST.shape[1])[keep_P]
        rewards_PG, valid_PG = rewards_PG[keep_P], valid_PG[keep_P]
        inputs = estimators.baseline_inputs(mask_PGT, norm2_PG)
        values = ledger_metrics(ledger_of(gram_KSS, rewards_PG, valid_PG, inputs, self._prior))
        self._prior.observe(rewards_PG, norm2_PG, valid_PG)
        self._prior.next_step()
        noise = max(0.0, prompts * values[f"variance/{self.baseline}"])
        own = Moments(values[f"signal2/{self.baseline}"], noise, prompts)
        self._average.add(own)
        moments = self._average.moments
        ratios = {"snr": moments.snr, "n_snr": moments.n_snr, "critical_batch_size": moments.critical_batch_size}
        return values | ratios | {"signal2": own.signal2, "trace_cov": own.trace_cov}

    def _gathered(self, batch: dict[str, Tensor], step: int) -> tuple[Tensor, ...]:
        """What `_score` says of the outputs of all processes.

        Raises:
            RuntimeError: it failed on another process.
            Exception: it failed on this one.
        """
        accelerator, mine, failure = self._trainer.accelerator, tuple[Tensor, ...](), None
        try:
            mine = self._score(batch, step)
        except Exception as error:
            failure = error
        failed = accelerator.gather(torch.tensor([failure is not None], device=accelerator.device))
        if failure is not None:  # nobody waits for one that has failed
            raise failure
        if failed.any():
            raise RuntimeError(f"it failed on {int(failed.sum())} other process(es), which say why")
        return tuple(accelerator.gather(accelerator.pad_across_processes(mine, dim=1)))

    def _score(self, batch: dict[str, Tensor], step: int) -> tuple[Tensor, ...]:
        """Of this process's outputs: exact squared norms (S, 1), the tokens' mask, and two sketches of the scores.

        Raises:
            ValueError: the batch has images.
        """
        if "pixel_values" in batch:
            raise ValueError("images are not supported")
        micro_batches = MicroBatches(max(1, self._trainer.args.per_device_train_batch_size))
        with in_eval_mode(self._policy.model), torch.enable_grad():
            seen = look(self._policy, sequences_of(batch), 1, self._trainer.temperature, micro_batches, step)
        return seen.norm2_PG.double(), seen.logps.own_SC, *seen.sketches
