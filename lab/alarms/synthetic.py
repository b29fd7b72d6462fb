"""Logs of runs that never were: healthy ones, drawn at random, and the same with one illness from some step on.

A healthy run has a policy whose chance of success differs between prompts (a Beta distribution, whose mean rises), P
prompts a step with G completions each: rewards, their spread and the share of prompts that agree are drawn, and so have
their true noise. Entropy falls while it learns, length drifts, gradient norms are log-normal, KL to the reference grows
with what was learned. An illness changes some columns after its onset; the rest continues as it would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lab.alarms.logged import as_confined, as_mean, as_ours, as_trl, as_verl, thinned, with_ends, with_swaps, with_texts
from lab.alarms.uneven import Row, heavy, honest, noisy, one_in_128, thousand
from oblrpo.diagnosis.course import WINDOW, Course, Facts

STEPS, ONSET = 200, 80


class World:
    """The habits of one run, drawn at random: how large, how noisy, how fast it learns.

    One that is logged `every` so many steps is as many times as long, and slower by as much as windows are longer.
    """

    def __init__(self, seed: int, every: int = 1) -> None:
        self.random = random = np.random.default_rng(seed)
        self.P, self.G = int(random.choice([16, 32, 64, 128])), int(random.choice([4, 8, 16]))
        self.begin, self.end = random.uniform(0.1, 0.4), random.uniform(0.55, 0.98)
        slow = Course(Facts(every=every)).span / WINDOW
        self.half, self.pace = slow * random.uniform(10, 60), slow * random.uniform(8, 30)
        self.steps, self.onset = every * STEPS, every * ONSET
        self.spread = random.uniform(0.8, 4.0)  # of the Beta distribution; the smaller, the more prompts agree
        self.entropy, self.fall = random.uniform(0.3, 1.5), random.uniform(0.2, 0.7)
        self.length, self.drift = random.uniform(20, 600), random.uniform(-0.3, 0.4)
        self.norm, self.rough = random.uniform(0.05, 2.0), random.uniform(0.1, 0.4)
        self.rate = 10 ** random.uniform(-6, -4)
        self.course = random.choice(["constant", "cosine", "linear"])
        self.scale, self.shift = [(1.0, 0.0), (1.0, 0.0), (2.0, -1.0), (3.0, 0.0)][int(random.integers(4))]
        self.wander = 0.0

    def level(self, step: float) -> float:
        """The chance of success at a step: a logistic curve."""
        return self.begin + (self.end - self.begin) / (1 + math.exp(-(step - self.half) / self.pace))

    def rewards(self, level: float) -> tuple[float, float, float]:
        """Mean reward, mean deviation within a prompt, and the share of prompts that agree, of a step."""
        chance_P = self.random.beta(self.spread * level + 1e-9, self.spread * (1 - level) + 1e-9, self.P)
        wins_P = self.random.binomial(self.G, chance_P) / self.G
        std_P = np.sqrt(wins_P * (1 - wins_P) * self.G / (self.G - 1))
        return float(wins_P.mean()), float(std_P.mean()), float((std_P == 0).mean())

    def accuracy(self, level: float) -> float:
        """A mean reward over 256 held-out completions."""
        return self.scale * self.random.binomial(256, max(0.01, level)) / 256 + self.shift

    def row(self, step: int, level: float | None = None) -> Row:
        """A step as TRL's trainer would log it."""
        level, random = self.level(step) if level is None else level, self.random
        learned = (level - self.begin) / (self.end - self.begin)
        self.wander = 0.9 * self.wander + random.normal(0, 0.02)
        reward, std, agree = self.rewards(level)
        done = step / self.steps
        decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        row: Row = {
            "step": step, "reward": self.scale * reward + self.shift, "reward_std": self.scale * std,
            "frac_reward_zero_std": agree,
            "entropy": self.entropy * math.exp(self.wander + random.normal(0, 0.05)) * (1 - self.fall * learned),
            "completions/mean_length": self.length * (1 + self.drift * learned) * math.exp(random.normal(0, 0.05)),
            "completions/clipped_ratio": random.binomial(self.P * self.G, 0.03) / (self.P * self.G),
            "grad_norm": self.norm * math.exp(random.normal(0, self.rough)),
            "learning_rate": self.rate * decay[self.course], "loss": random.normal(0, 0.01),
            "kl": 0.05 * learned * math.exp(random.normal(0, 0.1)) + 1e-4,
            "clip_ratio/region_mean": abs(random.normal(0.005, 0.003)),
            "rewards/task/mean": reward, "rewards/format/mean": min(1.0, 0.5 + step / 40) - abs(random.normal(0, 0.01)),
            "baseline/spread": 0.3 * math.exp(random.normal(0, 0.2)),
            "sampling/sampling_logp_difference/mean": 0.01 * math.exp(random.normal(0, 0.2)),
        }  # fmt: skip
        if step % 10 == 0:
            row["eval/accuracy"] = self.accuracy(level - 0.02)
        return row


