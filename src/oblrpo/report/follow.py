"""`oblrpo report --follow` writes the page again and again while the run trains."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from oblrpo.errors import InputError
from oblrpo.report.page import write_record
from oblrpo.report.record import RunRecord, read_run


def follow(run: Path, output: Path, seconds: int, show: Callable[[str], None]) -> Path | None:
    """Write the page whenever the run's files have changed, until its last step, its failure or Ctrl-C.

    It returns the page's path, or None if the run never began. A run may be stopped, and resumed from an earlier step,
    meanwhile: the page shows what is there. A page of a run in progress asks the browser to reload it; the last one
    written does not.
    """
    record, seen = None, None
    show(f"following {run}; press Ctrl-C to stop")
    try:
        while True:
            if not run.is_dir():
                raise InputError(f"{run} is not a folder; give the folder of a run that has been started.")
            now = _signature(run)
            if now != seen:
                record, seen = _render(run, output, seconds, show) or record, now
            if record is not None and record.ended:
                return output
            time.sleep(seconds)
    except KeyboardInterrupt:
        return write_record(record, output) if record is not None else None


def _render(run: Path, output: Path, seconds: int, show: Callable[[str], None]) -> RunRecord | None:
    record = read_run(run)
    if record is None:
        show("no finished step yet")
        return None
    write_record(record, output, 0 if record.ended else seconds)
    reward = record.steps[-1]["reward"] if record.steps else None
    rewarded = "" if reward is None else f", reward {reward:.3f}"
    show(f"step {record.done} of {record.settings.get('steps')}{rewarded}")
    return record


def _signature(run: Path) -> tuple[object, ...]:
    """Return what changes whenever metrics, settings or a failure do: file, size, time of the last write."""

    def of(path: Path) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    return of(run / "metrics.jsonl"), of(run / "config.yaml"), of(run / "failure.txt")
