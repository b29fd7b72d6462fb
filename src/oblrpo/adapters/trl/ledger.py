"""A look at the gradient of TRL's own trainers, which changes nothing: noise, and what baselines would make of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from oblrpo import estimators
from oblrpo.adapters.trl.gradient import in_eval_mode, policy_of, sequences_of
from oblrpo.adapters.trl.metrics import finite
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES, Moments
from oblrpo.estimators.averages import MomentAverage
from oblrpo.scores import ScoreTape, UnsupportedModelError

DIRECTIONS, DIMENSIONS = 8, 2048
"""The size of each of the two independent sketches that inner products come from; see `ScoreTape.sketch`."""


class VarianceLedgerCallback(TrainerCallback):  # type: ignore[misc]
    """Logs signal and noise of the policy gradient, and its variance under each baseline on the very same batch.

    Use::

        trainer = GRPOTrainer(...)  # or RLOOTrainer, as they are
        trainer.add_callback(VarianceLedgerCallback(trainer, every=20))

    In the first step and every `every` after it, the batch goes through the model once more just before the update: one
    forward and one backward for activations, which leaves weights, gradients, random numbers and modes as they are. It
    reads the batch and the rewards from what two methods of this one trainer return.

    The gradients compared are (1/S) sum_s A_s grad log pi(o_s|q_s) with the advantages of each baseline, divided by
    what its authors divide them by (`grpo`: the group's deviation), not with the trainer's own weighting of tokens.
    `variance/NAME` and `signal2/NAME` are this batch's; `snr`, `n_snr` and `critical_batch_size` (in prompts) are those
    with `baseline`, averaged over the steps that were looked at. Rewards are as the reward functions give them, with
    the trainer's weights and without a KL penalty. The token-level baseline is left out.

    Args:
        trainer: a `GRPOTrainer`, an `RLOOTrainer` or a subclass that generates as they do.
        every: steps between looks.
        baseline: the name in `estimators.BASELINES` whose signal-to-noise ratio is logged.

    Raises:
        InputError: `every` is below 1, the baseline is unknown, the processes do not hold whole groups, or the model or
            the launcher does not let scores be taken.
    """

    def __init__(self, trainer: Any, every: int = 20, baseline: str = "rloo") -> None:
        args = trainer.args
        rows = args.per_device_train_batch_size * args.steps_per_generation
        if every < 1:
            raise InputError(f"every is a number of steps, got {every}.")
        if baseline not in BASELINES or BASELINES[baseline].by_token:
            raise InputError(f"the ledger has no baseline {baseline!r}.")
        if rows % trainer.num_generations or args.generation_batch_size < 2 * trainer.num_generations:
            raise InputError(
                f"the ledger needs whole groups on each process, and two prompts: {rows} completions a process are no "
                f"multiple of num_generations={trainer.num_generations}, or too few."
            )
        if trainer.accelerator.distributed_type in {"FSDP", "DEEPSPEED", "MEGATRON_LM"}:
            raise InputError("the ledger needs whole weights on each process; it does not work with sharded ones.")
        self.every, self.baseline, self._trainer = every, baseline, trainer
        self._policy = policy_of(trainer)
        try:
            self._tape = ScoreTape(trainer.model)
        except UnsupportedModelError as error:
            raise InputError(f"the ledger cannot look at this model: {error}") from None
        self._prior = estimators.Prior()
        self._average = MomentAverage(0.9)
        self._rewards: Tensor | None = None
        self._batch: dict[str, Tensor] | None = None
        self._next = 0  # the number of updates after which the next batch is looked at
        self._listen()

    def _listen(self) -> None:
        """Read what the trainer's own methods return, and hand it on."""
        trainer = self._trainer
        calculate, generate = trainer._calculate_rewards, trainer._generate_and_score_completions

        def calculate_rewards(*args: Any, **kwargs: Any) -> Tensor:
            self._rewards = found = calculate(*args, **kwargs)
            return found  # type: ignore[no-any-return]

        def generate_and_score(inputs: Any) -> dict[str, Any]:
            output: dict[str, Any] = generate(inputs)
            if trainer.model.training and trainer.state.global_step >= self._next:
                self._batch, self._next = dict(output), trainer.state.global_step + self.every
            return output

        trainer._calculate_rewards, trainer._generate_and_score_completions = calculate_rewards, generate_and_score

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the ledger of a batch that was just generated, with the weights that generated it.

        Raises:
            InputError: the model cannot be recorded.
        """
        if self._batch is None:
            return
        try:
            found = self._metrics(self._batch, state.global_step + 1)
        except (ValueError, UnsupportedModelError) as error:
            raise InputError(f"the ledger cannot be taken: {error}") from None
        self._batch = None
        for key, value in found.items():
            self._trainer._metrics["train"][key].append(finite(value))

    def _metrics(self, batch: dict[str, Tensor], step: int) -> dict[str, float]:
        trainer, G = self._trainer, self._trainer.num_generations
        assert self._rewards is not None
        rewards = (self._rewards * trainer.reward_weights.to(self._rewards.device)).nansum(1)
        rewards[self._rewards.isnan().all(1)] = torch.nan
        mine = len(batch["prompt_ids"])
        rewards_PG = rewards[trainer.accelerator.process_index * mine :][:mine].view(-1, G)
        gram_KSS, norm2_PG, mask_PGT = self._score(batch, step, G)
        valid_PG = ~rewards_PG.isnan()
        valid_PG &= valid_PG.sum(1, keepdim=True) > 1
        keep_P = valid_PG.any(1)
        rows_S = keep_P.repeat_interleave(G)
        if int(self._trainer.accelerator.gather(keep_P.sum()[None]).min()) < 2:
            return {}  # too few prompts have rewards: there is nothing to tell
        inputs = estimators.baseline_inputs(mask_PGT[keep_P], norm2_PG[keep_P])
        rewards_PG, valid_PG = rewards_PG[keep_P], valid_PG[keep_P]
        every = estimators.under_every_baseline(rewards_PG, inputs, valid_PG=valid_PG, prior=self._prior)
        self._prior.observe(rewards_PG, norm2_PG[keep_P], valid_PG)
        self._prior.next_step()
        found = estimators.ledger(
            gram_KSS[:, rows_S][:, :, rows_S],
            {name: advantages_PG / divisor_PG for name, (advantages_PG, divisor_PG) in every.items()},
            rewards_PG,
            {name: BASELINES[name].unbiased for name in every},
            valid_PG=valid_PG,
        )
        return self._over_processes(found, len(rewards_PG))

    def _score(self, batch: dict[str, Tensor], step: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
        """Two estimates of the scores' inner products, (2, S, S), exact squared norms (P, G), and the tokens' mask."""
        size = max(1, self._trainer.args.per_device_train_batch_size)
        tensors = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
        sketches, norms = defaultdict[int, list[Tensor]](list), []
        for start in range(0, len(batch["prompt_ids"]), size):
            part = {key: batch[key][start : start + size] for key in tensors if key in batch}
            with in_eval_mode(self._policy.model), torch.enable_grad(), self._tape as tape:
                tape.record(self._policy.logps(sequences_of(part), self._trainer.temperature).logps_S)
            norms.append(tape.norm2())
            for which in range(2):
                sketches[which].append(tape.sketch(2 * step + which, DIRECTIONS, DIMENSIONS).double())
        self._tape.forget()
        norm2_S, sketch_KSL = torch.cat(norms).double(), torch.stack([torch.cat(sketches[which]) for which in range(2)])
        gram_KSS = sketch_KSL @ sketch_KSL.mT
        gram_KSS = gram_KSS.diagonal_scatter(norm2_S.expand(2, -1), dim1=1, dim2=2)  # known exactly
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        return gram_KSS, norm2_S.view(-1, G), mask.view(-1, G, mask.shape[1])

    def _over_processes(self, found: estimators.Ledger, prompts: int) -> dict[str, float]:
        """The ledger of the whole batch: the mean over processes, each of which has so many of its prompts."""
        processes = self._trainer.accelerator.num_processes
        values = {f"variance/{name}": entry.variance / processes for name, entry in found.entries.items()}
        values |= {f"signal2/{name}": entry.signal2 for name, entry in found.entries.items()}
        values["variance_between_prompts"] = found.between / processes
        device = self._trainer.accelerator.device
        mine = torch.tensor([list(values.values())], dtype=torch.float64, device=device)
        values = dict(zip(values, self._trainer.accelerator.gather(mine).mean(0).tolist(), strict=True))
        n = int(self._trainer.accelerator.gather(torch.tensor([prompts], device=device)).sum())
        noise = max(0.0, n * values[f"variance/{self.baseline}"])
        self._average.add(Moments(values[f"signal2/{self.baseline}"], noise, n))
        moments = self._average.moments
        ratios = {"snr": moments.snr, "n_snr": moments.n_snr, "critical_batch_size": moments.critical_batch_size}
        return values | ratios
