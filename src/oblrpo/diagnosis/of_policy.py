"""Conditions that show in what the policy writes: its entropy, its lengths, how far it has gone from where it was."""

import math
from collections import deque

from oblrpo.diagnosis.condition import SURE, TINY, Reading, log_ratio
from oblrpo.diagnosis.course import SOLVED, STALLED, STEADY, WINDOW, Course
from oblrpo.diagnosis.of_rewards import silent

NEARLY_ALL = 0.9  # the share of completions cut from which on none of them ends
NOTHING, AT_ONCE = (0.1, 0.9), (0.005, 0.98)  # next to no reward, and the share of silent prompts that means so
NO_ENTROPY = 0.02  # nats a token: next to nothing is left to choose between


def entropy_collapsed(run: Course) -> Reading | None:
    """The policy has stopped exploring.

    It looks like a mean entropy at a tenth of its highest or less, while the reward has not risen since, or has stopped
    rising before the task is solved. Half of its highest is enough if the reward has not risen at all and meanwhile
    prompts have fallen silent (`frac_reward_zero_std` from below 0.7 to above). An entropy that falls while the reward
    rises is learning, unless it is below 0.02 nats a token, where hardly any choice is left.
    """
    now = run.now("entropy")
    past = run.past("entropy", now.first) if now else []
    if now is None or not past or run.solved:
        return None
    high = max(past)
    reference = run.last_beyond("entropy", now, 10.0) or high
    rising = run.reward_since(reference.last) >= STALLED and not run.stalled_since(reference.last)
    if rising and now.value > NO_ENTROPY:
        return None
    reading = log_ratio(run, "entropy", high, now, falls=True)
    reward, agreed = run.now("reward"), silent(run, after_rise=False)
    share, row = run.columns.get("frac_reward_zero_std"), run.facts.every >= WINDOW  # is as long as a window
    begun = (share.lowest if row else share.windows[0].value) if share and agreed else 1.0
    silenced = agreed and begun < 0.7 <= agreed.value
    if not silenced or not reward or reward.above(run.columns["reward"].windows[0]) >= STEADY:
        return reading
    wider = math.log(10) / math.log(2)
    return reading._replace(value=wider * reading.value, stderr=wider * reading.stderr)


def policy_collapsed(run: Course) -> Reading | None:
    """The policy has suddenly lost everything that it could do, and writes something else.

    It looks like rewards that are all the same from some step on and lower than any before, while completions have
    changed since before the fall: their entropy has grown by a third or halved, their length has doubled or halved, or
    `kl` has doubled. If only the reward breaks, these stay as they were.
    """
    now, rewards = run.outages.now, run.columns.get("reward")
    if now is None or rewards is None or not rewards.kept or not run.outages.lasts or now.steps > 2 * run.window:
        return None
    if run.row.get("completions/mean_length", 1.0) < 1:  # no policy writes nothing: the token that ends it counts
        return None
    good = [step for step, value, _ in rewards.kept if 2 * value >= rewards.highest + now.earned]
    if not rewards.highest > now.earned <= rewards.lowest or not good or now.first - good[-1] > 3 * run.span:
        return None  # it has not fallen to the bottom, or has long before
    last = good[-1]
    found: list[Reading] = []
    for key, (what, floor, *limits) in SHOWS.items():
        column = run.columns.get(key)
        before = [value for step, value, _ in column.kept if step <= last][-3:] if column and key in run.row else []
        if column and before:
            then, after = math.fsum(before) / len(before) + floor, run.now(key, run.rows(5)) or column.mean()
            noise = after.stderr * math.hypot(math.sqrt(run.rows(5) / len(before)) / then, 1 / (after.value + floor))
            far = math.log((after.value + floor) / then)
            limit = math.log(limits[far < 0])
            words = {"earned": now.figure, "first": now.first, "what": what, "now": after.value, "then": then - floor}
            found.append(Reading(abs(far) / limit, noise / limit, last + 1, words | {"step": last}))
    return max(found, key=lambda reading: reading.value - SURE * reading.stderr, default=None)


SHOWS = {"entropy": ("entropy", 0.1, 4 / 3, 2.0), "completions/mean_length": ("length", 1.0, 2.0, 2.0),
         "kl": ("KL", 0.1, 2.0, math.inf)}  # fmt: skip
