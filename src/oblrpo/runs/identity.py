"""What tells a run from others, beside its settings."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oblrpo.errors import InputError


@dataclass(frozen=True)
class Identity:
    """A word of the run's own, which each of its checkpoints carries, and what it learns from."""

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """The word, by chance; empty of a run that was begun by version 0.2 or earlier."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of everything that its settings name and do not hold: data and the source of rewards."""

    def plain(self) -> dict[str, Any]:
        """The identity as it stands in `config.yaml`."""
        return {"run": self.run, "sources": dict(self.sources)}

    @classmethod
    def read(cls, plain: Any, place: str) -> Identity:
        """The identity that `plain` gave; None is that of a run of an earlier version."""
        if plain is None:
            return cls("")
        try:
            sources = {str(name): str(digest) for name, digest in plain["sources"].items()}
            return cls(str(plain["run"]), sources)
        except (TypeError, KeyError, AttributeError):
            raise InputError(f"{place}: identity is not what the run wrote; put it back as it was.") from None

    def changed(self, sources: Mapping[str, str]) -> list[str]:
        """Names of the sources that are known and not what they were, or cannot be had any more."""
        return [name for name, digest in self.sources.items() if sources.get(name) != digest]
