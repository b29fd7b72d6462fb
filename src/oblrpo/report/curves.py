"""The curves of a run's metrics, step by step."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from oblrpo.intervals import Z95, around, smooth
from oblrpo.report.charts import Level, Line, chart
from oblrpo.report.record import RunRecord
from oblrpo.runs import Metrics

WINDOW = 9  # how many steps the moving averages of batches take
WIDE = 20.0  # an axis is logarithmic where the greatest value is more than so many times the least
SHOWN_WIDER = 10.0  # an open end of an interval of the critical batch is drawn at so many times all else


def learning(record: RunRecord) -> list[str]:
    """Draw reward and held-out accuracy, and the share of prompts without a gradient."""
    note = (
        f"Dots: each batch. Line: mean over {WINDOW} steps. Bands: 95 % intervals over prompts. Held-out prompts are "
        "never trained on: what the reward has above them is memorized."
    )
    accuracy = _line(record.measured, "eval/accuracy", "held-out accuracy")
    margins = [None if (error := row.get("eval/accuracy_stderr")) is None else Z95 * error for row in record.measured]
    lines = [reward_line(record.steps), _with_margins(accuracy, margins)]
    drawn = [chart("Reward and held-out accuracy", lines, ylabel="mean reward", note=note)]
    if any(row.get("frac_reward_zero_std") is not None for row in record.steps):
        note = (
            "Prompts of which all completions got the same reward. Near 1: prompts are too easy or too hard, or the "
            "reward cannot tell completions apart."
        )
        flat = _averaged(record.steps, "frac_reward_zero_std", "share of prompts")
        drawn.append(chart("Silent groups", [flat], ylabel="share of prompts", note=note))
    return drawn


def noise(record: RunRecord) -> list[str]:
    """Draw the signal-to-noise ratio, the rate that follows from it, and the batch that it asks for."""
    steps, prompts = record.steps, record.prompts
    rate = _line(steps, "learning_rate", "learning rate")
    schedule = record.of_algorithm("schedule")
    eta_0, fixed = record.number("learning_rate"), schedule == "off"
    followed = "where it starts" if any("step_kl" in row for row in steps) else "as set, before the schedule"
    taken = [row for row in steps if "n_snr" in row]  # another trainer's may be there in some steps only, or in none
    n_snr = _line(taken, "n_snr", "N SNR")
    ends = [[None if row.get(key) is None else prompts * row[key] for row in taken] for key in ("snr_low", "snr_high")]
    snr = replace(n_snr, low=ends[0], high=ends[1])
    drawn = [
        chart(
            "Signal to noise of the batch gradient", [snr], ylabel="N SNR",
            note="N SNR with its 95 % interval. At 1, signal and noise are equal; a gradient of noise alone has 0.",
            levels=[Level(1, "signal = noise")],
        ),
        chart(
            "Learning rate", [rate], ylabel="learning rate",
            logarithmic=_wide([*rate.y, eta_0]),
            note="Fixed: the schedule is off." if fixed else f"Set at each step by the schedule {schedule}.",
            levels=[Level(eta_0, followed)] if eta_0 > 0 and not fixed else [],
        ),
        _critical(taken, prompts),
    ]  # fmt: skip
    return drawn if taken else drawn[1:2]


def _critical(steps: Sequence[Metrics], prompts: int) -> str:
    """Draw the critical batch 1 / SNR; where the interval of SNR reaches 0, it has no upper end."""
    rows = [row for row in steps if "critical_batch_size" in row]
    line = _line(rows, "critical_batch_size", "critical batch size")
    sizes = [value for value in line.y if value]
    low: list[float | None] = [None] * len(rows)
    high = list(low)
    if sizes:
        top = SHOWN_WIDER * max([*sizes, prompts or 1])
        low = [1 / row["snr_high"] if row.get("snr_high") else None for row in rows]
        high = [None if row.get("snr_low") is None else 1 / max(row["snr_low"], 1 / top) for row in rows]
    note = (
        "Prompts at which noise equals signal (1 / SNR), a mean over the policies of the steps before, with its 95 % "
        "interval. A batch far below it is mostly noise; one far above it wastes prompts."
    )
    return chart(
        "Critical batch size, and the batch used", [replace(line, low=low, high=high)], logarithmic=True,
        ylabel="prompts", note=note, levels=[Level(prompts, f"batch used: {prompts}")] if prompts else [],
    )  # fmt: skip


def norms(record: RunRecord) -> list[str]:
    """Draw score norms over the run, and how they go with the reward; none where they were not taken."""
    taken = [row for row in record.steps if row.get("score_norm2/mean") is not None]
    if not taken:
        return []
    mean = _averaged(taken, "score_norm2/mean", "mean")
    kappa = _averaged(taken, "score_norm2/kappa", "kappa")
    return [
        chart("Squared score norm", [mean], logarithmic=_wide([*mean.y, *(mean.dots or [])]), ylabel="‖∇ log π‖²",
              note=f"Mean over the completions of a step (dots) and over {WINDOW} steps (line)."),
        chart("Score norm, high over low reward", [kappa], logarithmic=_wide(kappa.dots or []), ylabel="kappa",
              note="Ratio of mean squared norms. Far from 1, the optimal baseline differs from the mean reward.",
              levels=[Level(1, "equal norms")]),
    ]  # fmt: skip


def selection(record: RunRecord) -> list[str]:
    """Draw the share of completions trained on, and what leaving out the others added; none where all were."""
    trained = _averaged(record.steps, "completions/trained_ratio", "trained on")
    if all(value == 1 for value in trained.dots or ()):
        return []
    note = "The others were only sampled, which saves a forward and a backward of each."
    drawn = [chart("Completions trained on", [trained], ylabel="share of completions", note=note)]
    labels = {
        "added_variance": "predicted", "added_variance/measured": "measured",
        "added_variance/of_gradient": "measured, of the gradient",
    }  # fmt: skip
    lines = [_line(record.steps, key, label) for key, label in labels.items()]
    if any(line.x for line in lines):
        note = (
            "Relative to the noise of single completions, as predicted before the forward and as measured by the "
            "ledger; and relative to the whole variance of the gradient."
        )
        drawn.append(chart("Variance added by training on fewer", lines, ylabel="share", note=note))
    return drawn


def lengths(record: RunRecord) -> list[str]:
    """Draw completion lengths over the run, and the share that was cut, if any was."""
    mean = _averaged(record.steps, "completions/mean_length", "mean length")
    limit = record.whole("max_completion_length")
    near = limit and any(value and value > limit / 2 for value in mean.y)
    cut = _averaged(record.steps, "completions/clipped_ratio", "cut")
    note = f"Mean over the completions of a step (dots) and over {WINDOW} steps (line), end token included."
    drawn = [
        chart("Completion length", [mean], ylabel="tokens", note=note, levels=[Level(limit, "limit")] if near else [])
    ]
    if any(cut.dots or ()):
        note = "Cut at max_completion_length and scored as they are: raise it if the share grows."
        drawn.append(chart("Truncated completions", [cut], ylabel="share of completions", note=note))
    return drawn


def further(record: RunRecord) -> list[str]:
    """Draw the other metrics that the run has."""
    steps = record.steps
    kinds = (
        ("Entropy", "entropy", "nats per token", "Of the sampling distribution. At 0 nothing is explored any more."),
        ("Change of the policy", "step_kl", "nats per step", "KL(before || after) of a completion, on its own tokens."),
        ("Intended change", "step_kl_target", "nats per step", "How far the schedule meant the policy to move."),
        ("Gradient norm", "grad_norm", "‖g‖", "Of the batch, before clipping."),
        ("Sampler mismatch", "sampling/sequence_logp_difference/mean", "nats per completion",
         "|log π - log sampler|, mean over completions."),
        ("Completions without a reward", "completions/masked_ratio", "share", "Excluded wherever rewards are used."),
        ("Time", "step_time", "seconds per step", "Sampling, gradient, update, and evaluation where there was one."),
    )  # fmt: skip
    drawn = []
    for title, key, unit, note in kinds:
        line = _line(steps, key, title)
        if any(line.y):
            drawn.append(chart(title, [line], logarithmic=_wide(line.y), ylabel=unit, note=note))
    return drawn


def reward_line(steps: Sequence[Metrics]) -> Line:
    """Return the moving average of the batches' rewards, its interval from their standard errors over prompts."""
    rewarded = [row for row in steps if row.get("reward") is not None]
    errors = [row.get("reward_stderr") for row in rewarded]
    margins: list[float | None] = []
    for part in around(len(rewarded), WINDOW):
        squares = [error**2 for error in errors[part] if error is not None]
        whole = len(squares) == part.stop - part.start
        margins.append(Z95 * math.sqrt(statistics.fmean(squares) / len(squares)) if whole else None)
    return _with_margins(_averaged(rewarded, "reward", "reward of the batch"), margins)


