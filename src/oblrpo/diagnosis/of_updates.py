"""Conditions that show in the updates: gradients, the learning rate, baselines and the batch."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from itertools import pairwise

from oblrpo.diagnosis.condition import TOO_LONG, Reading, changed, condition
from oblrpo.diagnosis.course import SPARSE, WINDOW, Course


@condition(
    "skipped", threshold=1, rows=True, turns="-learning_rate",
    sentence="NaN or infinite in {unit} {step}: {what}.",
    cure=(
        "Check that step's rewards for outliers, infinities and missing values. If it happens again, make updates "
        "smaller ({shorten}), and restart from an earlier checkpoint."
    ),
)  # fmt: skip
def not_finite(run: Course) -> Reading | None:
    """Numbers have overflowed.

    It looks like NaN or infinity in the log, or a step that `oblrpo train` has skipped for that (`skipped` 1), which
    changes nothing.
    """
    skipped = run.value("skipped")
    return None if skipped is None else Reading(skipped, 0.0, run.step, {"step": run.step, "what": run.overflow})


@condition(
    "loss", "grad_norm", threshold=3, wrong=False,
    sentence="The loss is 0 in every {unit}, though there is a gradient: it is no measure of progress.",
    cure="GRPO's is 0 in the first update of a batch, where advantages sum to 0. Watch the reward.",
)  # fmt: skip
def loss_of_zero(run: Course) -> Reading | None:
    """The loss of GRPO and its kin is 0, and the policy learns all the same.

    It looks like a `loss` of exactly 0 in three rows and all others, beside a `grad_norm` above 0.
    """
    loss, norm = run.columns.get("loss"), run.columns.get("grad_norm")
    if not loss or not norm or loss.lowest or loss.highest or norm.highest <= 0:
        return None
    return Reading(loss.count, 0.0, run.memory.setdefault("loss_of_zero", run.step), {})


def without_gradient(run: Course, differing: bool) -> Reading | None:
    """By how many rows in a row without a gradient, of three: those show that rewards of a prompt differ, or do not."""
    norm, share, spread = (run.value(key) for key in ("grad_norm", "frac_reward_zero_std", "reward_std"))
    if norm is None or run.value("reward") is None:
        return None
    # TRL's reward_std is that of all completions by now; a norm is that of the last of a row's steps, the share of all
    differ = bool(spread) if share is None else share < (1 if run.facts.every == 1 else 0.5)
    what = "gradient_cut_off" if differing else "no_gradient"
    rows, first = run.in_a_row(what, norm == 0 and differ is differing)
    known = "" if share is not None or spread is not None else ", or the loss does not reach the weights"
    most = f"{share:.0%} of the prompts" if share is not None and share < 0.995 else "each prompt"
    words = {"rows": run.said(rows), "known": known, "most": most}
    return Reading(rows / min(3, run.facts.whole or 3), 0.0, first, words)


@condition(
    "grad_norm", "reward", threshold=1, rows=True,
    sentence="For {rows} there was no gradient (grad_norm 0), though completions of a prompt got different rewards.",
    cure=(
        "The reward is not the cause: find what cuts the weights off from the loss. They are frozen, or all tokens "
        "are masked, or gradient checkpointing is reentrant under an adapter (use_reentrant False, or "
        "enable_input_require_grads). In float16 the loss scaler may have skipped a first step."
    ),
)  # fmt: skip
def gradient_cut_off(run: Course) -> Reading | None:
    """Rewards differ, and no gradient reaches the weights: nothing can be learned.

    It looks like `grad_norm` 0 for three rows in a row that show rewards of a prompt to differ: `frac_reward_zero_std`
    below 1, or a `reward_std` above 0 in a log without it. Where a log has but one or two rows, these will do. A
    "loss of zero" is no sign of it.
    """
    return without_gradient(run, differing=True)


@condition(
    "grad_norm", "reward", threshold=1, rows=True, turns="+temperature",
    sentence="For {rows} there was no gradient: all completions of {most} got the same reward{known}.",
    cure=(
        "Choose prompts that are solved sometimes, or raise temperature or num_generations. If their rewards differ, "
        "find what cuts the weights off from the loss: they are frozen, or all tokens are masked."
    ),
)  # fmt: skip
def no_gradient(run: Course) -> Reading | None:
    """Nothing reaches the weights, though not all completions earn the same: those of each prompt do.

    It looks like `grad_norm` 0 for three rows in a row, of which none shows that rewards of a prompt differ.
    """
    return without_gradient(run, differing=False)


@condition(
    "grad_norm", threshold=3, rows=True, turns="-learning_rate",
    sentence="The gradient spikes: its norm was {norm:.3g} in {unit} {step}, {times:.0f} times the median {usual:.3g}.",
    cure="Check that step's rewards and completions. Set max_grad_norm near the median, or shrink updates: {shorten}.",
)  # fmt: skip
def gradient_spikes(run: Course) -> Reading | None:
    """Single batches move the policy far more than the others.

    It looks like three steps of the last 100, or one that is 30 times as large, whose `grad_norm` is ten times the
    median of the 50 steps before, and far outside of their spread.
    """
    norm = run.value("grad_norm")
    memory = run.memory.setdefault("gradient_spikes", {"logs": deque(maxlen=50), "spikes": deque(maxlen=100)})
    logs: deque[float] = memory["logs"]
    if norm is None or norm <= 0:
        return None
    log, reading = math.log(norm), None
    if len(logs) >= 2 * WINDOW and log - min(logs) <= math.log(10):
        memory["spikes"].append(0.0)
    elif len(logs) >= 2 * WINDOW:
        usual = statistics.median(logs)
        spread = 1.4826 * statistics.median(abs(each - usual) for each in logs)
        height = log - usual
        spike = height > max(math.log(10), 6 * spread)
        memory["spikes"].append(0.0 if not spike else 3.0 if height > math.log(30) else 1.0)
        if spike:
            words = {"norm": norm, "times": norm / math.exp(usual), "usual": math.exp(usual), "step": run.step}
            reading = Reading(sum(memory["spikes"]), 0.0, run.step, words)
    logs.append(log)
    return reading


@condition(
    "grad_norm", "reward", threshold=math.log(10), turns="-learning_rate",
    sentence="The gradient grows: its norm is {now:.3g}, up from {then:.3g} around {unit} {step}.",
    cure="Set max_grad_norm near its usual norm. " + TOO_LONG,
)  # fmt: skip
def gradient_grows(run: Course) -> Reading | None:
    """The gradient becomes ever larger, and the policy no better.

    It looks like a mean `grad_norm` of ten times what it was, with no rise of the reward since; of fifty times,
    whatever the reward does. The median has grown as much, since a mean grows by a single spike.
    """
    reading = changed(run, "grad_norm", 0.1, enough=50.0)
    norms = [norm for _, norm, _ in run.columns["grad_norm"].last[-run.window :]] if reading else []
    return reading if reading and statistics.median(norms) >= 10 * reading.words["then"] else None


@condition(
    "learning_rate", threshold=WINDOW, rows=True, turns="+prompts",
    sentence=(
        "The learning rate has collapsed: for {value:.0f} {unit}s it has been below 1 % of its maximum ({now:.2g} of "
        "{high:.2g}).{batch}"
    ),
    cure=(
        "If a schedule follows the signal, the signal is lost in noise: use more prompts per step, stop here, or set "
        "schedule to off to continue regardless. Otherwise check the scheduler and its number of steps."
    ),
)  # fmt: skip
def rate_collapsed(run: Course) -> Reading | None:
    """The learning rate has collapsed, and with it learning.

    It looks like a rate (of a schedule that follows the signal: its factor `lr_factor`) at one hundredth of its highest
    or less for ten steps, and for a tenth of the run, which no cosine or linear decay does.
    """
    if run.facts.measured_rate:  # it follows no signal, and where it begins may be far too high
        return None
    signal = run.value("lr_factor") is not None
    key = "lr_factor" if signal else "learning_rate"
    now = run.value(key)
    if now is None or (signal and run.value("grad_norm") == 0):
        return None
    high = run.columns[key].highest
    low, first = run.in_a_row("rate_collapsed", now <= 0.01 * high)
    if not signal and (low < 0.1 * run.columns[key].count or high <= 0):
        return None
    critical = run.value("critical_batch_size")
    batch = f" The critical batch is about {critical:.0f} prompts." if signal and critical is not None else ""
    return Reading(run.lasted(low), 0.0, first, {"now": now, "high": high, "batch": batch})


@condition(
    "learning_rate", threshold=math.log(2), rows=True, turns="+prompts",
    sentence="The learning rate oscillates: each step changes it by a factor of {factor:.1f}, up and down.",
    cure="Use more prompts per step, so that the measurement is less noisy, or a fixed rate.",
)  # fmt: skip
def rate_oscillates(run: Course) -> Reading | None:
    """An adaptive rate overshoots and corrects itself, again and again.

    It looks like a rate whose changes over 20 steps are by a factor of two or more, and turn nearly every time.
    """
    rate = run.value("learning_rate")
    logs: deque[float] = run.memory.setdefault("rate_oscillates", deque(maxlen=2 * WINDOW + 1))
    if rate is None or rate <= 0:
        return None
    logs.append(math.log(rate))
    if len(logs) <= 2 * WINDOW or max(logs) - min(logs) < math.log(2):
        return None
    changes = [after - before for before, after in pairwise(logs)]
    turns = sum(a * b < 0 for a, b in pairwise(changes))
    if turns < 0.75 * (len(changes) - 1):
        return None
    size = statistics.median(map(abs, changes))
    return Reading(size, 0.0, run.step - 2 * WINDOW * run.facts.every, {"factor": math.exp(min(size, 99.0))})


@condition(
    "step_kl", "grad_norm", threshold=WINDOW, rows=True, turns="+learning_rate",
    sentence="For {value} {unit}s updates at a learning rate of {rate:.1e} changed no log-probability.",
    cure="They are lost in rounding: raise learning_rate, or keep the weights in float32.",
)  # fmt: skip
def updates_lost(run: Course) -> Reading | None:
    """Updates are too small for the weights' data type.

    It looks like `step_kl` of exactly 0 for ten steps with a gradient.
    """
    moved, norm = run.value("step_kl"), run.value("grad_norm")
    if moved is None or norm is None:
        return None
    lost, first = run.in_a_row("updates_lost", moved == 0 and bool(norm))
    return Reading(run.lasted(lost), 0.0, first, {"rate": run.value("learning_rate") or 0.0})


@condition(
    "baseline/spread", threshold=10.0, rows=True,
    sentence="Baselines explode: their spread is {value:.0f} times the usual one ({now:.3g} against {usual:.3g}).",
    cure="Check that step's rewards for outliers, and clip them{shrink}.",
)  # fmt: skip
def baselines_explode(run: Course) -> Reading | None:
    """A few rewards, or weights, have made baselines far larger than rewards are.

    It looks like a `baseline/spread` of ten times its median, wider than rewards of a prompt spread, and than half of
    the range of rewards between 0 and 1: that of a policy that learns some prompts first grows, too.
    """
    spread, rewards = run.value("baseline/spread"), run.columns.get("reward")
    if spread is None:
        return None
    spreads: list[float] = run.memory.setdefault("baselines_explode", [])  # in order
    usual = spreads[len(spreads) // 2] if len(spreads) >= WINDOW else math.inf
    bisect.insort(spreads, spread)
    if len(spreads) == SPARSE:
        del spreads[::2]
    if usual == 0 or spread <= (run.value("reward_std") or 0.0):  # most steps so far paid nothing, which is no scale
        return None
    if rewards and rewards.lowest >= 0 and rewards.highest <= 1 and spread <= 0.5:
        return None
    shrink = "" if run.facts.looks_across else ", or use the baseline oblr_shrunk"
    return Reading(spread / usual, 0.0, run.step, {"now": spread, "usual": usual, "shrink": shrink})


def n_snr(run: Course) -> tuple[float, float, int] | None:
    """N SNR over 20 steps, its standard error, and the first of the steps: of each batch's own signal and noise.

    The steps are those in which these were measured, which TRL's ledger does in some.
    """
    signal2, trace_cov, snr, of_batch = map(run.columns.get, ("signal2", "trace_cov", "snr", "n_snr"))
    prompts = run.facts.prompts or (of_batch.highest / snr.highest if of_batch and snr and snr.highest > 0 else 0)
    if not signal2 or not trace_cov or min(signal2.count, trace_cov.count) < run.long or not prompts:
        return None
    signal, noise = signal2.mean(run.long), trace_cov.mean(run.long)
    scale = prompts / noise.value if noise.value > 0 else 0.0
    return (scale * signal.value, scale * signal.stderr, signal.first) if scale else None


@condition(
    "signal2", "trace_cov", "reward", threshold=0.0, wrong=False, turns="+prompts",
    sentence="The batch is far below the critical batch: its N SNR is {n_snr:.2g} +- {margin:.1g}, less than 0.1.",
    cure="Nearly all of each gradient is noise: more prompts per step would pay off in full.",
)  # fmt: skip
def batch_far_below(run: Course) -> Reading | None:
    """The batch is so small that its gradient is nearly all noise.

    It looks like an N SNR below 0.1, surely, of the signal and the noise of 20 steps, while the task is not solved.
    Runs do learn so, slowly: nothing is wrong.
    """
    found = n_snr(run)
    if found is None or run.solved:
        return None
    value, stderr, first = found
    return Reading(0.1 - value, stderr, first, {"n_snr": value, "margin": 2 * stderr})


@condition(
    "signal2", "trace_cov", threshold=10.0, healthy=5.0, wrong=False, turns="-prompts",
    sentence="The batch is far above the critical batch: its N SNR is {value:.2g}.",
    cure="Half as many prompts per step would do nearly as well.",
)  # fmt: skip
def batch_far_above(run: Course) -> Reading | None:
    """The batch is larger than its gradient needs.

    It looks like an N SNR above 10 of the signal and the noise of 20 steps. It costs time and harms nothing.
    """
    found = n_snr(run)
    return Reading(*found, {}) if found else None
