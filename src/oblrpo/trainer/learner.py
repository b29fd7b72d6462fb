"""Algorithm 1 with what a run may add to it, each from a file of its own in `step`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from oblrpo.clock import Clock
from oblrpo.errors import DivergedError, InputError, check_finite
from oblrpo.estimators import Ratio
from oblrpo.memory import give_back
from oblrpo.rollout import Rollouts
from oblrpo.scores import UnsupportedModelError
from oblrpo.step import Algorithm1, Gradient, Sampled, Update
from oblrpo.step.gradient import own_norm2_of
from oblrpo.step.ledger import VarianceLedger
from oblrpo.step.off_policy import OffPolicyBatch, clip_metrics, mismatch_metrics
from oblrpo.step.reference import Reference
from oblrpo.step.selection import draw_least_work, without_idle
from oblrpo.tasks import Problem
from oblrpo.trainer.optimizers import averaged, training


@dataclass(frozen=True)
class StepResult:
    """One step of a run: the completions, their rewards, and the updates on them."""

    rollouts: Rollouts
    rewards_PG: Tensor
    """The rewards F; the value of an output without a reward means nothing."""
    valid_PG: Tensor
    """Which outputs have a reward."""
    updates: list[Update]
    """The updates, of which there are none where too few outputs have a reward, or the gradient is not finite."""
    skipped: str = ""
    """What was not finite, so that an update was left out; empty if nothing was."""
    kl_PG: Tensor | None = None
    """The log-ratio log(pi / pi_ref) of every output that its reward was charged for; None without a reference."""
    sampled: Sampled | None = None
    """All that was sampled, where some of it was dropped before anything was learned of it."""
    entropy: float | None = None
    """The entropy of the completions' tokens in nats, where no reward differed from another: no update was made."""
    rounds: int | None = None
    """How many times prompts were sampled for it, where that is not once by itself."""


