"""The run: warm start, then step after step of rollout, learning, evaluation and checkpoint.

Every step seeds torch from (seed, step) and draws its prompts from (seed, step). So the random state and the data
position of a resumed run are functions of the step it resumes at, and evaluation cannot disturb training.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oblrpo.algorithms import resolve
from oblrpo.diagnosis import CONDITIONS, Facts, Watch, facts_of
from oblrpo.diagnosis.of_rewards import same_reward
from oblrpo.errors import DivergedError, InputError
from oblrpo.estimators import BASELINES, kappa
from oblrpo.evaluation.sampled import heldout_accuracy
from oblrpo.memory import give_back
from oblrpo.objects import Objects
from oblrpo.policy.checks import check_scores
from oblrpo.policy.saving import check_saved
from oblrpo.report.console import Progress
from oblrpo.rewards import Rewards
from oblrpo.rollout.episodes import turn_metrics
from oblrpo.rollout.variety import answers_of, token_counts, variety
from oblrpo.runs import HELD_OUT, Identity, RunFolder, disk_trouble, heldout_accuracy_of, how_to_resume, locked
from oblrpo.runs.state_files import load_state
from oblrpo.scores import by_operations
from oblrpo.seeds import seed_of
from oblrpo.settings import TrainConfig, adjustable, flatten
from oblrpo.step import NO_SIGNAL, StepResult
from oblrpo.tasks import Problem
from oblrpo.tasks.episode import logged
from oblrpo.trackers import Reporter
from oblrpo.trainer.check import check
from oblrpo.trainer.demonstrations import demonstrations_of, peak_rate, read_rows, warm_start
from oblrpo.trainer.optimizers import averaged, use_averaged_weights
from oblrpo.trainer.peak_memory import fit, remedy
from oblrpo.trainer.setup import (
    adjust,
    environments_of,
    make_learner,
    policy_of,
    row_batches,
    sampler_of,
    set_threads,
    with_tools,
)
from oblrpo.trainer.task import Prompts, drop_long_prompts, rows_to_keep, sources_of, task_of


def step_metrics(number: int, step: StepResult, tokens: int) -> dict[str, Any]:
    """Return one line of metrics.jsonl.

    Statistics of the batch are those of the first update, on-policy; the rate is that of the last update that was
    made, as later ones may have no gradient left that is not clipped. `snr`, `n_snr` and `critical_batch_size` come
    from the averaged moments, as the schedule sees them; `signal2` and `trace_cov` are this batch's own. Without an
    update the rate is 0, and metrics of the gradient are NaN. `tokens` went through the model in all steps so far.
    """
    sampled, rollouts = step.all_samples or step.samples, step.samples.rollouts
    rewards_PG, valid_PG, sequences = sampled.rewards_PG, sampled.valid_PG, rollouts.sequences
    group_std_P, rewards_N = _group_std(rewards_PG, valid_PG), rewards_PG[valid_PG]
    unlearned = NO_SIGNAL | {"grad_norm": 0.0, "frac_prompts_masked": 1 - valid_PG.any(1).float().mean().item()}
    marks = rewards_N.quantile(rewards_N.new_tensor([0, 0.25, 0.75, 1])).tolist() if len(rewards_N) else [math.nan] * 4
    return {
        "step": number,
        "reward": rewards_N.mean().item(),
        "reward_stderr": _stderr(rewards_PG, valid_PG),
        "reward_std": group_std_P.mean().item(),
        "reward_min": marks[0],
        "reward_max": marks[3],
        "reward_iqr": marks[2] - marks[1],
        "frac_reward_zero_std": math.nan if rewards_PG.shape[1] == 1 else (group_std_P == 0).float().mean().item(),
        "completions/mean_length": sequences.lengths_S.float().mean().item(),
        "completions/clipped_ratio": rollouts.clipped_S.float().mean().item(),
        **({} if rollouts.episodes is None else turn_metrics(rollouts.episodes)),
        "completions/masked_ratio": 1 - valid_PG.float().mean().item(),
        **({} if step.kl_PG is None else {"kl": (step.kl_PG.sum() / sequences.lengths_S.sum()).item()}),
        **({} if step.rounds is None else {"num_gen_batches": step.rounds}),
        **(_update_metrics(step) if step.updates else NO_UPDATE),
        **({"frac_prompts_masked": math.nan} if step.skipped and not step.updates else {}),
        **(unlearned if step.without_signal else {}),
        "entropy": float(step.samples.features.entropy_S.sum() / sequences.lengths_S.sum()),
        "skipped": float(bool(step.skipped) or step.without_signal),
        "num_tokens": tokens,
    }


NO_UPDATE = dict.fromkeys(
    ("grad_norm", "snr", "snr_low", "snr_high", "n_snr", "critical_batch_size", "signal2", "trace_cov",
     "baseline/mean", "baseline/spread"), math.nan
) | {"learning_rate": 0.0, "lr_factor": 0.0, "frac_prompts_masked": 1.0,
     "completions/trained_ratio": 0.0}  # fmt: skip


def _update_metrics(step: StepResult) -> dict[str, Any]:
    first, gradient, baseline_PG = step.updates[0], step.updates[0].gradient, step.baseline_PG
    assert baseline_PG is not None
    last = next((update for update in reversed(step.updates) if update.gradient.norm2), first)
    valid_PG, part_P = gradient.batch.valid_PG, gradient.batch.count_P > 0
    baseline_P = torch.where(valid_PG, baseline_PG, 0).sum(1)[part_P] / valid_PG.sum(1)[part_P]
    norms = {}
    if step.norm2_PG is not None:
        known_PG = valid_PG & step.norm2_PG.isfinite()
        norm2_N, rewards_N = step.norm2_PG[known_PG], gradient.batch.rewards_PG[known_PG]
        norms = {"score_norm2/mean": norm2_N.mean().item(), "score_norm2/kappa": kappa(norm2_N, rewards_N)}
    return {
        "completions/trained_ratio": gradient.trained_S.double().mean().item(),
        "grad_norm": gradient.norm2**0.5,
        "learning_rate": last.learning_rate,
        "lr_factor": last.factor,
        "snr": last.smoothed.snr,
        "snr_low": last.snr_interval[0],
        "snr_high": last.snr_interval[1],
        "n_snr": last.smoothed.n_snr,
        "critical_batch_size": last.smoothed.critical_batch_size,
        "signal2": first.moments.signal2,
        "trace_cov": first.moments.trace_cov,
        **norms,
        "baseline/mean": baseline_P.mean().item(),
        "baseline/spread": baseline_P.std().item(),
        "frac_prompts_masked": 1 - part_P.float().mean().item(),
        **({} if last.kl is None else {"step_kl": last.kl, "step_kl_target": last.target_kl}),
        **step.further,
    }


def part_metrics(earned: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean of each reward and its standard deviation (n - 1) over all completions that it applies to, as in TRL."""
    metrics = {}
    for name, values in earned.items():
        values_N = torch.tensor(values, dtype=torch.float64, device="cpu")
        metrics[f"rewards/{name}/mean"] = values_N.mean().item()
        metrics[f"rewards/{name}/std"] = values_N.std().item() if len(values) > 1 else math.nan
    return metrics


