"""The verdicts on the cases of answers.jsonl, which were kept apart while the grader was written."""

import json
from pathlib import Path

from oblrpo.tasks.grading import MathVerifier

CASES = [json.loads(line) for line in Path(__file__).with_name("answers.jsonl").read_text("utf-8").splitlines()]


def test_few_answers_are_graded_wrong_and_hardly_one_is_accepted_wrongly():
    completions = [case.get("completion") or rf"\boxed{{{case['answer']}}}" for case in CASES]
    with MathVerifier(processes=2) as verifier:
        verdicts = verifier.grade([case["gold"] for case in CASES], completions)
    wrong = [case for case, verdict in zip(CASES, verdicts, strict=True) if verdict.correct != case["right"]]
    assert sum(not case["right"] for case in wrong) <= 1, wrong
    assert len(wrong) <= 15, wrong
