"""Conditions that show in what the policy writes: its entropy, its lengths, how far it has gone from where it was."""

from __future__ import annotations

import math

from oblrpo.diagnosis.condition import TOO_LONG, Reading, changed, condition, log_ratio
from oblrpo.diagnosis.course import STALLED, Course


@condition(
    "entropy", "reward",
    threshold=math.log(10),
    sentence="Entropy has collapsed: it is {now:.3g} nats a token, and was {then:.3g} around step {step}.",
    cure=(
        "Completions of a prompt are nearly the same, and nothing new is tried: go back to a checkpoint before that, "
        "and lower the rate ({shorten}), raise temperature or epsilon_high, or take more varied prompts."
    ),
)  # fmt: skip
def entropy_collapsed(run: Course) -> Reading | None:
    """The policy has stopped exploring.

    It looks like a mean entropy at a tenth of its highest or less, while the reward has not risen since, or has stopped
    rising short of solving the task. An entropy that falls while the reward rises is learning, down to 0.02 nats a
    token: below that hardly anything is left to choose between.
    """
    now = run.now("entropy")
    past = run.past("entropy", now.first) if now else []
    if now is None or not past or run.solved:
        return None
    high = max(past)
    reference = run.last_beyond("entropy", now, 10.0) or high
    rising = run.reward_since(reference.last) >= STALLED and not run.stalled_since(reference.last)
    if rising and now.value > GONE:
        return None
    return log_ratio(high, now, now)


@condition(
    "entropy", "reward",
    threshold=math.log(2),
    sentence=(
        "Entropy has exploded: {now:.3g} nats a token, and {then:.3g} around step {step}; the reward does not rise."
    ),
    cure="The policy drifts to noise. " + TOO_LONG,
)  # fmt: skip
def entropy_exploded(run: Course) -> Reading | None:
    """The policy writes ever more at random.

    It looks like a mean entropy of twice its lowest or more, and half a nat above it, with no rise of the reward since.
    """
    reading = changed(run, "entropy", 0.5)
    return reading if reading and reading.words["now"] - reading.words["then"] >= 0.5 else None


GONE = 0.02  # nats a token
FAR = 1.0  # nats a token


@condition(
    "completions/mean_length", "reward",
    threshold=math.log(2),
    sentence="Completions run away: {now:.0f} tokens, and {then:.0f} around step {step}; the reward has not risen.",
    cure=(
        "Read the longest: do they repeat themselves? Reward the answer and not the length, mask or penalise what is "
        "cut, or take a loss that does not favour length (dr_grpo, or a sum over tokens)."
    ),
)  # fmt: skip
def length_runs_away(run: Course) -> Reading | None:
    """Completions become longer, and no better.

    It looks like a mean length of twice what it was, with no rise of the reward since. Length that brings reward is no
    illness.
    """
    return changed(run, "completions/mean_length", 0.5)


@condition(
    "completions/mean_length",
    "reward",
    threshold=math.log(2),
    sentence="Completions shrink: {now:.0f} tokens, and {then:.0f} around step {step}; the reward has not risen.",
    cure="Read some: is the answer still there? Check what the reward gives for an empty one. " + TOO_LONG,
)
def length_shrinks(run: Course) -> Reading | None:
    """Completions become shorter, and no better.

    It looks like a mean length of half of what it was or less, with no rise of the reward since.
    """
    return changed(run, "completions/mean_length", 2.0)


@condition(
    "completions/clipped_ratio",
    "reward",
    threshold=0.25,
    sentence="{value:.0%} of the completions are cut at the limit and judged as they stand.",
    cure="Raise max_completion_length, mask what is cut (TRL: mask_truncated_completions), or reward brevity.",
)
def truncation(run: Course) -> Reading | None:
    """Completions are cut before they end, and earn what half an answer earns.

    It looks like a mean `completions/clipped_ratio` above a quarter that was below a tenth before, or while the reward
    does not rise. Where all of them are cut from the first step on, the limit is meant (one line is asked for, say),
    and it is not told.
    """
    now = run.now("completions/clipped_ratio")
    if now is None:
        return None
    past = run.past("completions/clipped_ratio", now.first)
    if not past or min(past[0].value, now.value) >= 0.9 or run.solved:
        return None
    grown = min(past).value <= 0.1
    then = run.last_beyond("completions/clipped_ratio", now, 0.5) or past[0]
    if not grown and not run.stalled_since(then.last):
        return None
    return Reading(now.value, now.stderr, now.first, {})


@condition(
    "kl", "reward",
    threshold=math.log(3),
    sentence=(
        "The policy runs away from its reference: the KL penalty's term is {now:.3g} nats a token, and was {then:.3g} "
        "around step {step}."
    ),
    cure="Lower the rate ({shorten}), raise beta, or go back to a checkpoint before that.",
)  # fmt: skip
def kl_runs_away(run: Course) -> Reading | None:
    """The policy moves away from its reference and gets nothing for it.

    It looks like a mean `kl` of three times what it was, above 0.3 nats a token, with no rise of the reward since;
    above 1 nat a token whatever the reward does.
    """
    now = run.now("kl")
    if now is None or now.value < 0.3:
        return None
    return changed(run, "kl", 1 / 3, enough=3.0 if now.value >= FAR else math.inf)


@condition(
    "clip_ratio/region_mean",
    threshold=0.25,
    sentence="{value:.0%} of the tokens are clipped: most of each update's batch no longer counts.",
    cure="Make fewer updates a batch (num_iterations, steps_per_generation), or shorter ones: {shorten}.",
)
def clip_share(run: Course) -> Reading | None:
    """Updates go so far that the ratio leaves out much of the batch.

    It looks like a mean `clip_ratio/region_mean` above a quarter.
    """
    now = run.now("clip_ratio/region_mean")
    return Reading(now.value, now.stderr, now.first, {}) if now else None


@condition(
    "sampling/sampling_logp_difference/mean",
    threshold=1.0,
    sentence=(
        "Sampler and trainer are apart: log-probabilities of {what} differ by {apart:.2g} nats in the mean"
        "{bias}"
    ),
    cure=(
        "Bring the two closer (data type, vllm_args, the same weights), shorten completions, or correct it "
        "(sampler_correction truncated; TRL: vllm_importance_sampling_correction)."
    ),
)  # fmt: skip
def sampler_apart(run: Course) -> Reading | None:
    """The sampler draws from another policy than the one that is trained.

    It looks like a mean |log pi - log sampler| of two steps above 0.1 nats a completion where nothing corrects it,
    above 1 nat where importance weights do, and above 0.05 nats a token where only that is logged.
    """
    whole, token = "sampling/sequence_logp_difference/mean", "sampling/sampling_logp_difference/mean"
    corrected = run.facts.corrects_sampler
    key = whole if whole in run.columns else token
    limit = (1.0 if corrected else 0.1) if key == whole else 0.05
    now = run.now(key, 2)
    if now is None:
        return None
    truncated = run.value("sampling/truncated_ratio")
    bias = "." if truncated is None else f", and {truncated:.0%} of the importance weights are truncated, which biases."
    if corrected is False:
        bias = ", and nothing corrects it: the gradient is biased."
    what = "completions" if key == whole else "tokens"
    return Reading(now.value / limit, now.stderr / limit, now.first, {"what": what, "apart": now.value, "bias": bias})
