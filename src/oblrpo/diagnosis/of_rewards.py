"""Conditions that show in rewards: nothing is learned, something is lost, or something else is learned."""

import math
import statistics
from operator import attrgetter

from oblrpo.diagnosis.condition import SURE, Reading, compared, log_ratio
from oblrpo.diagnosis.course import FEWEST, STALLED, WINDOW, Course

LOST = 0.3  # the share of the best reward that is gone when it has fallen
NEEDED_RISE = 0.25  # of what rewards of a prompt spread
OUTLYING = 100
"""How many times as far as usual an outlying reward lies. One in 128 at 80, 100, 160, 240 or 800 middle halves held up
1, 0, 3, 8 and 10 of 10 runs of a bigram policy; of honest rewards the farthest lay 81 off (`lab.alarms.uneven`)."""
SUCCESS = 10  # what a rare success may pay, however little else differs
PLENTY = 20  # times what rewards of a prompt spread, 1 / (p sqrt(G)): of one completion in fifty, with G = 6
PATIENCE = 10  # windows after which a reward that has not risen is wrong


def same_reward(run: Course) -> Reading | None:
    """Every completion earns the same, whatever it says: the reward is down or broken, or prompts are too hard.

    It looks like one and the same reward, of any size, for all completions of five steps in a row (more where such
    steps are common; 20 where a log has only the mean). The lowest and the highest reward show it, or `reward_std` and
    `reward_stderr`. Such steps are left out of all other means of rewards. What is found in them, or within twenty
    steps after, is listed under this condition as a consequence, and needs no separate fix.
    """
    reported, known = run.outages.reported, run.memory.get("same_reward")
    if not reported or (known and known.words["until"] == reported[-1].last and known.value == len(reported)):
        return known if reported else None
    words = {"earned": str(run.outages), "found": reported[0].found, "until": reported[-1].last}
    reading = run.memory["same_reward"] = Reading(len(reported), 0.0, reported[0].first, words)
    return reading


def solved(run: Course) -> Reading | None:
    """The task is learned: all completions earn the highest reward.

    It looks like "same reward", at the highest reward of the run. Rewards must have approached it step by step, or
    held-out accuracy that was measured then must be above 0.9 or have risen, too. A sudden jump does not count.
    """
    now = run.outages.solved
    words = {"earned": now.figure, "since": now.first, "found": now.found, "until": now.last} if now else {}
    return Reading(1, 0.0, now.first, words) if now else None


def outlying_reward(run: Course) -> Reading | None:
    """A few rewards lie far beyond all others, and drown them in noise.

    It looks like a reward whose distance from the mean of its step is more than 10, is 100 times the widest span of the
    middle half of any step's rewards (`reward_iqr`; if that is 0 or not logged, 100 times the distance of any earlier
    reward), and is 20 times the usual spread of a prompt's rewards. So a success that pays up to 10, or that one
    completion in fifty has, does not count. Such a step enters no mean of rewards. A log without lowest and highest
    reward shows only the worst cases: a `reward_std` that differs from the median of the last 50 by more than 10 and by
    20 times their highest; without it, a mean that differs by more than 10 and by 100 times their range, 0 included.
    """
    known: Reading | None = run.memory.get("outlying_reward")
    new = (_of_ends if "reward_max" in run.row else _of_means)(run) if "reward" in run.row else None
    if new and new.value >= OUTLYING:
        many, since = (known.words["many"] + 1, known.since) if known else (1, run.step)
        worst = max(known or new, new, key=attrgetter("value"))
        often = f", {many} times since {run.facts.unit} {since}" if known else ""
        words = worst.words | {"found": since, "until": run.step, "many": many, "often": often}
        known = run.memory["outlying_reward"] = Reading(worst.value, 0.0, since, words)
        for key in (key for key in run.columns if key.startswith("reward") and key != "reward_iqr"):
            run.columns[key].forget(run.step)
    return known


