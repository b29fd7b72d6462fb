"""What identifies a run, beside its settings."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oblrpo.errors import InputError


@dataclass(frozen=True)
class Identity:
    """A word of the run's own, which each of its checkpoints carries, and what it learns from."""

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """The word, by chance."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of everything that its settings name and do not hold: data and rewards."""
    left: Mapping[str, str] = field(default_factory=dict)
    """The same of rewards that carry other values since the run used them, such as a count of their calls."""

    def plain(self) -> dict[str, Any]:
        """The identity as it stands in `config.yaml`."""
        return {"run": self.run, "sources": dict(self.sources)} | ({"left": dict(self.left)} if self.left else {})

    @classmethod
    def read(cls, plain: Any, place: str) -> Identity:
        """The identity that `plain` gave."""
        try:
            kinds = (plain["sources"], plain.get("left", {}))
            return cls(str(plain["run"]), *({str(name): str(sum_) for name, sum_ in kind.items()} for kind in kinds))
        except (TypeError, KeyError, AttributeError):
            raise InputError(f"{place}: identity is not what the run wrote; put it back as it was.") from None

    def changed(self, sources: Mapping[str, str]) -> list[str]:
        """Names of the sources that are known and not what they were, or cannot be had any more."""
        known = {name: {digest, self.left.get(name, digest)} for name, digest in self.sources.items()}
        return [name for name, digests in known.items() if sources.get(name) not in digests]

    def resumed(self, sources: Mapping[str, str]) -> Identity:
        """The identity of the run as it resumes with these sources; those that have not changed are kept."""
        changed = self.changed(sources)
        kept = {name: digest for name, digest in self.sources.items() if name not in changed}
        return replace(self, sources={**sources, **kept}, left={})