def _with_margins(line: Line, margins: Sequence[float | None]) -> Line:
    pairs = list(zip(line.y, margins, strict=True))
    low = [None if y is None or margin is None else y - margin for y, margin in pairs]
    high = [None if y is None or margin is None else y + margin for y, margin in pairs]
    return replace(line, low=low, high=high)


def _line(rows: Sequence[Metrics], key: str, label: str) -> Line:
    """Return the course of a metric, over the steps that have it."""
    rows = [row for row in rows if key in row]
    return Line(label, [row["step"] for row in rows], [row[key] for row in rows])


def _averaged(rows: Sequence[Metrics], key: str, label: str) -> Line:
    """Return the moving average of a metric, its values as dots; values that are missing are left out.

    Averages of whole windows only are kept, if there are any: those at the ends are of fewer steps, and jump.
    """
    rows = [row for row in rows if row.get(key) is not None]
    values = [row[key] for row in rows]
    half = WINDOW // 2 if len(rows) > WINDOW else 0
    last = len(rows) - half
    averages = [value if half <= place < last else None for place, value in enumerate(smooth(values, WINDOW))]
    return Line(label, [row["step"] for row in rows], averages, dots=values)


def _wide(values: Sequence[float | None]) -> bool:
    present = [value for value in values if value]
    return bool(present) and min(present) > 0 and max(present) > WIDE * min(present)