def healthy(seed: int, every: int = 1) -> list[Row]:
    """A run that is well; so many times as long, and logged every so many steps."""
    world = World(seed, every)
    return thinned([world.row(step) for step in range(1, world.steps + 1)], every)


def solved(seed: int, every: int = 1) -> list[Row]:
    """A run of ours that is well and has solved its task after two thirds of its steps, held out too."""
    world, rows = World(seed, every), []
    world.end, world.pace = 1.0, min(world.pace, 12.0 * every)  # .998 by then
    for step in range(1, world.steps + 1):
        done = step > 2 * world.steps / 3
        rows.append(as_ours(world.row(step, 1.0 if done else None) | ({"reward_stderr": 0.0} if done else {})))
    return thinned(rows, every)


def uneven(seed: int, every: int = 1) -> list[Row]:
    """A run that is well, of rewards as uneven as honest ones are: rare successes, percentages, scores of any size."""
    world, rows = World(seed, every), []
    draw = honest(world.random, (world.P, world.G))
    for step in range(1, world.steps + 1):
        level = world.level(step)
        row = world.row(step, level) | draw((level - world.begin) / (world.end - world.begin))
        rows.append({key: value for key, value in row.items() if not key.startswith(("rewards/", "eval/"))})
    return thinned(rows, every)


class Illness(NamedTuple):
    """What goes wrong, from the onset on."""

    finds: str  # the condition that is to be found
    within: int  # steps after the onset
    change: Callable[[World, Row, int], Row]  # given a healthy row and the number of steps since the onset
    logged: Callable[[Row], Row] = dict  # how the whole run is logged


def _frozen(world: World, since: int, **columns: Any) -> Row:
    """A row of a policy that learns nothing more, at the level of the onset."""
    return world.row(world.onset + since, world.level(world.onset)) | columns


def _fall(world: World, row: Row, since: int) -> Row:
    return world.row(row["step"], world.level(world.onset) * max(0.3, 1 - since / 30))


def outage(earned: float, steps: float = math.inf) -> Callable[[World, Row, int], Row]:
    """All completions of so many steps earn the same: what scores them is down."""

    def change(world: World, row: Row, since: int) -> Row:
        spreads = {"reward_std": 0.0, "reward_stderr": 0.0, "frac_reward_zero_std": 1.0}
        return row | spreads | {"reward": earned, "rewards/task/mean": earned} if since <= steps else row

    return change


def _nothing(world: World, row: Row, since: int) -> Row:
    return outage(0.0)(world, row, since) | {"grad_norm": 0.0}


def _groups_agree(world: World, row: Row, since: int) -> Row:
    return row | {"grad_norm": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}


def _collapsed(world: World, row: Row, since: int) -> Row:
    nothing = outage(world.shift)(world, row, since) | {"grad_norm": 0.0}
    return nothing | {"entropy": row["entropy"] + min(2.0, 0.5 * since)}


def _all_cut(world: World, row: Row, since: int) -> Row:
    return world.row(row["step"], 0.004) | {"completions/clipped_ratio": world.random.uniform(0.97, 1)}


def _entropy_gone(world: World, row: Row, since: int) -> Row:
    stuck = _frozen(world, since)
    return stuck | {"entropy": max(stuck["entropy"] * math.exp(-since / 15), 0.009)}


def _entropy_up(world: World, row: Row, since: int) -> Row:
    stuck = _frozen(world, since)
    return stuck | {"entropy": stuck["entropy"] + min(4.0, 0.06 * since)}


def _hacked(world: World, row: Row, since: int) -> Row:
    level = world.level(world.onset)
    found = world.row(row["step"], min(0.95, level + 0.01 * since))
    if "eval/accuracy" in found:
        found["eval/accuracy"] = world.accuracy(level - 0.002 * since)
    return found


def _traded(world: World, row: Row, since: int) -> Row:
    level = world.level(world.onset)
    found = world.row(row["step"], min(0.95, level + 0.01 * since))
    correct = world.rewards(level * max(0.3, 1 - since / 60))[0]
    return found | {"rewards/task/mean": correct}


def _kl(world: World, row: Row, since: int) -> Row:
    return _frozen(world, since, kl=row["kl"] + 0.02 * since)


def _longer(world: World, row: Row, since: int) -> Row:
    stuck = _frozen(world, since)
    return stuck | {"completions/mean_length": stuck["completions/mean_length"] * min(4.0, math.exp(since / 40))}


