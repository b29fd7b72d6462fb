"""Conditions in which the reward is not the task: the reward is earned without the task, or at its expense."""

import math
import re

from oblrpo.diagnosis.condition import Reading
from oblrpo.diagnosis.course import SOLVED, STEADY, Course, Mean, spread_of
from oblrpo.diagnosis.of_rewards import still


def reward_without_accuracy(run: Course) -> Reading | None:
    """The reward rises and held-out accuracy does not: reward hacking, or memorized prompts.

    It looks like a reward that has risen since an evaluation, while accuracy has gained less than a quarter as much.
    Or a reward between 0 and 1 is earned nearly always, and accuracy is less than half of it.
    """
    evaluated, now = run.columns.get("eval/accuracy"), run.now("reward")
    if evaluated is None or now is None or evaluated.count < 4:
        return None
    points = evaluated.last
    width, few = max(2, len(points) // 4), len(points) < 8  # which may be close to one another by luck
    level = max(abs(evaluated.lowest), abs(evaluated.highest))
    spread = max(spread_of([value for _, value, _ in points]), 0.1 * level * few)
    late, worst = _mean(points[-width:], spread), None
    if run.bounded and now.value >= SOLVED:
        since = max((mean.last for mean in run.columns["reward"].windows if mean.value < SOLVED), default=0)
        if len(paid := [point for point in points if point[0] > since]) >= 4:
            right = _mean(paid, spread)
            words = {"reward": f"is {now.value:.3f}", "accuracy": f"is {right.value:.3f}"}
            worst = Reading(now.value / 2 - right.value, math.hypot(right.stderr, now.stderr / 2), right.first, words)
    for end in range(width, len(points) - width + 1):
        early = _mean(points[end - width : end], spread)
        then = run.past("reward", early.last + run.span)[-1:]
        if not then or then[-1].last < early.first or (evaluated.highest <= 1 and early.value >= 0.95):
            continue
        rise, gain = now.value - then[-1].value, late.value - early.value
        noise = math.hypot(late.stderr, early.stderr, now.stderr / 4, then[-1].stderr / 4)
        if now.above(then[-1]) >= STEADY and (worst is None or rise / 4 - gain > worst.value):
            risen = f"has risen by {rise:.3f} since {run.facts.unit} {early.last}"
            words = {"reward": risen, "accuracy": f"by {gain:+.3f}"}
            worst = Reading(rise / 4 - gain, noise, early.last, words)
    return worst


SURE_OF_SWAPS = 3.0  # standard errors
GAINED = 0.1  # of the range of rewards: a gain in held-out accuracy that is worth a question


def prompt_not_read(run: Course) -> Reading | None:
    """Held-out completions earn as much as answers to other prompts: the reward is earned without reading the prompt.

    It looks like a held-out accuracy that has gained a tenth of the range of rewards since the first measurement, while
    what the same completions lose when they are graded as answers to other prompts (`eval/swap_loss`) has surely gained
    less than a quarter of that. The newest measurement counts. Nothing is said of rewards that pay every completion the
    same whatever the prompt was.
    """
    keys = [f"eval/{key}" for key in ("accuracy", "accuracy_stderr", "swap_loss", "swap_loss_stderr")]
    if not run.logged.keys() >= {*keys}:
        return run.memory.get("prompt_not_read")
    now, noise_now, last, error_now = (run.logged[key] for key in keys)
    since, before, noise, first, error = run.memory.setdefault(keys[0], (run.step, now, noise_now, last, error_now))
    reading = None
    if since < run.step and (error or error_now) and (rewards := run.columns.get("reward")):
        low, high = (run.columns.get(key, rewards) for key in ("reward_min", "reward_max"))
        if now - before >= GAINED * (high.highest - low.lowest):
            excess = (now - before) / 4 - (last - first)
            stderr = math.hypot(error, error_now, noise / 4, noise_now / 4)
            earlier = run.memory.get("prompt_not_read")
            held = earlier if earlier and earlier.value >= SURE_OF_SWAPS * earlier.stderr else None
            words = {"before": before, "now": now, "other": now - last}
            words |= {"found": held.words["found"] if held else run.step}
            reading = Reading(excess, stderr, since, words)
    run.memory["prompt_not_read"] = reading
    return reading


def _mean(points: list[tuple[int, float, float]], spread: float) -> Mean:
    """The mean of some evaluations, one of which has the deviation `spread`, or what was measured of it."""
    n, errors = len(points), math.hypot(*(error for *_, error in points)) / len(points)
    value = math.fsum(value for _, value, _ in points) / n
    return Mean(value, max(spread / math.sqrt(n), errors), points[0][0], points[-1][0])


def parts(run: Course) -> dict[str, Mean]:
    """The means of the single rewards that are summed, by name, where a log has several."""
    means = {
        key.removeprefix("rewards/").removesuffix("/mean"): mean
        for key in run.columns
        if key.startswith("rewards/") and key.endswith("/mean") and (mean := run.now(key))
    }
    return means if len(means) > 1 else {}


TASK = re.compile(r"correct|accura|answer|task|solve|pass|right|math|exact|numeric|contains", re.IGNORECASE)


def task_traded(run: Course) -> Reading | None:
    """The task's reward falls while other rewards make up for it: reward hacking.

    It looks like a column `rewards/NAME/mean`, with a name such as correct, accuracy or answer, that has lost a quarter
    of its best value while `reward` has risen since then.
    """
    for part, now in parts(run).items():
        past = run.past(f"rewards/{part}/mean", now.first) if TASK.search(part) else []
        best = max(past, default=now)
        if best.value > 0 and now.value < best.value and STEADY <= run.reward_since(best.last) < math.inf:
            words = {"part": part, "best": best.value, "now": now.value, "then": best.last}
            noise = math.hypot(best.stderr, now.stderr) / best.value
            return Reading(1 - now.value / best.value, noise, best.last, words)
    return None


def format_saturated(run: Course) -> Reading | None:
    """One of several rewards, often the format's, is earned by nearly all completions, and another is not learned.

    It looks like one column `rewards/NAME/mean` at nine tenths of its highest or more for 80 steps, and another that is
    low and surely does not rise, as in "no progress", or that has never changed.
    """
    means = parts(run)
    found: Reading | None = None
    for done, high in means.items():
        most, before = run.columns[f"rewards/{done}/mean"].highest, run.past(f"rewards/{done}/mean", high.first)
        for open_, low in means.items():
            if open_ == done or most <= 0 or (found and 1 - low.value / most <= found.value):
                continue
            key = f"rewards/{open_}/mean"
            constant = run.columns[key].lowest == run.columns[key].highest
            patient = math.ceil(LASTING / run.span) - 1 if constant else PATIENT
            past = before[-patient:]
            earned = len(past) == patient and min(mean.value for mean in (*past, high)) >= SATURATED * most
            slow = earned and not constant and still(run, PATIENT, key)
            if earned and (constant or (slow and slow.value >= 3 * slow.stderr)):
                words = {"done": done, "high": high.value, "open": open_, "low": low.value}
                noise = math.hypot(low.stderr, high.stderr) / most
                found = Reading(1 - low.value / most, noise, (*past, high)[0].first, words)
    return found


PATIENT = 7  # windows in which one reward was earned and the other did not rise
LASTING = 80  # steps in which it did not even change
SATURATED = 0.9
