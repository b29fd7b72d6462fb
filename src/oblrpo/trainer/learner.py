"""A run's step: Algorithm 1 with what a run adds to it, most of it from files of its own in `step`; and its prompts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from oblrpo import estimators
from oblrpo.clock import Clock
from oblrpo.errors import DivergedError, InputError, check_finite
from oblrpo.estimators.advantages import ROUNDING
from oblrpo.estimators.schedule import set_rate
from oblrpo.memory import give_back
from oblrpo.scores import UnsupportedModelError
from oblrpo.settings import TrainConfig
from oblrpo.step import Algorithm1, BaselinePass, Batch, Gradient, Samples, Update
from oblrpo.step.ledger import VarianceLedger, drawn, own_norm2
from oblrpo.step.off_policy import ImportanceWeights, clip_metrics, sampler_metrics
from oblrpo.step.reference import Reference
from oblrpo.tables.algorithms import Ratio
from oblrpo.tasks import Problem, Task
from oblrpo.trainer.optimizers import averaged, training


@dataclass(frozen=True)
class StepResult:
    """One step of a run: the completions, their rewards, and the updates on them."""

    samples: Samples
    """The completions that it learned from, with their rewards before any KL penalty."""
    updates: list[Update]
    """The updates, of which there are none where too few outputs have a reward, or the gradient is not finite."""
    skipped: str = ""
    """What was not finite, so that an update was left out; empty if nothing was."""
    entropy: float | None = None
    """The entropy of the completions' tokens in nats, where no reward differed from another: no update was made."""
    kl_PG: Tensor | None = None
    """The log-ratio log(pi / pi_ref) of every output that its reward was charged for; None without a reference."""
    all_samples: Samples | None = None
    """All that was sampled, where some of it was dropped before anything was learned from it."""
    rounds: int | None = None
    """How many times prompts were sampled for it, set with dynamic sampling only."""