def _shorter(world: World, row: Row, since: int) -> Row:
    stuck = _frozen(world, since)
    return stuck | {"completions/mean_length": stuck["completions/mean_length"] * max(0.1, math.exp(-since / 30))}


def _cut(world: World, row: Row, since: int) -> Row:
    n = world.P * world.G
    return _frozen(world, since, **{"completions/clipped_ratio": world.random.binomial(n, min(0.5, since / 40)) / n})


def _lost_rate(world: World, row: Row, since: int) -> Row:
    return row | {"learning_rate": row["learning_rate"] * max(1e-3, math.exp(-since / 3))}


def _spikes(world: World, row: Row, since: int) -> Row:
    return row | ({"grad_norm": row["grad_norm"] * 40} if since % 7 == 1 else {})


def _outlier(world: World, row: Row, since: int) -> Row:
    return row | ({"reward": row["reward"] + 1e3, "reward_std": 1e4} if since == 1 else {})


def _short(world: World, row: Row, since: int) -> Row:
    stuck = _frozen(world, since)
    return stuck | {"step_kl": 1e-5 * world.random.lognormal()}


def _swings(world: World, row: Row, since: int) -> Row:
    return row | {"learning_rate": row["learning_rate"] * (4 if since % 2 else 0.25)}


def _silent(world: World, row: Row, since: int) -> Row:
    share = float(np.clip(world.random.normal(0.8, 0.1), 0, 1))
    return _frozen(world, since, **{"frac_reward_zero_std": share})


def _clipped(world: World, row: Row, since: int) -> Row:
    return row | {"clip_ratio/region_mean": float(np.clip(world.random.normal(0.4, 0.08), 0, 1))}


def _apart(world: World, row: Row, since: int) -> Row:
    return row | {"sampling/sampling_logp_difference/mean": 0.2 * math.exp(world.random.normal(0, 0.3))}


def _grown(world: World, row: Row, since: int) -> Row:
    stuck = _frozen(world, since)
    return stuck | {"grad_norm": stuck["grad_norm"] * math.exp(since / 20)}


def _agreed(world: World, row: Row, since: int) -> Row:
    stuck = _frozen(world, since)
    del stuck["frac_reward_zero_std"]
    return stuck | {"reward_std": stuck["reward_std"] * max(0.02, math.exp(-since / 15))}


def _wild(world: World, row: Row, since: int) -> Row:
    return row | {"baseline/spread": row["baseline/spread"] * 100}


def _form(world: World, row: Row, since: int) -> Row:
    task, std, agree = world.rewards(0.15)
    form = 0.99 - abs(world.random.normal(0, 0.005))
    parts = {"rewards/task/mean": task, "rewards/format/mean": form, "reward": task + form}
    return row | parts | {"reward_std": std, "frac_reward_zero_std": agree}


def _still(world: World, row: Row, since: int) -> Row:
    still = world.row(row["step"], world.begin)
    del still["rewards/format/mean"]  # which is earned nearly always
    return still


def _one_answer(world: World, row: Row, since: int) -> Row:
    same = outage(0.2 * world.scale + world.shift)(world, row, since)
    return same | {"completions/mean_length": 9.0} if since % 4 else row


def _one_text(world: World, row: Row, since: int) -> Row:
    return _frozen(world, since, **{"completions/same_ratio": min(0.95, since / 20)})


def _one_text_pays(world: World, row: Row, since: int) -> Row:
    found = world.row(row["step"], min(0.97, world.level(world.onset) + 0.02 * since))
    return found | {"completions/same_ratio": min(0.95, since / 20)}


def _one_token_pays(world: World, row: Row, since: int) -> Row:
    found = world.row(row["step"], min(0.97, world.level(world.onset) + 0.02 * since))
    return found | {"completions/commonest_token_ratio": min(0.98, since / 20)}


def _not_read(world: World, row: Row, since: int) -> Row:
    found = world.row(row["step"], min(0.97, world.level(world.onset) + 0.02 * since))
    return with_swaps(found | {"eval/swap_loss": 0.02} if row["step"] % 10 == 0 else found)


def _ungrouped(world: World, row: Row, since: int) -> Row:
    return row | {"critic/advantages/mean": row["reward"] * world.random.normal(1, 0.03)}


def _far(world: World, row: Row, since: int) -> Row:
    return row | ({"kl": 1e4, "grad_norm": 4e5} if since == 1 else {})


def _missing(world: World, row: Row, since: int) -> Row:
    return row | {"completions/masked_ratio": world.random.binomial(200, 0.3) / 200}


