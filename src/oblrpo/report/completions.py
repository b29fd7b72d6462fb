"""What a run's policy wrote, before and after: samples, score norm against reward, lengths."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from oblrpo.report import html
from oblrpo.report.charts import drawing, legend, look, short
from oblrpo.report.html import text
from oblrpo.report.record import RunRecord

Rows = list[dict[str, Any]]
PROMPTS, COMPLETIONS = 3, 8  # the most prompts shown of a step, and the most completions of each
LONG = 240  # a text of more characters is folded
CUT = 2000  # of a text of more than twice as many, so many are left at each end
NARROW = 24  # completions of at most so many characters stand in a column beside their figures
POINTS = 200  # the most points of a step in a scatter
DISCRETE = 6  # at most so many different rewards are drawn as columns


def samples(record: RunRecord) -> str:
    """Show prompts of the first and the last step, and their completions; empty if none are left."""
    kept = _first_and_last(record, "reward") or _first_and_last(record, "step")
    if not kept:
        return ""
    groups_of: dict[int, dict[str, Rows]] = {step: defaultdict(list) for step in kept}
    for step, rows in kept.items():
        for row in rows:
            groups_of[step][row["prompt"]].append(row)
    shared = set.intersection(*(set(groups) for groups in groups_of.values()))
    parts = []
    for step, groups in groups_of.items():
        # those whose completions differ in reward first: the others teach nothing
        rewards = {prompt: {row["reward"] for row in rows} - {None} for prompt, rows in groups.items()}
        order = sorted(groups, key=lambda prompt: (prompt not in shared, len(rewards[prompt]) < 2))
        cards = "".join(_group(groups[prompt]) for prompt in order[:PROMPTS])
        parts.append(f"<div><h3>Step {step}, {'before' if step == min(kept) else 'after'}</h3>{cards}</div>")
    return html.charts(parts, large=True)


def _group(rows: Rows) -> str:
    shown = rows[:COMPLETIONS]
    figures = [
        [_number(row["reward"], "masked", "g"), _advantage(row["advantage"]), _number(row["baseline"], "none", ".3f"),
         _number(row.get("score_norm2"), "not taken", ""), _number(row.get("length"), "", "d")]
        for row in shown
    ]  # fmt: skip
    texts = [_folded(row["completion"]) for row in shown]
    heads = ("reward", "advantage", "baseline", "norm&sup2;", "tokens")
    if max(len(row["completion"]) for row in shown) <= NARROW:
        cells = [[completion, *line] for completion, line in zip(texts, figures, strict=True)]
        body = html.table(("completion", *heads), cells, range(1, 6))
    else:
        named = [" · ".join(map(" ".join, zip(heads, line, strict=True))) for line in figures]
        body = "".join(
            f"<div class=text><small>{line}</small><div>{completion}</div></div>"
            for completion, line in zip(texts, named, strict=True)
        )
    more = f"<small>{len(rows) - COMPLETIONS} more</small>" if len(rows) > COMPLETIONS else ""
    prompt, answer = rows[0]["prompt"], str(rows[0].get("answer", ""))
    wanted = f"<br><small>answer</small> {_folded(answer)}" if answer and answer not in prompt else ""
    return f"<div class=group><small>prompt</small> {_folded(prompt)}{wanted}{body}{more}</div>"


def _folded(plain: str) -> str:
    """Make HTML of a text; a long one shows its beginning, and opens."""
    if not plain.strip():
        return f"<small>{'only white space' if plain else 'empty'}</small>"
    if len(plain) <= LONG:
        return f"<code>{text(plain)}</code>"
    head = f"<code>{text(plain[:LONG])} …</code> <small>{len(plain)} characters</small>"
    left_out = len(plain) - 2 * CUT
    ends = [plain] if left_out <= 0 else [plain[:CUT], plain[-CUT:]]
    whole = f" </code><small>… {left_out} characters left out …</small><code> ".join(map(text, ends))
    return f"<details><summary>{head}</summary><div class=long><code>{whole}</code></div></details>"


def _advantage(value: float | None) -> str:
    kind = "up" if (value or 0) > 0 else "down"
    return f"<span class={kind}>{_number(value, 'none', '+.3f')}</span>"


def _number(value: float | None, missing: str, form: str) -> str:
    if value is None:
        return missing
    return format(value, form) if form else short(value)


def norm_against_reward(record: RunRecord) -> list[str]:
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

    medians = ", bars at the medians" if discrete else ""
    note = f"Each completion of a step{medians}. The optimal baseline weighs rewards by this norm."
    return [drawing("Score norm against reward", "reward", draw, ylabel="‖∇ log π‖²", note=note)]


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


def lengths(record: RunRecord) -> list[str]:
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

    title, note = "Spread of completion lengths", "Of all completions of a step."
    return [drawing(title, "tokens", draw, ylabel="share of completions", note=note)]


def _color(number: int) -> str:
    return look(1 - number)[0]  # the last in the colour of the run's own curves


def _first_and_last(record: RunRecord, key: str) -> dict[int, Rows]:
    """Return the completions of the first and of the last step that have the metric and still have completions."""
    steps = [row["step"] for row in record.steps if row.get(key) is not None]
    kept: dict[int, Rows] = {}
    for order in (steps, steps[::-1]):
        for step in order:
            if step in kept:
                break
            if rows := record.completions(step):
                kept[step] = rows
                break
    return kept
