"""Grading mathematical answers: finding them in a completion, and comparing them with the gold answer."""

from oblrpo.tasks.grading.extract import extract_answer, last_box
from oblrpo.tasks.grading.verifier import MathVerifier, Verdict

__all__ = ["MathVerifier", "Verdict", "extract_answer", "last_box"]