ILLNESSES: dict[str, tuple[int, Illness]] = {
    # its onset, and the illness
    "reward falls": (ONSET, Illness("reward fell", 40, _fall)),
    "no reward at all": (ONSET, Illness("same reward", 5, _nothing)),
    "one reward of a million": (ONSET, Illness("outlying reward", 1, _outlier)),
    "one reward of 1,000, ours": (ONSET, Illness("outlying reward", 1, thousand, with_ends)),
    "one reward of 1,000, verl": (ONSET, Illness("outlying reward", 1, thousand, as_verl)),
    "one in 128 is +-100": (ONSET, Illness("outlying reward", 5, noisy(one_in_128), with_ends)),
    "rewards + .3 t(1.5)": (ONSET, Illness("outlying reward", 40, noisy(heavy), with_ends)),
    "another reference": (0, Illness("far at once", 1, _far)),
    "groups of one": (0, Illness("groups of one", 3, _ungrouped)),
    "one answer in three steps of four": (ONSET, Illness("one answer", 20, _one_answer)),
    "one text": (ONSET, Illness("one answer", 40, _one_text, with_texts)),
    "one text, and it pays": (ONSET, Illness("one answer pays", 60, _one_text_pays, with_texts)),
    "an answer that fits all prompts": (ONSET, Illness("prompt not read", 60, _not_read, with_swaps)),
    "one token, and it pays": (ONSET, Illness("one answer pays", 60, _one_token_pays, with_texts)),
    "gradient of 0": (ONSET, Illness("gradient cut off", 3, lambda world, row, since: row | {"grad_norm": 0.0})),
    "groups agree": (ONSET, Illness("no gradient", 5, _groups_agree)),
    "policy collapses": (ONSET, Illness("policy collapsed", 10, _collapsed)),
    "all cut": (0, Illness("all truncated", 10, _all_cut)),
    "entropy to 0.009": (ONSET, Illness("entropy collapsed", 60, _entropy_gone)),
    "entropy to 4 nats": (ONSET, Illness("entropy exploded", 50, _entropy_up)),
    "hacked": (ONSET, Illness("reward without accuracy", 100, _hacked)),
    "task traded": (ONSET, Illness("task traded", 100, _traded)),
    "KL runs away": (ONSET, Illness("KL runs away", 40, _kl)),
    "length times four": (ONSET, Illness("length runs away", 60, _longer)),
    "length to a tenth": (ONSET, Illness("length shrinks", 50, _shorter)),
    "half of it cut": (ONSET, Illness("truncation", 70, _cut)),
    "rate collapsed": (ONSET, Illness("rate collapsed", 40, _lost_rate)),
    "gradient spikes": (ONSET, Illness("gradient spikes", 20, _spikes)),
    "gradient grows": (ONSET, Illness("gradient grows", 80, _grown)),
    "rewards agree": (ONSET, Illness("rewards agree", 80, _agreed)),
    "a NaN": (ONSET, Illness("not finite", 1, lambda world, row, since: row | {"skipped": 1.0})),
    "rate swings": (ONSET, Illness("rate oscillates", 30, _swings)),
    "silent groups, 0.8": (ONSET, Illness("silent groups", 60, _silent)),
    "clipped": (ONSET, Illness("clipping", 20, _clipped)),
    "sampler mismatch": (ONSET, Illness("sampler mismatch", 20, _apart)),
    "wild baselines": (ONSET, Illness("baselines explode", 1, _wild)),
    "format alone": (0, Illness("format saturated", 120, _form)),
    "no progress": (0, Illness("no progress", 200, _still)),
    "steps stay short": (ONSET, Illness("steps too short", 30, _short, as_confined)),
    "rewards missing": (ONSET, Illness("rewards missing", 20, _missing)),
    "updates lost": (ONSET, Illness("updates lost", 10, lambda world, row, since: row | {"step_kl": 0.0})),
}
LOGGED = {"ours": (as_ours, 5), "TRL": (as_trl, 5), "verl": (as_verl, 5), "mean only": (as_mean, 20)}
for _trainer, (_logged, _within) in LOGGED.items():
    for _earned in (0.0, 0.37, 1.0):
        _down = Illness("same reward", _within, outage(_earned, 30), _logged)
        ILLNESSES[f"{_earned:g} for 30 steps, {_trainer}"] = (ONSET, _down)
    for _earned in (0.0, -1.0, 0.5):
        _broken = Illness("same reward", _within, outage(_earned), _logged)
        ILLNESSES[f"{_earned:g} from the start, {_trainer}"] = (0, _broken)


def ill(name: str, seed: int, every: int = 1) -> list[Row]:
    """A run that is well up to the illness's onset, and not from the step after it on."""
    onset, illness = ILLNESSES[name]
    world, rows = World(seed, every), []
    world.end = min(world.end, 0.6)  # much is left to learn
    for step in range(1, world.steps + 1):
        row, since = world.row(step), step - every * onset
        rows.append(illness.logged(row if since <= 0 else illness.change(world, row, since)))
    return thinned(rows, every)
