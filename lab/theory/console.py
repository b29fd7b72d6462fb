"""`python -m lab.theory` on the console: one screen of verdicts with what fails and why, or every row."""

from __future__ import annotations

import re

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lab.theory.claims import Claim, Measurement

SUBJECTS = {
    "A1": "a baseline leaves its own output out",
    "A2": "||grad^2 log pi|| has one bound L",
    "A3": "||grad log pi||^2 has one bound M",
    "A4": "the baseline is bounded",
    "T1": "the gradient is unbiased",
    "T2": "its covariance is H / N",
    "T3": "the loss bound of one step",
    "T4": "the learning rate that the bound likes best",
    "T5": "the steps' total decrease",
    "T6": "the mean squared gradient falls as T^-1/2",
    "T7": "the variance-optimal baseline b*",
    "": "what follows from them, and what others take for true",
}
"""The paper's assumptions (A) and theorems (T), and the statements that it does not number."""

REASONS = {
    "A1: the other baselines do too": "Baselines from the whole group know the output they are subtracted from, so the "
    "gradient is biased. The rivals are mean, grpo, dr_grpo, reinforce_pp, opo, otb, eob and vcpo.",
    "A2: one L for all parameters of a network": "A network's second derivatives grow without end as its parameters "
    "grow. The theorems hold along a path, with the constants of that path.",
    "A3: one M for all parameters of a network": "The same is true of its squared score norms.",
    "without signal the plug-in factor is 1/2, to 0.01": "In one dimension it is 0.356. In 64 dimensions it is 0.496.",
    "c <= B L + B^2 M, small rewards": "The paper's smoothness constant is not homogeneous in the reward: B^2 M "
    "vanishes before B L does. osc(F) L holds everywhere.",
    "k3 as a loss: grad KL(pi||ref)": "Its gradient is that of KL(ref||pi).",
    "k1 as a loss: grad KL(pi||ref)": "Its gradient is 0 in the mean.",
    "T6 for the norm: mean E||grad J|| = O(T^-1/2)": "The theorem is about the mean squared norm. The norm itself may "
    "fall as slowly as T^-3/8.",
    "in-sample exact weights are unbiased": "OPO, OTB and VCPO weigh an output by a mean that contains it. Leaving it "
    "out costs nothing and removes the bias.",
    "the expansion tells who wins, errors of b alone": "In groups of 4 with widely spread weights, more than half of "
    "the wins that the expansion promises leave-one-out over RLOO are none.",
    "the expansion tells who wins, with the mutual terms": "The same is true with the terms between outputs.",
    "truncated weights: a baseline changes no mean": "Under importance weights that are cut off, a baseline b adds "
    "-E[b] E[rho_cut s].",
}
"""Why a statement does not hold, in words, by the statement."""


def print_summary(claims: list[Claim], console: Console) -> None:
    """Print what holds by subject, then each statement that does not, with its figures and the reason."""
    verdicts = Table(box=None, pad_edge=False, header_style="bold")
    verdicts.add_column("")
    verdicts.add_column("statements about")
    for verdict in ("hold", "do not", "open"):
        verdicts.add_column(verdict, justify="right", no_wrap=True)
    for number, subject in SUBJECTS.items():
        mine = [claim.verdict for claim in claims if _number(claim) == number]
        counts = [mine.count(verdict) for verdict in ("holds", "does not hold", "undecided")]
        verdicts.add_row(number, subject, *(str(count or "") for count in counts))
    console.print(verdicts)
    console.print("\nThese do not hold:", style="bold")
    for at, claim in enumerate((claim for claim in claims if not claim.holds), 1):
        claimed, computed, _ = figures(claim)
        console.print(f"{at:2}. {claim.result}: claimed {claimed}, computed {computed}.", style="yellow")
        console.print(Padding(REASONS.get(claim.result, claim.note), (0, 0, 0, 4)))


def print_claims(claims: list[Claim], console: Console) -> None:
    """Print every statement with its figures, and intervals where something was sampled."""
    printed = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    printed.add_column("statement", ratio=3)
    printed.add_column("where", ratio=2)
    for name in ("claimed", "computed", "verdict"):
        printed.add_column(name, justify="right", no_wrap=True)
    for claim in claims:
        claimed, computed, _ = figures(claim)
        verdict = {"does not hold": "does not"}.get(claim.verdict, claim.verdict)
        style = None if claim.holds else "yellow"
        printed.add_row(claim.result, claim.where, claimed, computed, verdict, style=style)
    console.print(printed)


def print_measurements(measurements: list[Measurement], console: Console) -> None:
    """Print one line for each measurement."""
    printed = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for name, ratio in (("measured, nothing claimed", 3), ("where", 2)):
        printed.add_column(name, ratio=ratio)
    printed.add_column("value", justify="right", no_wrap=True)
    printed.add_column("note", ratio=2)
    for each in measurements:
        printed.add_row(each.what, each.where, with_margin(each.value, each.margin), each.note)
    console.print(printed)


def figures(claim: Claim) -> tuple[str, str, str]:
    """What is claimed, what came out, and the slack, as text."""
    computed = with_margin(claim.computed, claim.margin)
    return f"{claim.relation} {claim.claimed:.5g}", computed, f"{claim.slack:.1e}"


def with_margin(value: float, margin: float) -> str:
    """A number with its interval, if it has one."""
    return f"{value:.5g} ± {margin:.1g}" if margin else f"{value:.5g}"


def _number(claim: Claim) -> str:
    """The paper's number of a statement, such as T4, or nothing."""
    found = re.match(r"[AT]\d", claim.result)
    return found[0] if found else ""