def _of_ends(run: Course) -> Reading | None:
    """How many times farther from the mean than usual the farthest reward of a step lies, if it is one of few."""
    reward, high, low = run.row["reward"], run.row["reward_max"], run.row.get("reward_min", run.row["reward"])
    far, (rows, reach) = max(high - reward, reward - low), run.memory.get("reach", (0, 0.0))
    middle, spread = run.columns.get("reward_iqr"), run.columns.get("reward_std")
    usual = (middle.highest if middle else 0.0) or (reach if rows >= WINDOW else 0.0)
    if far <= SUCCESS or not 0 < OUTLYING * usual <= far:
        run.memory["reach"] = rows + 1, max(reach, far)
        return None
    within = [value for _, value, _ in spread.last] if spread else []
    out = f"range from {low:.3g} to {high:.3g}, {far / usual:.3g} times as far from their mean as usual"
    words = {"shown": f"those of {run.facts.unit} {run.step} {out}"}
    return Reading(far / usual, 0.0, run.step, words) if far >= PLENTY * statistics.median(within or [0.0]) else None


def _of_means(run: Course) -> Reading | None:
    """How many times as far from the last 50 as these from one another and from 0 a step's spread, or mean, lies."""
    key, what, least = ("reward_std", "spread", PLENTY) if "reward_std" in run.row else ("reward", "mean", OUTLYING)
    now, column = run.row[key], run.columns[key]
    if max(now - column.lowest, column.highest - now) <= SUCCESS:
        return None
    *before, _ = (value for _, value, _ in column.last)
    if len(before) < WINDOW:
        return None
    low, usual, high = min(before), statistics.median(before), max(before)
    scale, far = max(high - low, -low, high), abs(now - usual)
    if not scale or far <= SUCCESS:
        return None
    others = f"in the {len(before)} before it was between {low:.3g} and {high:.3g}"
    words = {"shown": f"the {what} of {run.facts.unit} {run.step} was {now:.3g}; {others}"}
    return Reading(run.facts.every * far / scale * OUTLYING / least, 0.0, run.step, words)  # of one of the row's steps


def reward_fell(run: Course) -> Reading | None:
    """The policy has lost what it could do.

    It looks like a mean reward over 10 steps that has lost three tenths of the best such mean, or half of what had
    been gained by then, if that was a lot. The most common cause is a step that was too long.
    """
    now = run.now("reward")
    past = run.past("reward", now.first) if now else []
    if now is None or not past:
        return None
    best = max(past)
    gained = best.value - min(mean.value for mean in past if mean.last <= best.last)
    level = abs(best.value)
    scale = max(level, gained) if not 0.3 * level <= gained <= level else min(level, gained / 0.6)
    if not scale or best.value - now.value < LOST * scale:
        return None
    noise, sure = compared(run, "reward", best, now)
    noise = math.hypot(max(noise, best.stderr), max(noise, now.stderr))
    words = {"now": now.value, "then": best.value, "step": best.last}
    return Reading((best.value - now.value) / scale, noise / scale, now.first, words, sure)


def groups_of_one(run: Course) -> Reading | None:
    """Advantages equal the rewards: in a group of one, no completion is compared with another.

    It looks like verl's `critic/advantages/mean` lying within a tenth of the mean reward, on average over all steps, at
    least three. If completions of a prompt were compared, advantages would be 0 on average.
    """
    advantage, reward = run.value("critic/advantages/mean"), run.value("reward")
    if advantage is None or reward is None:
        return None
    rows, gaps, size, first = run.memory.get("groups_of_one", (0, 0.0, 0.0, run.step))
    rows, gaps, size = rows + 1, gaps + abs(advantage - reward), size + abs(reward)
    run.memory["groups_of_one"] = rows, gaps, size, first
    enough = size and rows >= min(FEWEST, run.facts.row_count or FEWEST)
    return Reading(1 - gaps / size, 0.0, first, {"rows": run.said(rows)}) if enough else None


def used_up(run: Course) -> bool:
    """Whether the reward has once risen to most of what prompts pay: three quarters, where it lies between 0 and 1.

    Where the most that they pay is not known, it is by more than rewards of a prompt ever spread.
    """
    column, spread = run.columns["reward"], run.columns.get("reward_std")
    begun, best = column.windows[0], max(column.windows)
    if best.above(begun) < SURE:
        return False
    if run.bounded:
        return best.value >= 0.75
    most = max((mean.value for mean in spread.windows), default=0.0) if spread else abs(begun.value)
    return best.value - begun.value >= 1.1 * most


