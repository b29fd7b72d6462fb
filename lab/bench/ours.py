"""The score tape's methods, as rows beside their rivals: each returns norms and leaves the gradient in `.grad`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lab.bench.rivals import Rival, Run
from lab.bench.workload import Workload
from oblrpo.scores import ScoreTape


def _method(method: str = "auto", norms: bool = True, kept: bool = True) -> Rival:
    """The row of a method, by one tape that is kept or by a new one in each step."""

    @contextmanager
    def prepared(workload: Workload) -> Iterator[Run]:
        one_tape = ScoreTape(workload.model, method)

        def run() -> Tensor | None:
            tape = one_tape if kept else ScoreTape(workload.model, method)
            with tape:
                logps_S = workload.logps()
                tape.record(logps_S)
                del logps_S  # with its graph it would keep activations
            norm2_S = tape.norm2() if norms else None
            tape.accumulate(workload.coef_S, workload.group_size)
            return norm2_S

        yield run

    return Rival(prepared)


OURS: dict[str, Rival] = {
    "exact (auto)": _method(),
    "exact, a new tape each step": _method(kept=False),
    "exact, Gram": _method("gram"),
    "exact, instantiate": _method("instantiate"),
    "calibrated proxy, no norms": _method(norms=False),
}
"""The score tape's methods, by the name of their row. The last takes its baseline weights from a forward alone."""
