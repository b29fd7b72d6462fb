"""Loading torch and transformers without Python's collector of reference cycles."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Collect no cycles while libraries are imported within, and leave what they made out of every later collection.

    Nearly nothing of it is ever garbage, and the collector went through it again and again: a third of what a dry run
    took, half of that at its end (measured). Where torch is there already the collector stays as it is, for it may be
    another program that called us, with garbage of its own.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
