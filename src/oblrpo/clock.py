"""What a run's time goes for."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by what they went for: those of a part within another are not the other's."""

    def __init__(self) -> None:
        self._spent = defaultdict[str, float](float)
        self._inside: list[float] = []  # what went for parts within each part that has not ended

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds until the `with` is left; as a decorator, those of every call."""
        begun = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            self._spent[name] += seconds - self._inside.pop()
            if self._inside:
                self._inside[-1] += seconds

    def lap(self) -> dict[str, float]:
        """The seconds of every part since the last lap, as metrics `time/NAME`."""
        spent, self._spent = self._spent, defaultdict[str, float](float)
        return {f"time/{name}": seconds for name, seconds in spent.items()}