@dataclass
class Learner:
    """Algorithm 1 with several updates a batch, a reference, outputs left out, and the ledger.

    Its parts are made by `setup.make_learner`.
    """

    core: Algorithm1
    ratio: Ratio
    train_on: str
    """Which outputs go through the model: `all`, or `exact`, those whose advantages are not 0."""
    ledger: VarianceLedger
    scheduler: LambdaLR | None
    """The course of the rate eta_0; None where it is constant."""
    num_iterations: int
    clip_max: float | None
    """The C of the weights min(C, pi / sampler); None where the sampler is taken for the policy."""
    reward_clip: float = 0.0
    """The largest size of a reward that is learned from; 0: no limit."""
    reference: Reference | None = None
    clock: Clock = field(default_factory=Clock)
    rows: int | None = None
    """How many prompts there are to train on, where batches hold a good part of them (`counted`)."""

    def step(self, problems: list[Problem], number: int) -> StepResult:
        """Sample, reward, make the updates of `learn`, and let the sampler take over the new weights."""
        return self.learn_from(self.sample(problems), number)

    def sample(self, problems: list[Problem]) -> Samples:
        """Algorithm 1's, on the clock."""
        with self.clock.part("sampling"):
            return self.core.sample(problems)

    def charged(self, samples: Samples) -> tuple[Samples, Tensor | None]:
        """The samples with the rewards that are learned from, clipped and less the KL penalty; and its log-ratios."""
        if self.reward_clip:
            samples = replace(samples, rewards_PG=samples.rewards_PG.clamp(-self.reward_clip, self.reward_clip))
        if self.reference is None:
            return samples, None
        charged_PG, kl_PG = self.reference.penalised(samples.rollouts.sequences, samples.rewards_PG)
        return replace(samples, rewards_PG=charged_PG), kl_PG

    def learn_from(self, samples: Samples, number: int) -> StepResult:
        """Learn from what was sampled in step `number`, and let the sampler take over the new weights."""
        charged, kl_PG = self.charged(samples)
        with self.clock.part("training"):
            result = self.learn(charged, number)
        with self.clock.part("sampling"):
            self.core.sampler.sync(self.core.policy)
        return replace(result, samples=samples, kl_PG=kl_PG)

    def learn(self, samples: Samples, step: int = 0) -> StepResult:
        """Make `num_iterations` updates on one batch of completions; the policy before the first is the old one.

        No update is made, and nothing changes, where fewer than two prompts have as many valid outputs as the baseline
        needs, or where no reward differs from another. An update whose gradient is not finite is left out with those
        that would follow it, and changes nothing either. The scheduler of the rate advances all the same, so that it
        comes to its end with the run. Step 0 takes no ledger.

        Raises:
            DivergedError: the updated weights, or log-probabilities, are NaN or infinite.
        """
        result = self._learn(samples, step)
        for _ in range(self.num_iterations - len(result.updates)):
            self._end_update()
        return result

    def _learn(self, samples: Samples, step: int) -> StepResult:
        batch = self.core.batch(samples)
        if batch.prompts_in_mean < 2:
            return StepResult(samples, [])
        if not estimators.differ(batch.rewards_PG, batch.valid_PG):
            entropy = self._entropy(samples, batch, torch.ones_like(batch.valid_PG))
            return StepResult(samples, [], entropy=entropy / float(batch.sequences.own_ST.sum()))
        try:
            return self._updates(samples, batch, step)
        except DivergedError:
            raise
        except (ValueError, UnsupportedModelError) as error:
            raise InputError(f"the gradient cannot be used: {error}") from None

    def weights(self, samples: Samples) -> ImportanceWeights:
        """What multiplies the scores of the first update on these outputs."""
        return ImportanceWeights(self.ratio, self.clip_max, samples.rollouts.sampler_logps_SC)

    def _updates(self, samples: Samples, batch: Batch, step: int) -> StepResult:
        """The updates on a batch, the first with the metrics of all."""
        weights, past = self.weights(samples), self.core.baseline
        first = past.begin(step, batch)
        metrics: dict[str, float] = {}
        clipped: list[dict[str, float]] = []
        updates: list[Update] = []
        skipped = ""
        for _ in range(self.num_iterations):
            try:
                if not updates:
                    with self.clock.part("ledger"):
                        metrics |= self.ledger.metrics(batch, past.prior, step, weights)
                    batch = self.chosen(batch, first, weights)
                baseline = past.begin(None, batch) if updates else first
                gradient = self.gradient(samples, batch, baseline, weights)
            except DivergedError as error:
                if error.what == "log-probability":  # the policy itself is broken, not this batch's gradient
                    raise
                skipped = error.what
                self.core.tape.forget()  # what is left of this gradient must not reach the next
                self.core.optimizer.zero_grad(set_to_none=True)
                break
            if updates:
                clipped.append(clip_metrics(gradient.parts, self.ratio))
            else:
                metrics |= first.compare(gradient)
                metrics |= sampler_metrics(gradient.parts, self.clip_max)
                self.ledger.save_up(batch)
                weights = replace(weights, old_token_logps_SC=gradient.token_logps_SC)
                fixed_PG = gradient.baseline_PG if self.ratio.by_sign else None
                batch = replace(batch, baseline_PG=fixed_PG, fresh=False)
            update = self.update(gradient)
            updates.append(replace(update, gradient=replace(gradient, parts=())))  # which are large
        if not updates:
            return StepResult(samples, [], skipped)
        past.end_step(first)
        for name in clipped[-1] if clipped else ():
            metrics[name] = sum(shares.get(name, 0.0) for shares in clipped) / len(updates)
        return StepResult(samples, [replace(updates[0], further=metrics), *updates[1:]], skipped)

    def chosen(self, batch: Batch, baseline: BaselinePass, weights: ImportanceWeights) -> Batch:
        """The batch without the outputs of advantage 0, where these have no further use.

        They have one in later updates, where the sampler is compared with the policy, and where norms are taken.
        """
        known_PG = baseline.known_PG
        in_use = self.num_iterations > 1 or weights.sampler_logps_SC is not None or baseline.takes_norms()
        if known_PG is None or in_use or self.train_on == "all":
            return batch
        advantages_PG = estimators.advantages(batch.rewards_PG, known_PG, batch.valid_PG)
        skipped_PG = advantages_PG.abs() <= ROUNDING * batch.rewards_PG.abs().max()  # what float32 leaves of 0
        if skipped_PG.all():  # one is kept, so that there is a gradient, of 0
            skipped_PG[tuple(batch.valid_PG.nonzero()[0])] = False
        return replace(batch, skipped_PG=skipped_PG)

    def gradient(self, samples: Samples, batch: Batch, baseline: BaselinePass, weights: ImportanceWeights) -> Gradient:
        """The gradient of Algorithm 1 with the entropy of all outputs, and the signal and noise of drawn prompts."""
        gradient = self.core.gradient(batch, baseline, weights)
        if self.rows is not None and batch.fresh:  # the moments of later updates are not averaged
            core, weight_P = self.core, drawn(batch.rewards_PG, batch.valid_PG, int(batch.sequences.ids_ST.sum()))
            own2 = own_norm2(
                batch, weight_P, gradient.rho_PG, core.policy, core.rollout.temperature, core.micro_batches
            )
            gradient = replace(gradient, moments=gradient.moments.of_rows(own2, self.rows))
        left_out = 0.0 if batch.skipped_PG is None else self._entropy(samples, batch, batch.skipped_PG)
        return replace(gradient, entropy_sum=left_out + gradient.entropy_sum)

    @torch.no_grad()
    def _entropy(self, samples: Samples, batch: Batch, of_PG: Tensor) -> float:
        """The sum of the entropies of some outputs' tokens: as they were drawn, or by a forward."""
        if samples.rollouts.entropy_S is not None:
            return float(samples.rollouts.entropy_S[of_PG.flatten()].sum())
        policy, temperature = self.core.policy, self.core.rollout.temperature
        parts = batch.parts(self.core.micro_batches, of_PG)
        return sum(policy.logps(part.sequences, temperature).entropy for part in parts)

    def update(self, gradient: Gradient) -> Update:
        """The update of Algorithm 1, and the scheduler of the rate."""
        parameters = self.core.policy.parameters
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)  # bytes
        give_back(size)  # the tape's room, before room is taken for the optimizer and a copy of the weights
        try:
            update = self.core.update(gradient)
        except ValueError:  # the schedule could not measure it, because the update broke the policy
            check_finite("weight", torch.stack([parameter.detach().sum() for parameter in parameters]))
            raise
        check_finite("weight", torch.stack([parameter.detach().sum() for parameter in parameters]))
        give_back(size)  # the gradient's room, which would lie between what the next forward keeps
        self._end_update()
        return update

    def _end_update(self) -> None:
        """Advance the scheduler of the rate, which counts updates, those that were left out too."""
        if self.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch wants an optimizer step first, and there may be none yet
                self.scheduler.step()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The policy as it is evaluated: that of a schedule-free optimizer is the average of its iterates."""
        with averaged(self.core.optimizer) as other:
            if other:
                self.core.sampler.sync(self.core.policy)
            yield
        if other:
            self.core.sampler.sync(self.core.policy)

    @property
    def _parts(self) -> dict[str, Any]:
        core = self.core
        parts = {"optimizer": core.optimizer, "schedule": core.schedule, "baseline": core.baseline}
        parts |= {"scheduler": self.scheduler, "ledger": self.ledger, "reference": self.reference}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy that the next step depends on."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any], run: str) -> None:
        """Take up where `state_dict` left off."""
        try:
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
            if (course := self.scheduler) is not None:  # perhaps over more updates than the one that was saved
                [group], [rate], [at] = self.core.optimizer.param_groups, course.base_lrs, course.lr_lambdas
                set_rate(group, rate * at(course.last_epoch))
            training(self.core.optimizer)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"the state of {run} does not fit these settings or this version ({error}); start a new run from its "
                "checkpoint with --model."
            ) from None
        self.core.sampler.sync(self.core.policy)  # a schedule-free optimizer has just changed its weights


class Prompts:
    """Takes the prompts of every step from the task, which decides by the number of the step.

    With `dynamic_sampling` (DAPO's) prompts whose outputs have earned the same are dropped, and others sampled for
    them. Batches are taken from the task one after the other until prompts_per_step prompts have outputs that differ,
    or so many rounds are over; what is missing then is filled up with prompts that were dropped, which give no
    gradient. The prompts that are trained on depend on what their outputs earned: the objective is another one.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        self.task, self.size, self.most = task, config.rollout.prompts_per_step, config.rollout.dynamic_sampling
        self.batches = 0
        """How many batches of the task dynamic sampling has used so far."""

    def step(self, learner: Learner, number: int) -> tuple[list[Problem], StepResult]:
        """Let the learner make a step; return it with the problems that it learned from."""
        if not self.most:
            problems = self.task.train_batch(number, self.size)
            return problems, learner.step(problems, number)
        problems, rounds = list[Problem](), list[Samples]()
        differ = torch.zeros(0, dtype=torch.bool)
        while len(rounds) < self.most and int(differ.sum()) < self.size:
            self.batches += 1
            more = self.task.train_batch(self.batches, self.size)
            rounds.append(learner.sample(more))
            problems += more
            differ = torch.cat([_differ(sampled).cpu() for sampled in rounds])
        chosen_P = torch.argsort(differ, descending=True, stable=True)[: self.size]
        sampled = Samples.join(rounds)
        done = learner.learn_from(sampled.at(chosen_P), number)
        return [problems[index] for index in chosen_P.tolist()], replace(done, all_samples=sampled, rounds=len(rounds))

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draw depends on, beside the number of the step."""
        return {"batches": self.batches} if self.most else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.batches = int(state["batches"]) if self.most else 0


def _differ(sampled: Samples) -> torch.Tensor:
    """Which prompts have outputs that have earned different rewards, (P,)."""
    rewards_PG, valid_PG = sampled.rewards_PG, sampled.valid_PG
    return rewards_PG.where(valid_PG, -torch.inf).amax(1) > rewards_PG.where(valid_PG, torch.inf).amin(1)