def text_metrics(problems: Sequence[Problem], step: StepResult, ends: Sequence[int]) -> dict[str, float]:
    """How much what the policy has said differs in a step, words of tools aside; `ends` are the tokens that end one."""
    rollouts, G = step.samples.rollouts, step.samples.rewards_PG.shape[1]
    parts = ([getattr(each, name) for each in problems] for name in ("answer", "columns", "text"))
    answers = [answer for answer in answers_of(*parts) for _ in range(G)]
    count_V = token_counts(rollouts.sequences.completion_SC, rollouts.sequences.own_SC, ends, max(ends) + 1)
    own = (tuple(token for token in row if token not in ends) for row in rollouts.ids())  # without what tools have said
    all_own = bool((rollouts.sequences.own_SC == rollouts.sequences.mask_ST[:, rollouts.sequences.start :]).all())
    said: Sequence[Any] = rollouts.completions if all_own else list(own)
    return variety(said, count_V, answers)


def _stderr(rewards_PG: Tensor, valid_PG: Tensor) -> float:
    """The standard error of the mean reward over prompts, whose completions are not independent.

    With r_p the sum of a prompt's valid rewards less the mean and n their number: sqrt(P / (P - 1) sum_p r_p^2) / n,
    P counting prompts with a valid reward. NaN of fewer than two of them.
    """
    part_P, n = valid_PG.any(1), valid_PG.sum()
    residual_PG = torch.where(valid_PG, rewards_PG - rewards_PG[valid_PG].mean(), 0)
    P = part_P.sum().item()
    return math.nan if P < 2 else (residual_PG.sum(1).norm() / n * math.sqrt(P / (P - 1))).item()


