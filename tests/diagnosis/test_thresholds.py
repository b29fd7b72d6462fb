"""Every condition just inside and just outside of each of its thresholds: levels without noise, and the noise."""

import math

import pytest

from oblrpo.diagnosis import CONDITIONS, Facts, Watch

WELL = {"reward": 0.3, "reward_std": 0.4, "frac_reward_zero_std": 0.2, "grad_norm": 1.0, "loss": 0.01, "entropy": 1.0}
CUT, LENGTH, SAMPLED = "completions/clipped_ratio", "completions/mean_length", "sampling/{}_logp_difference/mean"
SAME, TOKEN, COMMON = (f"completions/{share}_ratio" for share in ("same", "commonest_token", "commonest"))
WON = {"reward": lambda step: 0.3 if step <= 30 else 0.99, "reward_max": 1.0, "reward_min": 0.0}
OUTAGE = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
RISING = {"reward": lambda step: 0.3 + step / 400}


def run(*parts):
    """So many steps with some columns (or what they are at a step), then so many with others."""
    rows = []
    for count, columns in parts:
        for step in range(len(rows) + 1, len(rows) + 1 + count):
            row = WELL | {"step": step} | {key: v(step) if callable(v) else v for key, v in columns.items()}
            rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def from_to(key, before, **always):
    """A metric that goes from one level to another after 30 steps."""
    return lambda level: run((30, {key: before} | always), (30, {key: level} | always))


def collapse(key, before):
    return lambda level: run((30, {key: before}), (12, OUTAGE | {key: level}))