"""What shows that a policy has become another: its name in words, what is next to nothing of it, and how many times as
much or as little is another."""


def all_truncated(run: Course) -> Reading | None:
    """Nearly every completion is cut off before its answer, so nothing can be earned.

    It looks like a `completions/clipped_ratio` of nine tenths or more from the first step on, over 5 steps, while all
    completions earn the same, or a mean reward between 0 and 1 is below 0.005 (for other rewards: 98 % of the prompts
    are silent). After 20 steps without a rise, a mean reward below 0.1 (nine tenths of the prompts) is enough. If more
    than that was earned before all completions earned the same, it is an outage instead. A policy built from scratch
    hardly ever ends an answer, and learns anyway. If answers of fixed length earn something, the limit is intended.
    """
    key, rewards = "completions/clipped_ratio", run.columns.get("reward")
    if (value := run.value(key)) is None:
        return None
    begun, first = run.memory.setdefault("all_truncated", (value, run.step))
    now, reward, share = (run.now(each, run.rows(5)) for each in (key, "reward", "frac_reward_zero_std"))
    if begun < NEARLY_ALL or now is None or run.solved or _earned(run):
        return None
    nothing = run.outages.lasts
    if rewards and reward and not nothing and (not rewards.windows or reward.above(rewards.windows[0]) < STALLED):
        late = run.now("reward") if rewards.count >= run.long else None
        least, silenced = NOTHING if late and late.above(rewards.windows[0]) < 1 else AT_ONCE
        nothing = reward.value <= least if run.bounded else share is not None and share.value >= silenced
    return Reading(now.value, 0.0, first, {}) if nothing else None


def _earned(run: Course) -> bool:
    """Whether more than next to nothing was earned in any window, or in the few steps before all earned the same."""
    rewards = run.columns.get("reward")
    if rewards is None or not rewards.count:
        return False
    column = rewards if run.bounded else run.columns.get("frac_reward_zero_std")
    means = [mean.value for mean in (*column.windows, column.mean())] if column and column.count else [0.0]
    return max(means) > NOTHING[0] if run.bounded else min(means) < NOTHING[1]


def one_answer(run: Course, paid: bool) -> Reading | None:
    """How much the policy says the same whatever the prompt, where that pays or does not; from 1 on it does so."""
    same, token, length = (run.now(key) for key in (SAME, TOKEN, "completions/mean_length"))
    if same is None:
        logged = SAME in run.columns or SAME in run.empty
        return None if paid or logged else _earns_the_same(run)
    shown = "completions to different prompts are the same text in {:.0%} of all pairs"
    found = [(same.value / ONE_TEXT, SAME, same, shown)]
    if paid and token and length and length.value >= FEW_TOKENS and not _follows_answers(run, same.value):
        found.append((token.value / ONE_TOKEN, TOKEN, token, "{:.0%} of all tokens are one and the same"))
    value, key, now, shown = max(found)
    begun, earned, pays = _pay(run)
    if pays is not paid or math.isnan(earned):
        return None
    then = min((mean.value for mean in run.past(key, now.first)), default=0.0)
    words = {"key": key, "now": now.value, "then": then, "begun": begun, "earned": earned}
    words["shown"] = shown.format(now.value) + ("" if paid else f", and earn {earned:.3g} on average")
    return Reading(value, value * now.stderr / max(now.value, TINY), now.first, words)


SAME, TOKEN = "completions/same_ratio", "completions/commonest_token_ratio"
ONE_TEXT, ONE_TOKEN = 0.8, 0.9  # the share of pairs that are one text, of tokens that are one: from there on all are
FEW_TOKENS = 5  # completions of fewer are a word, and may be of one token


def _follows_answers(run: Course, same: float) -> bool:
    """Whether texts are told apart by answers, as right ones of one letter are: at random c^2 of the pairs agree."""
    commonest = run.now("completions/commonest_ratio")
    return commonest is not None and commonest.value >= 0.1 and same < commonest.value**2 / 2