@dataclass
class Learner(Algorithm1):
    """Algorithm 1 with several updates a batch, a reference, outputs left out, and the ledger.

    Its parts are made by `setup.make_learner`.
    """

    ratio: Ratio
    train_on: str
    """One of `step.selection.SELECTIONS`."""
    ledger: VarianceLedger
    scheduler: Any
    num_iterations: int
    clip_max: float | None
    """The C of the weights min(C, pi / sampler); None where the sampler is taken for the policy."""
    reference: Reference | None = None
    clock: Clock = field(default_factory=Clock)
    rows: int | None = None
    """How many prompts there are to train on; None where they are without number, or chosen by what they earn."""
    skipped: str = ""
    """Why the last `learn` left an update out; empty if it left none out."""
    entropy: float | None = None
    """The entropy of the last `learn`'s tokens, if none of its rewards differed from another."""

    def step(self, problems: list[Problem], number: int) -> StepResult:  # type: ignore[override]
        """A run's step, in the place of Algorithm 1's: sample, reward, and make the updates of `learn`."""
        return self.learn_from(self.sample(problems), number)

    def sample(self, problems: list[Problem]) -> Sampled:
        """Algorithm 1's, on the clock."""
        with self.clock.part("sampling"):
            return super().sample(problems)

    def learn_from(self, sampled: Sampled, number: int) -> StepResult:
        """Learn from what was sampled, and let the sampler take over the new weights; arguments as in `step`."""
        rollouts, learned, kl_PG = sampled.rollouts, sampled, None
        if self.reference is not None:
            learned_PG, kl_PG = self.reference.penalised(rollouts.sequences, sampled.rewards_PG)
            learned = replace(sampled, rewards_PG=learned_PG)
        with self.clock.part("training"):
            updates = self.learn(learned, number)
        with self.clock.part("sampling"):
            self.sampler.sync(self.policy)
        told = rollouts, sampled.rewards_PG, sampled.valid_PG, updates, self.skipped, kl_PG
        return StepResult(*told, entropy=self.entropy)

    def learn(self, sampled: Sampled, step: int = 0) -> list[Update]:
        """Make `num_iterations` updates on one batch of completions; the policy before the first is the old one.

        No update is made, and nothing changes, where fewer than two prompts have as many valid outputs as the baseline
        needs, or where no reward differs from another: `entropy` is then that of the outputs. An update whose gradient
        is not finite is left out with those that would follow it, and changes nothing
        either; `skipped` says why. Step 0 takes no ledger.

        Raises:
            DivergedError: the updated weights, or log-probabilities, are NaN or infinite.
        """
        self.skipped, self.entropy = "", None
        batch = self.batch(sampled)
        if batch.prompts_in_mean < 2:
            return []
        if not batch.differs:
            left_out = replace(batch, keep_PG=torch.zeros_like(batch.keep_PG))
            self.entropy = self._entropy(left_out) / float(batch.sequences.own_ST.sum())
            for _ in range(self.num_iterations):
                self._end_update()
            return []
        try:
            updates, metrics = self._updates(batch, step)
        except DivergedError:
            raise
        except (ValueError, UnsupportedModelError) as error:
            raise InputError(f"the gradient cannot be used: {error}") from None
        if not updates:
            return []
        self.baseline.end_step()
        return [replace(updates[0], further=metrics), *updates[1:]]

    def _updates(self, batch: OffPolicyBatch, step: int) -> tuple[list[Update], dict[str, float]]:
        """The updates on a batch, and the metrics of the first of them."""
        updates: list[Update] = []
        clipped: list[dict[str, float]] = []
        metrics: dict[str, float] = {}
        for _ in range(self.num_iterations):
            try:
                if not updates:
                    with self.clock.part("ledger"):
                        metrics |= self.ledger.metrics(batch, self.baseline.prior, step)
                gradient = self.gradient(batch, None if updates else step)
            except DivergedError as error:
                if error.what == "log-probability":  # the policy itself is broken, not this batch's gradient
                    raise
                self.skipped = error.what
                self.tape.forget()  # what is left of this gradient must not reach the next
                self.optimizer.zero_grad(set_to_none=True)
                break
            if not updates:
                metrics |= self.of_first(gradient)
                batch = taken_of(gradient).aged(gradient.logp_SC, gradient.baseline_PG)
            clipped.append(clip_metrics(gradient))
            update = self.update(gradient)
            updates.append(replace(update, gradient=replace(gradient, parts=())))  # which are large
        if clipped:
            metrics |= {name: sum(shares.get(name, 0.0) for shares in clipped) / len(clipped) for name in clipped[-1]}
        return updates, metrics

    def of_first(self, gradient: Gradient) -> dict[str, float]:
        """What the first gradient of a batch shows, as metrics; the baseline learns from it."""
        batch = taken_of(gradient)
        metrics = self.baseline.compare(gradient, batch.features if batch.draw is not None else None)
        metrics |= mismatch_metrics(gradient) | self.ledger.of_draw(batch)
        self.ledger.save_up(batch)
        return metrics if batch.draw is None else metrics | {"added_variance": batch.draw.added}

    def batch(self, sampled: Sampled) -> OffPolicyBatch:
        """The completions with their rewards, and with what this algorithm makes of them in the mean."""
        return OffPolicyBatch.of(
            sampled.rollouts.sequences,
            sampled.rewards_PG,
            sampled.valid_PG,
            self.algorithm,
            longest=self.rollout.max_completion_length,
            sampler_logps_SC=sampled.rollouts.sampler_logps_SC,
            clip_max=self.clip_max,
            features=sampled.rollouts.features,
            ratio=self.ratio,
        )

    def gradient(self, batch: OffPolicyBatch, step: int | None = None) -> Gradient:  # type: ignore[override]
        """The gradient of Algorithm 1, of the outputs that are chosen; its signal is what all would have given."""
        batch = self._chosen(batch, step)
        gradient = super().gradient(batch, step)
        if batch.draw is not None:
            gradient = replace(gradient, moments=gradient.moments.of_draw(batch.draw.nothing))
        if self.rows is not None and (own2 := own_norm2_of(gradient)) is not None:
            gradient = replace(gradient, moments=gradient.moments.of_rows(own2, self.rows))
        return replace(gradient, entropy_sum=self._entropy(batch) + gradient.entropy_sum)

    def _chosen(self, batch: OffPolicyBatch, step: int | None) -> OffPolicyBatch:
        """The batch with the number of times that each output counts."""
        if self.train_on == "all":
            return batch
        if self.train_on == "exact":
            # Outputs of advantage 0 have a use in later updates, and where the sampler is compared with the policy.
            if self.num_iterations > 1 or batch.sampler_logps_SC is not None:
                return batch
            self.baseline.begin(step, batch)  # once more in the gradient, which begins from the same past
            if self.baseline.known_PG is None or self.baseline.asks_norms():
                return batch
            return replace(batch, keep_PG=without_idle(batch, self.baseline.known_PG))
        if batch.features is None:
            raise InputError(
                "this sampler does not report what train_on needs of its draws (log-probability, entropy, logit norm); "
                "set train_on to exact."
            )
        proxy_PG = self.baseline.weights.by_proxy(batch.features).view(batch.shape)
        batch = replace(batch, proxy_PG=proxy_PG)
        if batch.draw is not None:
            return batch
        self.baseline.begin(step, batch)
        assert self.baseline.known_PG is not None
        keep_PG, draw = draw_least_work(batch, self.baseline.known_PG)
        return replace(batch, keep_PG=keep_PG, draw=draw)

    @torch.no_grad()
    def _entropy(self, batch: OffPolicyBatch) -> float:
        """The sum of the entropies of tokens that were left out: as they were drawn, or by a forward."""
        left_out_PG = batch.keep_PG == 0
        if batch.features is not None:
            return float(batch.features.entropy_S[left_out_PG.flatten()].sum())
        parts = batch.parts(self.micro_batches, left_out_PG)
        return sum(self.policy.logps(part.sequences, self.rollout.temperature).entropy for part in parts)

    def update(self, gradient: Gradient) -> Update:
        """The update of Algorithm 1, and the scheduler of the rate."""
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.policy.parameters)
        give_back(weights)  # the tape's room, before room is taken for the optimizer and a copy of the weights
        update = super().update(gradient)
        check_finite("weight", torch.stack([parameter.detach().sum() for parameter in self.policy.parameters]))
        give_back(weights)  # the gradient's room, which would lie between what the next forward keeps
        self._end_update()
        return update

    def _end_update(self) -> None:
        """Advance the scheduler of the rate, which counts updates, also those that were skipped."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wants an optimizer step first, and there may be none yet
            self.scheduler.step()

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """The policy as it is evaluated: that of a schedule-free optimizer is the average of its iterates."""
        with averaged(self.optimizer) as other:
            if other:
                self.sampler.sync(self.policy)
            yield
        if other:
            self.sampler.sync(self.policy)

    _PARTS = ("optimizer", "schedule", "scheduler", "baseline", "reference", "ledger")

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy that the next step depends on."""
        return {name: part.state_dict() for name in self._PARTS if (part := getattr(self, name)) is not None}

    def load_state_dict(self, state: dict[str, Any], run: str) -> None:
        """Take up where `state_dict` left off."""
        try:
            for name in self._PARTS:
                if (part := getattr(self, name)) is not None:
                    part.load_state_dict(state[name])
            training(self.optimizer)
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{run} was written by another version ({error}); resume it with that one, or start a new run "
                "from its checkpoint with --model."
            ) from None
        self.sampler.sync(self.policy)  # a schedule-free optimizer has just changed its weights


def taken_of(gradient: Gradient) -> OffPolicyBatch:
    """The batch of a learner's gradient."""
    assert isinstance(gradient.batch, OffPolicyBatch)
    return gradient.batch