def silent(run: Course, after_rise: bool) -> Reading | None:
    """The share of prompts that say nothing, where the reward no longer rises, after it has risen or without that."""
    share, reward = run.now("frac_reward_zero_std", run.long), run.now("reward")
    if run.facts.looks_across or share is None or reward is None or run.columns["reward"].count < run.rows(6 * WINDOW):
        return None
    if not run.stalled_since(share.first - 4 * run.span) or after_rise != used_up(run):
        return None
    best = max([reward.value, *(mean.value for mean in run.columns["reward"].windows)])
    which = "easy or too hard" if not run.bounded or best >= 0.5 > reward.value else "easy" if best >= 0.5 else "hard"
    return Reading(share.value, share.stderr, share.first, {"reward": reward.value, "which": which})


def still(run: Course, fewest: int, key: str = "reward") -> Reading | None:
    """How far a reward has stayed below the rise it should have, over `fewest` windows (2 if it stays the lowest)."""
    now, windows = run.now(key), run.past(key, run.step + 1)
    n = len(windows)
    if now is None or n < 2 or run.solved:
        return None
    noise = math.sqrt(math.fsum(mean.stderr**2 for mean in windows) / n)
    least = run.columns.get("reward_min")
    if n < fewest and (noise or any(mean.value != (least.lowest if least else 0.0) for mean in windows)):
        return None  # a constant that is not the lowest may be rounded, of a course or of a solved task
    squares = n * (n * n - 1) / 12  # of the places of windows, from the middle one
    slope = math.fsum((place - (n - 1) / 2) * mean.value for place, mean in enumerate(windows)) / squares
    rise, stderr = slope * (n - 1), noise / math.sqrt(squares) * (n - 1)
    spread, top = run.now(key.replace("/mean", "/std")) if key != "reward" else None, run.columns.get("reward_max")
    spread = spread or run.now("reward_std")
    needed = NEEDED_RISE * (spread.value if spread else abs(windows[0].value) or (top.highest if top else 0.0))
    best = max(windows)
    risen = best.value - windows[0].value >= needed and best.above(windows[0]) >= SURE  # once, and a line shows no step
    if not needed > 0 or risen or (rise > 0 and rise >= STALLED * stderr):
        return None
    patience = ""
    if slope > 0 and noise:
        rows = math.ceil(run.window * (12 * (3 * noise / slope) ** 2) ** (1 / 3))
        patience = f" At the present trend a rise would show after about {run.said(rows)} in all."
    words = {"steps": run.said(run.columns[key].count), "rise": rise, "margin": 2 * stderr, "needed": needed}
    return Reading(needed - rise, stderr, windows[0].first, words | {"patience": patience})


def no_progress_yet(run: Course) -> Reading | None:
    """Nothing is learned so far, and noise does not explain that.

    It looks like "no progress", after 40 steps or more, but fewer than 100. Many runs begin this way.
    """
    column = run.columns.get("reward")
    reading = still(run, 4) if column and column.count < PATIENCE * run.window else None
    words = {"enough": run.said(PATIENCE * run.window)}
    return reading._replace(words=reading.words | words) if reading and reading.stderr else None


def rewards_agree(run: Course) -> Reading | None:
    """The rewards of a prompt's completions become more and more alike before the task is solved.

    It looks like a mean `reward_std` at a fifth of its highest or less, while the reward has stopped rising. Only logs
    without `frac_reward_zero_std`, which shows it better, are checked for it.
    """
    now = run.now("reward_std")
    past = run.past("reward_std", now.first) if now and run.now("frac_reward_zero_std") is None else []
    high = max(past, default=None)
    if now is None or high is None or run.facts.looks_across or not run.stalled_since(high.last):
        return None
    return None if run.solved or used_up(run) else log_ratio(run, "reward_std", high, now, falls=True)


def rewards_missing(run: Course) -> Reading | None:
    """The reward function fails on many completions, which are then left out of training.

    It looks like a mean `completions/masked_ratio` above a tenth over 10 steps, a step in which no completion has a
    reward, or one that made no update because too few have.
    """
    share, column = run.value("completions/masked_ratio"), run.columns.get("completions/masked_ratio")
    if share == 1 or (run.value("frac_prompts_masked") == 1 and not run.value("skipped")):
        return Reading(share or 1.0, 0.0, run.step, {"many": run.said(1), "update": " No update was made."})
    now = run.now("completions/masked_ratio")
    if not share or column is None or now is None:
        return None
    since = next(step for step, missing, _ in column.last[-run.window :] if missing)
    return Reading(now.value, now.stderr, since, {"many": run.said(run.window), "update": ""})
