"""Mathematical answers: where they stand in a completion, and whether they equal the gold answer."""

from oblrpo.tasks.grading.extract import extract_answer, last_box
from oblrpo.tasks.grading.verifier import MathVerifier, Verdict

__all__ = ["MathVerifier", "Verdict", "extract_answer", "last_box"]