def _pay(run: Course) -> tuple[float, float, bool]:
    """What is earned at first and now, and whether that is a surely risen nine tenths of what was ever earned."""
    rewards, now, alike = run.columns.get("reward"), run.now("reward"), run.outages.now
    earned = now.value if now else alike.earned if alike else math.nan
    if rewards is None or not rewards.count or math.isnan(earned):
        return math.nan, math.nan, False
    begun = rewards.windows[0] if rewards.windows else rewards.mean()
    low, high = (run.columns.get(key, rewards) for key in ("reward_min", "reward_max"))
    bottom, top = min(rewards.lowest, low.lowest), max(rewards.highest, high.highest, earned)
    risen = earned - begun.value > SURE * math.hypot(begun.stderr, now.stderr if now else 0.0)
    solved = run.outages.solved is not None
    return begun.value, earned, solved or (risen and earned - bottom >= SOLVED * (top - bottom))


def _earns_the_same(run: Course) -> Reading | None:
    """The share of the last 30 steps in which all earned the same and were as long, of which there are most."""
    now, length = run.outages.now, run.value("completions/mean_length")
    agreed = now is not None and now.shown and now.last == run.step
    answers = run.memory.setdefault("one_answer", deque(maxlen=3 * WINDOW))
    answers.append((now.figure, length) if now and agreed and length else None)
    if answers[-1] is None or len(answers) < 3 * WINDOW or run.solved or run.outages.solved:
        return None
    lengths, (earned, length) = run.columns["completions/mean_length"], answers[-1]
    many = answers.count(answers[-1]) if lengths.lowest < lengths.highest else 0
    shown = f"in {many} of the last {run.said(len(answers))} all earned {earned}, with {length:.4g} tokens"
    since = run.step - len(answers) * run.facts.every + 1
    return Reading(2 * many / len(answers), 0.0, since, {"shown": shown})


def far_at_once(run: Course) -> Reading | None:
    """The policy is far from its reference, or its gradient is huge, before updates could have caused that.

    It looks like a `kl` of 100 in the first ten steps (a policy begins at 0, and 100 nats a token are more than a
    model's logits span), or a `grad_norm` of 100,000, a hundred times the norm of a sum over a thousand tokens.
    """
    if run.count > run.window:
        return None
    far = {f"{it} was {now:,.0f}": now / top for key, (it, top) in VAST.items() if (now := run.value(key) or 0) >= top}
    return Reading(max(far.values()), 0.0, run.step, {"step": run.step, "shown": " and ".join(far)}) if far else None


VAST = {"kl": ("KL", 100.0), "grad_norm": ("the gradient's norm", 1e5)}  # which no policy shows that has just begun


def truncation(run: Course) -> Reading | None:
    """Completions are cut off before they end, and earn what half an answer earns.

    It looks like a mean `completions/clipped_ratio` above a quarter that was below a tenth before, or while the reward
    does not rise. Where nine tenths are cut off from the first step on, it is "all truncated", or intended.
    """
    now = run.now("completions/clipped_ratio")
    if now is None:
        return None
    past = run.past("completions/clipped_ratio", now.first)
    if not past or min(past[0].value, now.value) >= NEARLY_ALL or run.solved:
        return None
    grown = min(past).value <= 0.1
    then = run.last_beyond("completions/clipped_ratio", now, 0.5) or past[0]
    if not grown and not run.stalled_since(then.last):
        return None
    return Reading(now.value, now.stderr, now.first, {})


def sampler_mismatch(run: Course) -> Reading | None:
    """The sampler draws from a different policy than the one that is trained.

    It looks like a mean |log pi - log sampler| over two steps above 0.1 nats a completion where nothing corrects for
    it, above 1 nat where importance weights do, and above 0.05 nats a token where only that is logged.
    """
    per_completion, per_token = "sampling/sequence_logp_difference/mean", "sampling/sampling_logp_difference/mean"
    corrected = run.facts.corrects_sampler
    key = per_completion if per_completion in run.columns else per_token
    limit = (1.0 if corrected else 0.1) if key == per_completion else 0.05
    now = run.now(key, 2)
    if now is None:
        return None
    truncated = run.value("sampling/truncated_ratio")
    bias = "." if truncated is None else f", and {truncated:.0%} of the importance weights are truncated, a bias."
    if corrected is False:
        bias = ", and nothing corrects for it: the gradient is biased."
    what = "completions" if key == per_completion else "tokens"
    return Reading(now.value / limit, now.stderr / limit, now.first, {"what": what, "apart": now.value, "bias": bias})
