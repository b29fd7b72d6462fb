"""The N SNR of several policies of one run, each measured alone, and its mean over them.

    python -m lab.looks runs/demo --checkpoints 8 --prompts 1024

A look (`oblrpo diagnose --look`) at each of the newest checkpoints that are not damaged, on prompts of its own: shared
ones would make the looks err together, and the interval of their mean too narrow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from oblrpo.intervals import mean
from oblrpo.runs import RunFolder
from oblrpo.trainer.look import BATCHES, Findings, look


def looks_at(run: Path, checkpoints: int, prompts: int) -> list[Findings]:
    """Looks at so many policies, the newest first; fewer where fewer are kept."""
    folder = RunFolder(run)
    whole = [step for step in reversed(folder.checkpoint_steps()) if not folder.wrong_with(step)]
    return [look(run, prompts, step, place * BATCHES) for place, step in enumerate(whole[:checkpoints])]


def table(found: list[Findings]) -> str:
    """A line a policy, and their mean with a 95 % interval over policies, which may be negative by chance."""
    lines = ["| step | N SNR of this policy | its critical batch | the run's own N SNR |", "|---|---|---|---|"]
    rows: list[tuple[str, float, float, float, float | None]] = [
        (str(each.step), each.n_snr, each.n_snr_low, each.n_snr_high, each.run_n_snr) for each in found
    ]
    if len(found) > 1:
        of_all = mean([each.n_snr_signed for each in found])
        rows.append(("mean", *(max(0.0, each) for each in (of_all.value, of_all.low, of_all.high)), None))
    prompts = found[0].run_prompts
    for step, n_snr, low, high, logged in rows:
        critical = "no signal"
        if n_snr > 0:
            most = f"to {prompts / low:.0f}" if low > 0 else "or more"
            critical = f"{prompts / n_snr:.0f} ({prompts / high:.0f} {most})"
        own = "" if logged is None else f"{logged:.2f}"
        lines.append(f"| {step} | {n_snr:.2f} ({low:.2f} to {high:.2f}) | {critical} | {own} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=0, help="as of `oblrpo diagnose --look`")
    asked = parser.parse_args()
    print(table(looks_at(asked.run, asked.checkpoints, asked.prompts)))


if __name__ == "__main__":
    main()