def evaluated(before, after, right, far=0.0):
    """A reward that changes once, and an accuracy that is as far above and below a level in turn, every ten steps."""
    rows = run((100, {"reward": before}), (100, {"reward": after}))
    accuracies = {step: {"eval/accuracy": right + far * (-1) ** (step // 10)} for step in range(10, 201, 10)}
    return [row | accuracies.get(row["step"], {}) for row in rows]


def swapped(loss, gain=0.8):
    """An accuracy that rises, and what its completions lose as answers to other prompts, at first and at last."""
    errors = {"eval/accuracy_stderr": 0.01, "eval/swap_loss_stderr": 0.01 if gain > 0.5 else 0.001}
    rows = run((60, {"reward": 0.3, "reward_min": 0.0, "reward_max": 1.0}))
    rows[0] |= errors | {"eval/accuracy": 0.1, "eval/swap_loss": 0.02}
    rows[-1] |= errors | {"eval/accuracy": 0.1 + gain, "eval/swap_loss": loss}
    return rows


def spikes(level, many=1, before=30, gap=5, spread=0.01):
    """So many steps whose norm is as high, among others that vary a little."""
    norms = {"grad_norm": lambda step: math.exp(spread * (-1) ** step)}
    return run((before, norms), *[(1, {"grad_norm": level}), (gap, norms)] * many)


def swing(factor, steps=30):
    return run((steps, {"learning_rate": lambda step: 1e-4 * factor ** (step % 2)}))


def parts(low, steps=90, high=0.98):
    """A format that is earned and a task that is not, which changes once."""
    return run((steps, {"rewards/format/mean": high, "rewards/task/mean": low, "reward": 1.1}))


TRADED = {
    "rewards/form/mean": lambda step: 0.1 if step <= 30 else 0.8,
    "reward": lambda step: 0.3 if step <= 30 else 0.9 + step % 2 / 99,
}
"""What is earned beside a task that is forgotten for its sake."""


def traded(task):
    """A task that is forgotten for the sake of something else."""
    return run((30, {"rewards/task/mean": 0.5} | TRADED), (30, {"rewards/task/mean": task} | TRADED))


def waved(height):
    """A reward that has risen once, and has fallen back."""
    return run((20, {}), (20, {"reward": 0.3 + height}), (80, {}))


def noisy(key, level, count, **always):
    """A metric that is as far above a level and below it in turn."""
    return lambda far: run((count, {key: lambda step: level + far * (-1) ** step} | always))


def noisy_from_to(key, before, after, always=None, **more):
    """A metric that goes from one level to another after 30 steps, and is as far above it and below it in turn."""
    always = (always or {}) | more
    return lambda far: run(
        *[(30, {key: lambda step, level=level: level + far * (-1) ** step} | always) for level in (before, after)]
    )


ALONE = {"reward_std": None}
"""The mean is all that is logged of rewards."""


def outlier(before, steps=12):
    """A reward that lies as high, after so many steps whose rewards lie between 0 and 1."""
    ends = {"reward_min": 0.0, "reward_max": 1.0} | before
    return lambda level: run((steps, ends), (1, ends | {"reward_max": level}))


FELT = {"step_kl": 0.1, "step_kl_target": 0.1, "learning_rate": 1e-3}
UNFELT = {"step_kl": 1e-5}


def PAID(step):
    """A reward that is earned nearly always, with noise of its own."""
    return 0.94 + 0.05 * (-1) ** step


def rising(rise, key, before, after):
    """A reward that rises at once beside a metric that changes then, both with noise."""

    def level(step):
        return 0.3 + 0.02 * (-1) ** step + rise * (step > 30)

    return run((30, {key: before, "reward": level, "rewards/form/mean": 0.1}),
               (30, {key: after, "reward": level, "rewards/form/mean": 0.1}))  # fmt: skip


THRESHOLDS = [
    # a condition, what the run looks like, levels inside and outside, and facts
    ("all truncated", lambda cut: run((10, {CUT: cut, "reward": 0.001})), 0.91, 0.89, {}),
    ("all truncated", lambda reward: run((10, {CUT: 1.0, "reward": reward})), 0.0049, 0.0051, {}),
    ("all truncated", lambda reward: run((25, {CUT: 1.0, "reward": reward})), 0.099, 0.101, {}),
    ("all truncated", lambda n: run((n, {CUT: 1.0, "reward": 0.001})), 5, 4, {}),
    ("all truncated", lambda n: run((n, {CUT: 1.0, "reward": 0.09})), 20, 19, {}),
    ("all truncated", lambda share: run((10, {CUT: 1.0, "reward": -1, "frac_reward_zero_std": share})), 0.99, 0.97, {}),
    ("all truncated", lambda share: run((25, {CUT: 1.0, "reward": -1, "frac_reward_zero_std": share})), 0.91, 0.89, {}),
    ("all truncated", lambda before: run((5, {CUT: 1.0, "reward": before}), (9, OUTAGE | {CUT: 1.0})), 0.099, 0.101,
     {}),
    ("all truncated", lambda before: run((10, {CUT: 1.0, "reward": before}), (30, {CUT: 1.0, "reward": 0.002})), 0.099,
     0.101, {}),
    ("all truncated", lambda share: run((5, {CUT: 1.0, "reward": -0.5, "frac_reward_zero_std": share}),
                                        (9, OUTAGE | {CUT: 1.0, "reward": -1})), 0.91, 0.89, {}),
    ("policy collapsed", lambda length: run((30, {LENGTH: 100}), (12, OUTAGE | {LENGTH: length})), 1.0, 0.99, {}),
    ("policy collapsed", collapse("entropy", 1.2), 1.65, 1.61, {}),
    ("policy collapsed", collapse("entropy", 1.2), 0.54, 0.56, {}),
    ("policy collapsed", collapse(LENGTH, 100), 202, 200, {}),
    ("policy collapsed", collapse(LENGTH, 100), 49, 50, {}),
    ("policy collapsed", collapse("kl", 0.01), 0.121, 0.119, {}),
    ("policy collapsed", lambda late: run((30, {"entropy": 1.2}), (late, OUTAGE | {"entropy": 1.2}),
                                          (30, OUTAGE | {"entropy": 2.5})), 15, 16, {}),
    ("reward without accuracy", lambda reward: evaluated(0.3, reward, 0.3), 0.51, 0.49, {}),
    ("reward without accuracy", lambda right: evaluated(0.96, 0.96, right), 0.42, 0.44, {}),
    ("reward without accuracy", lambda reward: evaluated(reward, reward, 0.3), 0.901, 0.899, {}),
    ("reward without accuracy", lambda right: evaluated(3.0, 5.0, right), 0.949, 0.951, {}),
    ("reward without accuracy", lambda right: evaluated(3.0, 5.0, right), 1.01, 0.99, {}),  # no share of right answers
    ("reward without accuracy", lambda steps: evaluated(0.96, 0.96, 0.3)[:steps], 40, 39, {}),
    ("reward without accuracy", lambda steps: evaluated(0.96, 0.96, 0.42)[:steps], 80, 79, {}),
    ("same reward", lambda n: run((30, {}), (n, OUTAGE)), 5, 4, {}),
    # four outages of a step in eight steps: the next one lasts with a chance of 1/2, and 17 times with 1e-5
    ("same reward", lambda n: run(*[(1, {}), (1, OUTAGE)] * 4, (3, {}), (n, OUTAGE)), 17, 16, {}),
    ("same reward", lambda n: [{"step": row["step"], "reward": row["step"] / 99 * (row["step"] < 31)}
                               for row in run((30 + n, {}))], 20, 19, {}),
    ("outlying reward", outlier({"reward_iqr": 0.2}), 20.31, 20.29, {}),
    ("outlying reward", outlier({"reward_iqr": 0.01}), 10.31, 10.29, {}),  # 10
    ("outlying reward", outlier({"reward_iqr": 0.01, "reward_std": 1.0}), 20.31, 20.29, {}),  # 20 times as far as these
    ("outlying reward", outlier({"reward_iqr": 0.0}), 70.31, 70.29, {}),  # as any before lay from the mean
    ("outlying reward", lambda n: outlier({"reward_iqr": None}, n)(99.0), 10, 9, {}),
    ("outlying reward", lambda std: run((30, {"reward_std": 1.0}), (1, {"reward_std": std})), 21.01, 20.99, {}),
    ("outlying reward", lambda std: run((30, {"reward_std": 0.1}), (1, {"reward_std": std})), 10.11, 10.09, {}),
    ("outlying reward", lambda n: run((n, {}), (1, {"reward_std": 99.0})), 10, 9, {}),
    ("outlying reward", lambda reward: run((30, ALONE | {"reward": 0.5}), (1, ALONE | {"reward": reward})), 50.6, 50.4,
     {}),
    ("outlying reward", lambda reward: run((30, ALONE | {"reward": 0.05}), (1, ALONE | {"reward": reward})), 10.06,
     10.04, {}),
    ("not finite", lambda skipped: run((1, {"skipped": skipped})), 1, 0, {}),
    ("far at once", lambda kl: run((3, {"kl": kl})), 101.0, 99.0, {}),
    ("far at once", lambda norm: run((3, {"grad_norm": norm})), 1.01e5, 0.99e5, {}),
    ("far at once", lambda n: run((n, {}), (1, {"kl": 1e3})), 9, 10, {}),
    ("groups of one", lambda mean: run((5, {"critic/advantages/mean": mean})), 0.271, 0.269, {}),
    ("groups of one", lambda n: run((n, {"critic/advantages/mean": 0.3})), 3, 2, {}),
    ("one answer", lambda many: run((30 - many, {LENGTH: lambda step: 100 + step}), (many, OUTAGE | {LENGTH: 9})), 15,
     14, {}),
    ("one answer", from_to(SAME, 0.1), 0.81, 0.79, {}),
    ("prompt not read", swapped, 0.185, 0.2, {}),
    ("prompt not read", lambda gain: swapped(0.02, gain), 0.11, 0.09, {}),
    ("one answer pays", from_to(SAME, 0.1, **WON), 0.81, 0.79, {}),
    ("one answer pays", from_to(TOKEN, 0.1, **WON, **{SAME: 0.1, LENGTH: 5}), 0.91, 0.89, {}),
    ("one answer pays", lambda length: from_to(TOKEN, 0.1, **WON, **{SAME: 0.1, LENGTH: length})(0.95), 5, 4.9, {}),
    ("one answer pays", lambda same: from_to(TOKEN, 0.1, **WON, **{SAME: same, COMMON: 0.2, LENGTH: 9})(0.95), 0.021,
     0.019, {}),
    ("one answer pays", lambda won: from_to(SAME, 0.1, **WON | {"reward": lambda step: 0.3 if step <= 30 else won})(1),
     0.91, 0.89, {}),
    ("gradient cut off", lambda n: run((20, {}), (n, {"grad_norm": 0.0})), 3, 2, {}),
    ("gradient cut off", lambda share: run((9, {"grad_norm": 0.0, "frac_reward_zero_std": share})), 0.49, 0.51,
     {"every": 10}),
    ("reward fell", from_to("reward", 0.5), 0.349, 0.351, {}),
    ("reward fell", lambda low: run((20, {"reward": 0.3}), (20, {"reward": 0.5}), (20, {"reward": low})),
     0.399, 0.401, {}),
    ("task traded", traded, 0.374, 0.376, {}),
    ("format saturated", parts, 0.48, 0.50, {}),
    ("format saturated", lambda steps: parts(0.1, steps), 80, 79, {}),
    ("format saturated", lambda steps: parts(lambda step: 0.1 + step % 2 / 100, steps), 80, 79, {}),
    ("no gradient", lambda n: run((20, {}), (n, {"grad_norm": 0.0, "frac_reward_zero_std": 1.0})), 3, 2, {}),
    ("entropy collapsed", from_to("entropy", 1.0), 0.099, 0.101, {}),
    ("entropy collapsed", from_to("entropy", 1.0, **RISING), 0.0199, 0.0201, {}),
    ("entropy collapsed", lambda low: run((60, {}), (60, {"entropy": low, "frac_reward_zero_std": 0.75})),
     0.49, 0.51, {}),
    ("entropy exploded", from_to("entropy", 1.0), 2.01, 1.99, {}),
    ("entropy exploded", from_to("entropy", 0.2), 0.71, 0.69, {}),
    ("KL runs away", from_to("kl", 0.2), 0.61, 0.59, {}),
    ("KL runs away", from_to("kl", 0.05), 0.31, 0.29, {}),
    ("KL runs away", from_to("kl", 0.1, **RISING), 1.01, 0.99, {}),
    ("length runs away", from_to(LENGTH, 100), 201, 199, {}),
    ("length shrinks", from_to(LENGTH, 100), 49, 51, {}),
    ("rate collapsed", from_to("learning_rate", 1e-4), 0.99e-6, 1.01e-6, {}),
    ("rate collapsed", lambda n: run((30, {"learning_rate": 1e-4}), (n, {"learning_rate": 1e-7})), 10, 9, {}),
    ("rate collapsed", lambda n: run((180, {"learning_rate": 1e-4}), (n, {"learning_rate": 1e-7})), 20, 19, {}),
    ("updates lost", lambda n: run((30, {"step_kl": 0.1}), (n, {"step_kl": 0.0})), 10, 9, {}),
    ("steps too short", lambda kl: run((10, FELT), (10, FELT | {"step_kl": kl})), 0.99e-3, 1.01e-3, {}),
    ("steps too short", lambda n: run((30, FELT), (n, FELT | UNFELT)), 10, 9, {}),
    ("steps too short", lambda n: run((60, FELT), (n, FELT | UNFELT)), 20, 19, {}),  # a quarter of the run
    ("steps too short", lambda times: run((9, FELT | UNFELT), (1, FELT | UNFELT | {"learning_rate": 1e-3 * times})),
     1.99, 2.01, {}),
    ("steps too short", lambda entropy: run((10, FELT), (10, FELT | UNFELT | {"entropy": entropy})), 0.101, 0.099, {}),
    ("steps too short", lambda reward: run((10, FELT | {"reward": reward}), (10, FELT | UNFELT | {"reward": reward})),
     0.899, 0.901, {}),
    ("rewards missing", lambda share: run((20, {"completions/masked_ratio": share})), 0.11, 0.09, {}),
    ("sampler mismatch", lambda apart: run((5, {SAMPLED.format("sampling"): apart})), 0.051, 0.049, {}),
    ("sampler mismatch", lambda steps: run((steps, {SAMPLED.format("sampling"): 0.2})), 2, 1, {}),
    ("sampler mismatch", lambda apart: run((5, {SAMPLED.format("sequence"): apart})), 0.101, 0.099,
     {"corrects_sampler": False}),
    ("sampler mismatch", lambda apart: run((5, {SAMPLED.format("sequence"): apart})), 1.01, 0.99,
     {"corrects_sampler": True}),
    ("baselines explode", from_to("baseline/spread", 0.2, reward=5.0), 2.01, 1.99, {}),
    ("baselines explode", lambda n: run((n, {"baseline/spread": 0.2}), (1, {"baseline/spread": 9.0})), 10, 9, {}),
    ("baselines explode", from_to("baseline/spread", 0.02, reward_std=0.1), 0.71, 0.70, {}),
    ("baselines explode", from_to("baseline/spread", 0.02, reward_std=0.7), 0.71, 0.69, {}),
    ("gradient grows", from_to("grad_norm", 1.0), 10.1, 9.9, {}),
    ("gradient grows", from_to("grad_norm", 1.0, **RISING), 50.1, 49.9, {}),
    ("gradient spikes", lambda level: spikes(level, 3), 10.2, 9.8, {}),
    ("gradient spikes", spikes, 30.4, 29.6, {}),
    ("gradient spikes", lambda many: spikes(20.0, many), 3, 2, {}),
    ("gradient spikes", lambda before: spikes(40.0, before=before), 20, 19, {}),
    ("gradient spikes", lambda gap: spikes(20.0, 3, gap=gap), 48, 49, {}),
    ("gradient spikes", lambda level: spikes(level, spread=0.4), math.exp(3.6), math.exp(3.5), {}),
    ("rate oscillates", swing, 2.01, 1.99, {}),
    ("rate oscillates", lambda steps: swing(4.0, steps), 21, 20, {}),
    ("clipping", lambda share: run((20, {"clip_ratio/region_mean": share})), 0.251, 0.249, {}),
    ("truncation", from_to(CUT, 0.05), 0.251, 0.249, {}),
    ("truncation", lambda before: from_to(CUT, before, **RISING)(0.3), 0.099, 0.101, {}),
    ("silent groups", lambda share: run((100, {"frac_reward_zero_std": share})), 0.701, 0.699, {}),
    ("silent groups", lambda n: run((n, {"frac_reward_zero_std": 0.8})), 60, 59, {}),
    ("rewards agree", lambda std: run((60, {"frac_reward_zero_std": None, "reward_std": 0.5}),
                                      (60, {"frac_reward_zero_std": None, "reward_std": std})), 0.099, 0.101, {}),
    ("no progress", lambda n: run((n, {"reward": lambda step: 0.3 + step % 2 / 100})), 100, 99, {}),
    ("no progress", waved, 0.099, 0.101, {}),
    ("no progress yet", lambda n: run((n, {"reward": lambda step: 0.3 + step % 2 / 100})), 40, 39, {}),
    ("solved", lambda n: run((40, {"reward": lambda step: step / 41, "reward_std": lambda step: (41 - step) / 99}),
                             (n, OUTAGE | {"reward": 1.0})), 5, 4, {}),
    ("prompts used up", lambda share: run((50, {}), (100, {"reward": 0.8, "frac_reward_zero_std": share})),
     0.701, 0.699, {}),
    ("prompts used up", lambda reward: run((50, {}), (100, {"reward": reward, "frac_reward_zero_std": 0.8})),
     0.751, 0.749, {}),
    ("loss of zero", lambda n: run((n, {"loss": 0.0})), 3, 2, {}),
    ("batch far below", lambda snr: run((30, {"signal2": snr / 32, "trace_cov": 1.0})), 0.099, 0.101, {"prompts": 32}),
    ("batch far above", lambda snr: run((30, {"signal2": snr / 32, "trace_cov": 1.0})), 10.1, 9.9, {"prompts": 32}),
    # the same by how many standard errors
    ("clipping", noisy("clip_ratio/region_mean", 0.3, 20), 0.148, 0.15, {}),
    ("silent groups", noisy("frac_reward_zero_std", 0.75, 60), 0.175, 0.176, {}),
    ("no progress", noisy("reward", 0.3, 110), 0.078, 0.0784, {}),
    ("no progress yet", noisy("reward", 0.3, 60), 0.0623, 0.0625, {}),
    ("length runs away", lambda rise: rising(rise, LENGTH, 100, 250), 0.0358, 0.0360, {}),
    ("task traded", lambda rise: rising(rise, "rewards/task/mean", 0.5, 0.3), 0.0381, 0.0378, {}),
    ("batch far above", noisy("signal2", 12.0, 30, trace_cov=1.0), 4.9, 4.93, {"prompts": 1}),
    ("batch far below", noisy("signal2", 0.02, 30, trace_cov=1.0), 0.056, 0.0564, {"prompts": 1}),
    ("rewards missing", noisy("completions/masked_ratio", 0.3, 20), 0.148, 0.15, {}),
    ("sampler mismatch", noisy(SAMPLED.format("sampling"), 0.2, 20), 0.0442, 0.0446, {}),
    ("length runs away", noisy_from_to(LENGTH, 100, 300), 38.3, 38.4, {}),
    ("length shrinks", noisy_from_to(LENGTH, 100, 30), 16.95, 17.0, {}),
    ("KL runs away", noisy_from_to("kl", 0.1, 0.8), 0.0725, 0.0727, {}),
    ("entropy collapsed", noisy_from_to("entropy", 1.0, 0.05), 0.0733, 0.0735, {}),
    ("reward fell", noisy_from_to("reward", 0.6, 0.3), 0.1039, 0.1043, {}),
    ("gradient grows", noisy_from_to("grad_norm", 1.0, 20.0), 1.045, 1.048, {}),
    ("baselines explode", noisy_from_to("baseline/spread", 0.2, 4.0, reward=5.0), 0.222, 0.223, {}),
    ("truncation", noisy_from_to(CUT, 0.05, 0.4), 0.198, 0.199, {}),
    ("task traded", noisy_from_to("rewards/task/mean", 0.5, 0.3, TRADED), 0.0701, 0.0704, {}),
    ("reward without accuracy", lambda far: evaluated(0.3, 0.6, 0.3, far), 0.0185, 0.0187, {}),
    ("reward without accuracy", lambda far: evaluated(0.96, 0.96, 0.3, far), 0.127, 0.129, {}),
    ("reward without accuracy", lambda far: evaluated(PAID, PAID, 0.4, far), 0.035, 0.0353, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "inside", "outside", "facts"), THRESHOLDS)
def test_a_condition_holds_just_inside_its_threshold_and_not_just_outside(name, rows, inside, outside, facts):
    assert name in Watch(Facts(**facts)).over(rows(inside)).found
    assert name not in Watch(Facts(**facts)).over(rows(outside)).found


def test_every_condition_is_among_them():
    assert {name for name, *_ in THRESHOLDS} == {condition.name for condition in CONDITIONS}


def test_a_collapse_begins_after_the_last_good_reward():
    assert Watch().over(collapse("entropy", 1.2)(2.5)).found["policy collapsed"].reading.since == 31
