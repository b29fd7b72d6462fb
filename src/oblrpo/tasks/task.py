"""What a task is: problems to train on, problems kept apart, and a verifier."""

import hashlib
import random
from dataclasses import dataclass
from typing import Protocol

from oblrpo.errors import InputError


@dataclass(frozen=True)
class Problem:
    """One question: the prompt shown to the policy and what the verifier needs, both as text."""

    prompt: str
    answer: str


class Task(Protocol):
    """A source of problems with a verifiable reward."""

    @property
    def name(self) -> str:
        """Short name used in configs, logs and reports."""

    def train_batch(self, step: int, size: int) -> list[Problem]:
        """Return the `size` problems of one training step, a pure function of seed, step and size."""

    def heldout(self, size: int) -> list[Problem]:
        """Return `size` problems that no training batch contains, whatever the seed."""

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the completion solves the problem, otherwise 0.0; never raises."""


class Demonstrator(Task, Protocol):
    """A task that can also write worked solutions, for a supervised warm start."""

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return one worked solution, in which each step goes wrong with probability `noise`."""


def split_position(key: str) -> float:
    """Return the fixed place of `key` in [0, 1); the places below the held-out fraction are held out."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def check_whole(what: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` if it is a whole number from `low` to `high`.

    Raises:
        InputError: it is not; the message names `what`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high):
        return value
    span = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise InputError(f"{what} must be a whole number {span}, got {value!r}.")
