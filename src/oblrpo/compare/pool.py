"""Worker processes, spoken to in JSON lines; one that dies takes its run with it and nothing else."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

Event = dict[str, Any]

HERE = Path(__file__).parent.parent.parent
"""What Python must search to find this very package."""


class Worker:
    """One process, in a session of its own: Ctrl-C reaches the parent alone, who ends the others in order."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - what it prints while it works on no run, until `close`
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "oblrpo.compare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self._unread = b""

    def send(self, request: dict[str, Any]) -> None:
        """Ask for something; a worker that has died is noticed when it is listened to."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[Event]:
        """What it has told since; `died` when it is gone."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            return [{"event": "died", "message": self._last_words()}]
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def dismiss(self) -> None:
        """Let it end, after the step in progress if there is one."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        """Wait for its end and let go of its pipes."""
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        code = self.process.wait()
        if code < 0:
            how = signal.Signals(-code).name
            return f"its process was ended by {how}" + (" (out of memory?)" if how == "SIGKILL" else "")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended with exit code {code}"


class Pool:
    """Workers by number; a dead one is replaced when something is to be done."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.workers: set[Worker] = set()

    def start(self) -> Worker:
        """One more worker."""
        worker = Worker()
        assert worker.process.stdout is not None
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        self.workers.add(worker)
        return worker

    def events(self, seconds: float) -> list[tuple[Worker, Event]]:
        """What workers have told, waiting for at most so long; a worker that died is in the pool no more."""
        told: list[tuple[Worker, Event]] = []
        for key, _ in self._selector.select(seconds):
            for event in key.data.read():
                told.append((key.data, event))
                if event["event"] == "died":
                    self._remove(key.data)
        return told

    def dismiss(self) -> list[tuple[Worker, Event]]:
        """Let all end in order and return their last events; a Ctrl-C meanwhile ends them at once."""
        told = []
        try:
            for worker in self.workers:
                worker.dismiss()
            while self.workers:
                told += self.events(1.0)
        except BaseException:
            self.kill()
            raise
        return told

    def kill(self) -> None:
        """End all at once."""
        for worker in list(self.workers):
            worker.process.kill()
            self._remove(worker)

    def _remove(self, worker: Worker) -> None:
        self._selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        self.workers.discard(worker)
        worker.dismiss()
        worker.close()
