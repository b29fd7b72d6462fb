"""Conditions that show in the updates: gradients, the learning rate, baselines and the batch."""

import bisect
import math
import statistics
from collections import deque
from itertools import pairwise

from oblrpo.diagnosis.condition import Reading
from oblrpo.diagnosis.course import SPARSE, WINDOW, Course


def not_finite(run: Course) -> Reading | None:
    """Numbers have overflowed.

    It looks like NaN or infinity in the log, or a step that `oblrpo train` has skipped for that reason (`skipped` is
    1), without changing anything.
    """
    skipped = run.value("skipped")
    return None if skipped is None else Reading(skipped, 0.0, run.step, {"step": run.step, "what": run.overflow})


def loss_of_zero(run: Course) -> Reading | None:
    """The loss of GRPO and its relatives is 0, and the policy learns anyway.

    It looks like a `loss` of exactly 0 in every row, at least three, with a `grad_norm` above 0.
    """
    loss, norm = run.columns.get("loss"), run.columns.get("grad_norm")
    if not loss or not norm or loss.lowest or loss.highest or norm.highest <= 0:
        return None
    return Reading(loss.count, 0.0, run.memory.setdefault("loss_of_zero", run.step), {})


def without_gradient(run: Course, differing: bool) -> Reading | None:
    """How many rows in a row have no gradient, as a share of three; in them, rewards of a prompt differ, or not."""
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
    return Reading(rows / min(3, run.facts.row_count or 3), 0.0, first, words)


def gradient_spikes(run: Course) -> Reading | None:
    """Single batches move the policy far more than the others.

    It looks like a `grad_norm` of ten times the median of the 50 steps before, and far outside their spread, in three
    of the last 100 steps. A single step is enough if it is 30 times the median.
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


def rate_collapsed(run: Course) -> Reading | None:
    """The learning rate has collapsed, and with it learning.

    It looks like a rate (or, with a schedule that follows the signal, `lr_factor`) at one hundredth of its highest or
    less for ten steps and for a tenth of the run. No cosine or linear decay stays that low for so long.
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


def rate_oscillates(run: Course) -> Reading | None:
    """An adaptive rate overshoots and corrects itself, again and again.

    It looks like a rate that over 20 steps changes by a factor of two or more, up and down nearly every time.
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


def updates_lost(run: Course) -> Reading | None:
    """Updates are too small for the weights' data type.

    It looks like a `step_kl` of exactly 0 in ten steps that have a gradient.
    """
    moved, norm = run.value("step_kl"), run.value("grad_norm")
    if moved is None or norm is None:
        return None
    rows, first = run.in_a_row("updates_lost", moved == 0 and bool(norm))
    return Reading(run.lasted(rows), 0.0, first, {"rate": run.value("learning_rate") or 0.0})


def steps_too_short(run: Course) -> Reading | None:
    """Steps stay far shorter than intended: the policy stands still though there is something to learn.

    It looks like a `step_kl` below a hundredth of `step_kl_target` for ten steps and a quarter of the run (a cosine
    decay does this in its last fifth). The rate has not doubled since, as a run's first rates do. Entropy is above a
    tenth of its highest, since a policy that is sure of all it writes cannot be moved. One that earns nine tenths of
    rewards between 0 and 1 need not move.
    """
    moved, meant, rate, entropy = map(run.value, ("step_kl", "step_kl_target", "learning_rate", "entropy"))
    if moved is None or not meant or rate is None or entropy is None:
        return None
    begun = run.memory.setdefault("rate_before", rate)
    sure = run.solved or entropy <= 0.1 * run.columns["entropy"].highest
    rows, first = run.in_a_row("steps_too_short", moved < 0.01 * meant and rate < 2 * begun and not sure)
    if not rows:
        run.memory["rate_before"] = rate
    lasted = run.lasted(rows) if rows >= 0.25 * run.columns["step_kl"].count else 0
    return Reading(lasted, 0.0, first, {"moved": moved, "meant": meant})


def baselines_explode(run: Course) -> Reading | None:
    """A few rewards, or weights, have made baselines far larger than the rewards.

    It looks like a `baseline/spread` of ten times its median, and larger than the spread of a prompt's rewards. With
    rewards between 0 and 1 it must also be above 0.7, because it grows in a policy that learns some prompts first, too.
    """
    spread = run.value("baseline/spread")
    if spread is None:
        return None
    spreads: list[float] = run.memory.setdefault("baselines_explode", [])  # in order
    usual = spreads[len(spreads) // 2] if len(spreads) >= WINDOW else math.inf
    bisect.insort(spreads, spread)
    if len(spreads) == SPARSE:
        del spreads[::2]
    if usual == 0 or spread <= (run.value("reward_std") or 0.0):  # most steps so far paid nothing, which is no scale
        return None
    if run.bounded and spread <= math.sqrt(0.5):  # of two prompts, the greatest
        return None
    shrink = "" if run.facts.looks_across else ", or use the baseline oblr_shrunk"
    return Reading(spread / usual, 0.0, run.step, {"now": spread, "usual": usual, "shrink": shrink})


def n_snr(run: Course, less_than: float | None = None) -> Reading | None:
    """N SNR over 20 steps of each batch's own signal and noise, or by how much it is less than a limit.

    The steps are those in which these were measured, which TRL's ledger does in some.
    """
    signal2, trace_cov, snr, of_batch = map(run.columns.get, ("signal2", "trace_cov", "snr", "n_snr"))
    prompts = run.facts.prompts or (of_batch.highest / snr.highest if of_batch and snr and snr.highest > 0 else 0)
    if not signal2 or not trace_cov or min(signal2.count, trace_cov.count) < run.long or not prompts:
        return None
    signal, noise = signal2.mean(run.long), trace_cov.mean(run.long)
    scale = prompts / noise.value if noise.value > 0 else 0.0
    if not scale or (less_than is not None and run.solved):
        return None
    value, stderr = scale * signal.value, scale * signal.stderr
    words = {"n_snr": value, "margin": 2 * stderr}
    return Reading(value if less_than is None else less_than - value, stderr, signal.first, words)
