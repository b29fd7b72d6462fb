"""The score tape's methods, as rows beside their rivals: each returns norms and leaves the gradient in `.grad`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lab.bench.rivals import Rival, Run
from lab.bench.workload import Workload
from oblrpo import estimators
from oblrpo.scores import ScoreTape


def _method(method: str = "auto", memory_budget: int = 0, norms: bool = True, kept: bool = True) -> Rival:
    """The row of a method, by one tape that is kept or by a new one in each step."""

    @contextmanager
    def prepared(workload: Workload) -> Iterator[Run]:
        one_tape = ScoreTape(workload.model, method, memory_budget=memory_budget)

        def run() -> Tensor | None:
            tape = one_tape if kept else ScoreTape(workload.model, method, memory_budget=memory_budget)
            with tape:
                logps_S = workload.logps()
                tape.record(logps_S, **_basis(tape, workload))
                del logps_S  # with its graph it would keep activations
            norm2_S = tape.norm2() if norms else None
            tape.accumulate(workload.coef_S, workload.group_size)
            return norm2_S

        yield run

    return Rival(prepared)


def _basis(tape: ScoreTape, workload: Workload) -> dict[str, Any]:
    if tape.method != "folds":
        return {}
    rewards_PG = workload.rewards_S.view(-1, workload.group_size)
    return {"basis_SK": estimators.fold_basis(rewards_PG).flatten(0, 1), "group_size": workload.group_size}


OURS: dict[str, Rival] = {
    "exact (auto)": _method(),
    "exact, a new tape each step": _method(kept=False),
    "exact, Gram": _method("gram"),
    "exact, instantiate": _method("instantiate"),
    "exact, gradients kept": _method(memory_budget=1 << 60),
    "exact, folds": _method("folds"),
    "exact, two_pass": _method("two_pass"),
    "projected": _method("projected"),
    "calibrated proxy, no norms": _method(norms=False),
}
"""The score tape's methods, by the name of their row. The last takes its baseline weights from a forward alone."""