def _group_std(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """The standard deviation (G - 1) of every prompt with at least two valid rewards; 0 of one completion a prompt."""
    if rewards_PG.shape[1] == 1:
        return rewards_PG.new_zeros(rewards_PG.shape[0])
    if valid_PG.all():
        return rewards_PG.std(1)
    groups = (row[valid] for row, valid in zip(rewards_PG, valid_PG, strict=True))
    stds = [group.std() for group in groups if len(group) > 1]
    return torch.stack(stds) if stds else rewards_PG.new_full((1,), math.nan)


def completion_rows(problems: list[Problem], step: StepResult) -> list[dict[str, Any]]:
    """One record a completion, for `completions/step_N.jsonl`; None stands for what a masked completion lacks."""
    samples = step.samples
    baseline_PG = advantages_PG = nothing_PG = torch.full_like(samples.rewards_PG, math.nan)
    if step.updates and step.baseline_PG is not None:
        gradient = step.updates[0].gradient
        counted_PG = gradient.batch.valid_PG
        baseline_PG = torch.where(counted_PG, step.baseline_PG, nothing_PG)
        advantages_PG = torch.where(counted_PG, gradient.advantages_PG, nothing_PG)
    columns = {
        "reward": torch.where(samples.valid_PG, samples.rewards_PG, nothing_PG),
        "baseline": baseline_PG,
        "advantage": advantages_PG,
        "length": samples.rollouts.sequences.lengths_S,
        "clipped": samples.rollouts.clipped_S,
    }
    if step.norm2_PG is not None:
        columns["score_norm2"] = step.norm2_PG
    if step.kl_PG is not None:
        columns["kl"] = step.kl_PG
    values = {
        key: [None if math.isnan(value) else value for value in column.flatten().tolist()]
        for key, column in columns.items()
    }
    G = samples.rewards_PG.shape[1]
    return [
        {"prompt": problems[s // G].text, "answer": problems[s // G].answer}
        | logged(said)
        | {key: column[s] for key, column in values.items()}
        for s, said in enumerate(samples.rollouts.said)
    ]


SAVING_SHARE = 0.02  # the share of a run's time that checkpoints take, where save_steps is not set
MOST_SKIPPED = 5
"""Steps in a row without a finite gradient after which a run ends, or after half of its steps."""


class Monitors:
    """The watch over a run while it trains: what it finds is reported once, and some of it ends the run."""

    def __init__(
        self, facts: Facts | None = None, most_skipped: int = MOST_SKIPPED, stop_on_collapse: bool = False
    ) -> None:
        self.stop = ""  # why the run is to end after this step, in a sentence; empty if it continues
        self.watch = Watch(facts or Facts())
        self.most_skipped, self.stop_on_collapse = most_skipped, stop_on_collapse
        self.skipped = 0  # steps in a row without any update, because something was not finite

    def observe(self, metrics: dict[str, Any], skipped: str = "") -> list[str]:
        """Return the new warnings after a step; `skipped` says what was not finite in it, if it was skipped.

        A step without an update because all rewards agree is no such step. An outage is reported when it has
        started and when it has ended. A resumed run shows its earlier steps again, to stay quiet on them.
        """
        self.stop, what = "", skipped or "gradient"
        new, outages = self.watch.observe(metrics | {"overflow": what}), self.watch.course.outages
        agreed = metrics.get("grad_norm") == 0
        no_update = metrics.get("skipped") and metrics.get("learning_rate") == 0 and not agreed
        self.skipped = self.skipped + 1 if no_update else 0
        if self.skipped >= self.most_skipped:
            self.stop = (
                f"the last {self.skipped} steps were skipped (a {what} was NaN or infinite): they have not changed the "
                f"policy. If rewards in completions/step_{metrics['step']}.jsonl are outliers, fix the reward and "
                "continue with --resume --accept-changed. Else lower learning_rate, and start a new run."
            )
        elif self.stop_on_collapse:
            holding = {}
            for cause in self.watch.findings:
                follows = [] if cause.condition.statistic is same_reward else cause.follows
                for each in (cause, *follows):
                    if each.until == self.watch.course.step:
                        said = (f"{one.name}: {one.sentence}" for one in dict.fromkeys((cause, each)))
                        holding[each.condition] = f"{' '.join(said)} {cause.cure}"
            self.stop = next((holding[each] for each in CONDITIONS if each.collapse and each in holding), "")
        warned = [each for each in new if each.wrong and not each.condition.updated]
        outage = next((each for each in self.watch.findings if each.condition.statistic is same_reward), None)
        news = [outage if outages.lasts else outages.news] if outages.news and outage else []
        return [*(f"{outage.name}: {each}" for each in news if outage), *(f"{each.name}: {each}" for each in warned)]


class Trainer:
    """One run, new or resumed, described by its config, and by the objects that words of the config stand for."""

    def __init__(
        self, config: TrainConfig, resume: bool = False, objects: Objects | None = None, accept_changed: bool = False
    ) -> None:
        self.folder = RunFolder(Path(config.run.output).absolute())  # a reward in this process may go elsewhere
        config = self.folder.adjusted(config) if resume else config
        free = adjustable(config) if accept_changed or not resume else ()
        check(config)
        self.objects = objects or Objects()
        self.objects.check(config.policy.model)
        config, self.environments = environments_of(config, self.objects)
        self.config, self.algorithm = config, resolve(config.algorithm, config.optim)
        self.task = task_of(config, self.objects)
        shown = read_rows(config, self.objects)
        given, own = config.task, self.environments.reward
        self.rewards = Rewards(
            self.task, given.rewards, given.on_reward_error, given.reward_seconds, self.objects.functions, own
        )
        self.resume, self.notes = resume, list[str]()  # notes about a resumed run
        sources = sources_of(config, self.task, shown, self.rewards, self.environments)
        self.identity = self._identity(sources, accept_changed)
        self.done: int | None = None  # the step the policy has reached; None: not even warm-started
        self.saved: int | None = None  # the step of the newest checkpoint
        self.next_save = 0.0  # when the clock says that the last one has been paid for
        self.accuracy: dict[int, float] = {}  # held out, by step
        self.tokens = 0
        torch.manual_seed(config.run.seed)  # for the weights of a built policy, and of new adapters
        checkpoint, self.damaged = self.folder.newest_whole() if resume else (None, {})
        self.policy = with_tools(policy_of(config, self.objects, checkpoint), self.environments)
        self.resaved = checkpoint is not None
        drop_long_prompts(self.task, self.policy, config.task.max_prompt_length)
        config, self.heldout, self.longest_prompt, self.adjusted = adjust(config, self.task, self.policy, free)
        self.config = config
        self.heldout_rows, lost = rows_to_keep(config.task, self.heldout)
        self.notes += lost
        self.monitors = Monitors(
            facts_of(flatten(config)), min(MOST_SKIPPED, max(2, config.run.steps // 2)), config.run.stop_on_collapse
        )
        self.demonstrations = demonstrations_of(config, self.task, self.heldout, self.policy, shown)
        set_threads(config.run.threads, self.policy)
        self.config, self.peak = fit(self.policy, config, self.longest_prompt, free)
        sampler = sampler_of(self.policy, self.config, self.environments)
        self.learner = make_learner(self.policy, self.rewards, self.config, sampler, getattr(self.task, "rows", None))
        self.prompts = Prompts(self.task, config)
        if checkpoint:
            state = load_state(checkpoint)
            if state["step"] > config.run.steps:
                raise InputError(f"{self.folder.path} is at step {state['step']}; --steps must be at least that.")
            self.done, self.saved, self.tokens = state["step"], state["step"], state["tokens"]
            self.learner.load_state_dict(state, str(self.folder.path))
            self.prompts.load_state_dict(state["prompts"])

    def try_policy(self, write: bool = True) -> None:
        """Refuse a policy whose scores cannot be taken, or that checkpoints would not bring back.

        Without `write` no whole model is saved for that: names and shapes of its weights are compared.
        """
        given, above = self.objects.model is not None, (each for each in self.folder.path.parents if each.is_dir())
        if self.config.policy.model and (given or not self.resaved):
            check_saved(self.policy, self.config.policy, given, next(above), write)
            give_back()
        check_scores(self.policy, "set target_modules of lora to q_proj, k_proj, v_proj, o_proj")

    def run(self, progress: Progress) -> None:
        """Train to the configured step, from the latest checkpoint if resuming.

        Raises:
            KeyboardInterrupt: stopped by a signal, after the step in progress and its checkpoint.
        """
        self.try_policy()
        if not self.resume:
            self.folder.make()
        with locked(self.folder.path):
            if self.resume:
                self.folder.clean_up()
                self.folder.write_config(self.config, self.identity)
                self.folder.write_failure("")
            else:
                self.folder.create(self.config, self.identity)
            try:
                if self.heldout_rows:
                    self.folder.write_heldout_rows(self.heldout_rows)
                self._run(progress)
            except (Exception, KeyboardInterrupt) as error:
                warming = self.done is None and self.demonstrations.steps
                where = "the warm start" if warming else f"step {(self.done or 0) + 1}"
                stopped = f"stopped in {where}; {how_to_resume(self.config)}."
                if isinstance(error, KeyboardInterrupt):
                    raise KeyboardInterrupt(str(error) or stopped) from None
                refused = disk_trouble(error)
                if not refused and isinstance(error, InputError) and not isinstance(error, DivergedError):
                    refused = f"{error} The run {stopped}"
                if not self.folder.config_file.is_file():
                    refused = (
                        f"{self.folder.path} is gone: it was removed or renamed during the run; continue with --resume "
                        "where it is now, or start a new run."
                    )
                with suppress(OSError):  # a full disk may be what ended it
                    self.folder.write_failure(refused or str(error) or type(error).__name__)
                if refused:
                    raise InputError(refused) from error.__cause__ or error
                raise
            finally:
                self._note_rewards()
                self.environments.close()

    def _note_rewards(self) -> None:
        """Note what has become of rewards that carry values: this program may resume with the same objects."""
        now, sources = self.rewards.digests(), self.identity.sources
        left = {name: digest for name, digest in now.items() if digest != sources.get(name)}
        if left and self.folder.config_file.is_file():
            with suppress(OSError):  # of a full disk
                self.folder.write_config(self.config, replace(self.identity, left=left))

    def _run(self, progress: Progress) -> None:
        lost = self.folder.drop_metrics_after(-1 if self.done is None else self.done)
        rows = self.folder.read_metrics()
        self.accuracy = heldout_accuracy_of(rows)
        for row in rows:
            self.monitors.observe(row)
        known = next(reversed(self.accuracy.items()), None)
        if self.peak and (more := remedy(self.policy, self.config, self.longest_prompt, self.peak)):
            self.notes.append(f"memory: {self.peak}{more}.")
        progress.start(self.describe(), self.config.run.steps, self.demonstrations.steps, self.done, known)
        for note in (*getattr(self.task, "notes", ()), *self.demonstrations.notes, *self.notes, *lost):
            progress.warn(note)
        for step, wrong in (self.damaged | self.folder.damaged_best(self.accuracy)).items():
            aside = self.folder.set_aside(step)
            progress.warn(
                f"the checkpoint of step {step} is damaged ({wrong}) and is now in {aside}: resuming from {self.done}."
            )
        if ":" in self.algorithm.baseline and not BASELINES[self.algorithm.baseline].unbiased:
            progress.warn(
                f"the baseline {self.algorithm.baseline!r} depends on the completion that it is subtracted from, "
                "which biases the gradient. Leave that completion out of it."
            )
        self.environments.warn = progress.warn
        with Reporter(self.config.run.report_to, self.folder, flatten(self.config), progress.warn) as self.reporter:
            self._steps(progress)
        use_averaged_weights(self.learner.optimizer)

    def _steps(self, progress: Progress) -> None:
        begun = self.done is not None
        learned = {} if begun else self._warm_start(progress)
        # A signal in a step lets it end first: what is on disk is then always a whole step.
        with _stop_between_steps() as stopped:
            if not begun:
                learned |= self._accuracy(0, progress)
                self._finish_step(0, {"step": 0} | learned | self.learner.clock.lap(), "", progress)
            assert self.done is not None
            while self.done < self.config.run.steps and not stopped():
                self._finish_step(self.done + 1, *self._step(self.done + 1), progress)
        self.rewards.close()
        if self.done < self.config.run.steps:
            self._save()
            raise KeyboardInterrupt(f"stopped after step {self.done}; {how_to_resume(self.config)}.")

    def describe(self) -> str:
        """Return the run in a few lines: its numbers of parameters, prompts and completions."""
        config, algorithm = self.config, self.algorithm
        P, G = config.rollout.prompts_per_step, config.rollout.num_generations
        total = sum(p.numel() for p in self.policy.model.parameters())
        trained = sum(p.numel() for p in self.policy.parameters)
        weights = "4-bit weights" if config.policy.load_in_4bit else str(self.policy.model.dtype).removeprefix("torch.")
        precision = f"{weights} with bfloat16 arithmetic" if config.policy.bf16 else weights
        rows = f", {count} rows to train on" if (count := getattr(self.task, "rows", 0)) else ""
        about = f"about      {self.task.about}\n" if self.task.about else ""
        learned_before = without_rules = ""
        if steps := (taught := self.demonstrations).steps:
            batch, rate = config.warm_start.learning.batch, peak_rate(config, self.policy)
            learned_before = f"warm start {steps} steps on {taught.words}, batch {batch}, AdamW at {rate:g}\n"
        if kinds := sorted(set(by_operations(self.policy.model).values())):
            without_rules = f"no rule    scored operation by operation: {', '.join(kinds)}\n"
        if lost := getattr(self.policy.model, "left_out", None):
            without_rules += f"left out   {len(lost)} weights of its files, neither used nor saved, e.g. {min(lost)}\n"
        at_once = f", sampled {most:,} at a time" if 0 < (most := config.rollout.max_num_seqs) < P * G else ""
        engine = f" in {dtype}" if (dtype := getattr(self.learner.sampler, "dtype", "")) else ""
        form, tokenizer, prompts = self.policy.format, self.policy.tokenizer, [each.prompt for each in self.heldout]
        of_template = "".join(f"template   {note}\n" for note in form.notes(tokenizer, prompts))
        tools, turns = self.environments, config.turns.max_turns
        of_tools = f"tools      {tools.about}, at most {turns} turns\n" if tools else ""
        return (
            f"policy     {config.policy.model or 'built from scratch'}: {total:,} parameters, {trained:,} trained, "
            f"{precision} on {self.policy.device}, {torch.get_num_threads()} CPU thread(s)\n"
            f"task       {self.task.name}{rows}, {config.run.eval_prompts} held-out prompts x "
            f"{config.run.eval_samples} completions, rewarded by {' + '.join(self.rewards.names)}\n"
            f"{about}{self.adjusted}{learned_before}"
            f"step       {P} prompts x {G} completions = {P * G} completions of at most "
            f"{config.rollout.max_completion_length} tokens{at_once}\n"
            f"prompt     {form.preview(tokenizer, prompts[0])}\n"
            f"{of_template}{of_tools}"
            f"algorithm  baseline {algorithm.baseline}, normalisation {algorithm.normalisation}, weighting "
            f"{algorithm.weighting}, schedule {algorithm.schedule}, {config.optim.optimizer} at "
            f"{config.optim.learning_rate:g}\n"
            f"{without_rules}"
            f"sampler    {config.rollout.sampler}{engine}; completions end with {' or '.join(self.policy.end_words)}\n"
            f"output     {config.run.output}, {config.run.steps} steps, seed {config.run.seed}"
            f"{'' if config.run.steps else ': no RL, only held-out accuracy and a checkpoint'}"
            f"{'' if self.done is None else f'; resuming after step {self.done}'}"
        )

    def _identity(self, sources: dict[str, str], accept_changed: bool) -> Identity:
        """Return what identifies the run, with what it learns from as it is now."""
        if not self.resume:
            return Identity(sources=sources, about=self.task.about)
        self.notes += self.folder.check_resumable(self.config)
        begun = self.folder.identity()
        changed = ", ".join(begun.changed(sources))
        if changed and not accept_changed:
            raise InputError(
                f"{self.folder.path} was started with other data, rewards or baseline: {changed} changed since. "
                "Restore what was there, or continue with what is there now: oblrpo train --resume --accept-changed "
                f"--output {self.config.run.output} (from Python accept_changed=True)."
            )
        if changed:
            self.notes.append(f"changed since the run was started, and accepted: {changed}.")
        for name, (_, parts) in (self.rewards.digests_and_gaps() | self.environments.digests_and_gaps).items():
            lacks = f"cannot check whether '{name}' has changed: there is no digest of {', '.join(parts)}."
            self.notes += [lacks] if parts else []
        return replace(begun.resumed(sources), about=self.task.about)

    def _warm_start(self, progress: Progress) -> dict[str, float]:
        """Learn from demonstrations; return the last loss, and of a loaded model the accuracy before."""
        if not self.demonstrations.steps:
            return {}
        metrics = {}
        if self.config.policy.model:  # one that is built from scratch solves nothing yet
            metrics = {
                f"{name}_before_warm_start": value for name, value in self._accuracy(0, progress, swap=False).items()
            }

        def observe(step: int, loss: float) -> None:
            metrics["warm_start_loss"] = loss
            progress.warm_start(step, loss)

        rate, rows = peak_rate(self.config, self.policy), row_batches(self.config.rollout)
        with self.learner.clock.part("warm_start"):
            warm_start(self.policy, self.demonstrations.batch, self.demonstrations.steps, rate, observe, rows)
            self.learner.sampler.sync(self.policy)
        return metrics

    def _step(self, step: int) -> tuple[dict[str, Any], str]:
        """Make a step; return its metrics, and what was not finite in it."""
        started = time.perf_counter()
        torch.manual_seed(seed_of(self.config.run.seed, step))
        self.rewards.take_earned()  # of held-out problems
        problems, done = self.prompts.step(self.learner, step)
        self.tokens += done.samples.rollouts.sequences.tokens
        # Before the metrics: warnings about rewards name this file, and a step counts once its metrics are there.
        with self.learner.clock.part("files"):
            self.folder.write_completions(step, completion_rows(problems, done))
        metrics = step_metrics(step, done, self.tokens) | text_metrics(problems, done, self.policy.end_tokens)
        metrics |= part_metrics(self.rewards.take_earned())
        if step == self.config.run.steps or (self.config.run.eval_steps and step % self.config.run.eval_steps == 0):
            metrics |= self._accuracy(step)
        return metrics | {"step_time": time.perf_counter() - started} | self.learner.clock.lap(), done.skipped

    def _accuracy(self, step: int, progress: Progress | None = None, swap: bool = True) -> dict[str, float]:
        run, rollout = self.config.run, self.config.rollout
        if progress:  # there is no bar yet that moves
            progress.console.print(f"evaluating the {len(self.heldout)} held-out prompts", highlight=False)
        seed = seed_of(run.seed, step) ^ 1  # another than that of the step's own draws
        learner, sampler = self.learner, self.learner.sampler
        with learner.clock.part("evaluation"):
            with averaged(learner.optimizer) as other:  # the weights of a schedule-free optimizer
                if other:
                    sampler.sync(self.policy)
                accuracy, rows, loss = heldout_accuracy(
                    self.policy, self.rewards, self.heldout, run.eval_samples, rollout, seed, sampler,
                    swap=swap and not self.environments,  # which have seen one prompt alone
                )  # fmt: skip
            if other:
                sampler.sync(self.policy)
        with learner.clock.part("files"):
            self.folder.write_completions(step, rows, HELD_OUT)
        found = {"eval/accuracy": accuracy.value, "eval/accuracy_stderr": accuracy.stderr}
        return found if loss is None else found | {"eval/swap_loss": loss.value, "eval/swap_loss_stderr": loss.stderr}

    def _finish_step(self, step: int, metrics: dict[str, Any], skipped: str, progress: Progress) -> None:
        warnings = self.monitors.observe(metrics, skipped)
        with self.learner.clock.part("files"):  # of the next step's metrics
            self.reporter.log(self.folder.write_metrics(metrics | ({"warnings": warnings} if warnings else {})))
        for warning in warnings:
            progress.warn(warning)
        self.done, before = step, self.accuracy
        self.accuracy = before | (now := heldout_accuracy_of([metrics]))
        is_best = bool(now) and max(now.values()) > max(before.values(), default=-math.inf)
        every = self.config.run.save_steps
        due = is_best or time.perf_counter() >= self.next_save if every is None else every > 0 and step % every == 0
        # Step 0 too: a warm start is not to be made again.
        if step in {0, self.config.run.steps} or due:
            self._save()
        progress.step(step, metrics)
        if self.monitors.stop:
            self._save()
            raise DivergedError(self.monitors.stop)

    def _save(self) -> None:
        if self.saved == self.done or self.done is None:
            return
        begun = time.perf_counter()
        with averaged(self.learner.optimizer) as other:  # state and weights alike: `load_state_dict` turns both back
            state = {"run": self.identity.run, "step": self.done, "tokens": self.tokens}
            state |= {"prompts": self.prompts.state_dict()} | self.learner.state_dict()
            keep = self.config.run.save_total_limit
            with self.learner.clock.part("files"):
                self.folder.save_checkpoint(self.done, self.policy.save, state, keep, self.accuracy)
        if other:  # the average is turned back up to rounding, and a resumed run samples with what that gives
            self.learner.sampler.sync(self.policy)
        self.saved, ended = self.done, time.perf_counter()
        self.next_save = ended + (ended - begun) * (1 / SAVING_SHARE - 1)


@contextmanager
def _stop_between_steps() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C or SIGTERM end the run after the step in progress; a second one ends it at once."""
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        with suppress(OSError, RuntimeError, ValueError):  # nobody reads, or what was interrupted was printing itself
            print("stopping after this step; press Ctrl-C again to stop immediately", file=sys.stderr, flush=True)
        for other, handler in before.items():
            signal.signal(other, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, note)
    except ValueError:  # not in the main thread: signals go elsewhere
        before = {}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
