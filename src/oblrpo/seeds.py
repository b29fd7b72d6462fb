"""Seeds that do not depend on what was drawn before."""

import zlib


def seed_of(seed: int, step: int) -> int:
    """A seed of its own for every step of every run."""
    return zlib.crc32(f"{seed}/{step}".encode()) << 1
