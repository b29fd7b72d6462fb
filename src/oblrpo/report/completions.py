"""What a run's policy wrote, before and after: samples, score norm against reward, lengths."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

from oblrpo.report import charts
from oblrpo.report.charts import legend, look, short
from oblrpo.report.html import TEMPLATES, markup, render
from oblrpo.report.record import RunRecord
from oblrpo.tables.metrics import Chart

Rows = list[dict[str, Any]]
PROMPTS, COMPLETIONS = 3, 8  # the most prompts shown of a step, and the most completions of each
NARROW = 24  # completions of at most so many characters stand in a table beside their figures
POINTS = 200  # the most points of a step in a scatter
DISCRETE = 6  # at most so many different rewards are drawn as columns


def samples(record: RunRecord, chart: Chart) -> list[Markup]:
    """Show prompts of the first and the last step, and their completions."""
    kept = _first_and_last(record, "reward") or _first_and_last(record, "step")
    groups_of: dict[int, dict[str, Rows]] = {step: defaultdict(list) for step in kept}
    for step, rows in kept.items():
        for row in rows:
            groups_of[step][row["prompt"]].append(row)
    shared = set.intersection(*(set(groups) for groups in groups_of.values())) if kept else set()
    drawn = []
    for step, groups in groups_of.items():
        # those whose completions differ in reward first: the others teach nothing
        rewards = {prompt: {row["reward"] for row in rows} - {None} for prompt, rows in groups.items()}
        order = sorted(groups, key=lambda prompt: (prompt not in shared, len(rewards[prompt]) < 2))
        title = f"Step {step}, {'before' if step == min(kept) else 'after'}"
        shown = [_group(groups[prompt]) for prompt in order[:PROMPTS]]
        drawn.append(Markup(render("samples.html", title=title, groups=shown)))
    return drawn


def _group(rows: Rows) -> dict[str, Any]:
    shown = rows[:COMPLETIONS]
    parts: Any = TEMPLATES.get_template("parts.html").module
    return {
        "prompt": rows[0]["prompt"],
        "answer": str(rows[0].get("answer", "")),
        "narrow": max(len(row["completion"]) for row in shown) <= NARROW,
        "rows": [(parts.folded(row["completion"]), *_figures(row)) for row in shown],
        "more": len(rows) - COMPLETIONS,
    }


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Write a completion's reward, advantage, baseline, squared norm and length."""

    def number(key: str, missing: str, form: str = "") -> str:
        value = row.get(key)
        return missing if value is None else format(value, form) if form else short(value)

    kind = "up" if (row["advantage"] or 0) > 0 else "down"
    advantage = markup("<span class={}>{}</span>", kind, number("advantage", "none", "+.3f"))
    baseline, norm2 = number("baseline", "none", ".3f"), number("score_norm2", "not taken")
    return number("reward", "masked", "g"), advantage, baseline, norm2, number("length", "", "d")


def norm_against_reward(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw each completion's squared score norm against its reward, before and after; none where none was taken."""
    kept = _first_and_last(record, "score_norm2/mean")
    pairs = {
        step: [(row["reward"], row["score_norm2"]) for row in rows
               if row.get("score_norm2") and row["reward"] is not None][:POINTS]
        for step, rows in kept.items()
    }  # fmt: skip
    pairs = {step: of_step for step, of_step in pairs.items() if of_step}
    if not pairs:
        return []
    rewards = sorted({reward for of_step in pairs.values() for reward, _ in of_step})
    discrete = len(rewards) <= DISCRETE

    def draw(axes: Axes) -> None:
        axes.set_yscale("log")
        if discrete:
            _columns(axes, pairs, rewards)
        else:
            for number, (step, of_step) in enumerate(pairs.items()):
                x, y = zip(*of_step, strict=True)
                axes.plot(x, y, ".", color=_color(number), alpha=0.5, markersize=5, label=f"step {step}")
        legend(axes)

    return [charts.drawing(chart.title, "reward", draw, ylabel=chart.ylabel, note=chart.note)]


def _columns(axes: Axes, pairs: Mapping[int, Sequence[tuple[float, float]]], rewards: Sequence[float]) -> None:
    """Draw one column of points for each reward and step, side by side, and its median."""
    rng, width = random.Random(0), 0.8 / len(pairs)
    for number, (step, of_step) in enumerate(pairs.items()):
        for place, reward in enumerate(rewards):
            norms = sorted(norm for own, norm in of_step if own == reward)
            if not norms:
                continue
            left = place - 0.4 + number * width
            x = [left + width * (0.1 + 0.8 * rng.random()) for _ in norms]
            label = f"step {step}" if place == min(rewards.index(own) for own, _ in of_step) else None
            axes.plot(x, norms, ".", color=_color(number), alpha=0.4, markersize=4, label=label)
            axes.plot([left, left + width], [norms[len(norms) // 2]] * 2, color=_color(number), linewidth=3)
    axes.set_xticks(range(len(rewards)), [short(reward) for reward in rewards])


def length_spread(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw how lengths are spread, before and after."""
    taken = {step: [row["length"] for row in rows if row.get("length")]
             for step, rows in _first_and_last(record, "reward").items()}  # fmt: skip
    spread = {step: of_step for step, of_step in taken.items() if of_step}
    if not spread:
        return []
    low, high = min(map(min, spread.values())), max(map(max, spread.values()))
    width = max(1, -(-(high - low + 1) // 30))
    edges = [low - 0.5 + width * place for place in range((high - low) // width + 2)]

    def draw(axes: Axes) -> None:
        for number, (step, of_step) in enumerate(spread.items()):
            axes.hist(of_step, edges, weights=[1 / len(of_step)] * len(of_step), histtype="stepfilled", alpha=0.35,
                      color=_color(number), label=f"step {step}")  # fmt: skip
        axes.set_ylim(bottom=0)
        legend(axes)

    return [charts.drawing(chart.title, "tokens", draw, ylabel=chart.ylabel, note=chart.note)]


def _color(number: int) -> str:
    return look(1 - number)[0]  # the last step has the colour of the run's own curves


def _first_and_last(record: RunRecord, key: str) -> dict[int, Rows]:
    """Return the completions of the first and of the last step that have the metric and still have completions."""
    steps = [row["step"] for row in record.steps if row.get(key) is not None]
    ends = (
        next(((step, rows) for step in order if (rows := record.completions(step))), None)
        for order in (steps, steps[::-1])
    )
    return dict(filter(None, ends))
