"""A condition has one name and one sentence: on the console, on the page of a run, and in `oblrpo diagnose`."""

import ast
import re
from pathlib import Path

import pytest

import oblrpo
from oblrpo.diagnosis import CONDITIONS, Finding, Watch, diagnose
from oblrpo.diagnosis.condition import Reading
from oblrpo.report.html import markup
from oblrpo.report.page import write_report
from oblrpo.tables.metrics import METRICS
from oblrpo.trainer.loop import Monitors
from tests.metric_rows import metric_of
from tests.report.conftest import row


def found(condition, follows=()):
    """It, found in step 3, in words that no other condition has."""
    words = f"{condition.name} it is.", f"Mend {condition.name}."
    return Finding(condition, Reading(1.0, 0.0, 2, {}), 3, 3, *words, follows=list(follows))


@pytest.fixture
def all_of_them(monkeypatch):
    """A run in which every condition holds, and the next one comes with each that is wrong."""
    after = dict(zip(CONDITIONS, [*CONDITIONS[1:], CONDITIONS[0]], strict=True))
    findings = [found(each, [found(after[each])] if each.wrong else []) for each in CONDITIONS]
    monkeypatch.setattr(Watch, "findings", property(lambda self: findings))
    monkeypatch.setattr(Watch, "observe", lambda self, row: findings)
    return findings


def test_the_page_shows_what_diagnose_shows(write_run, all_of_them):
    run = write_run([row(step) for step in range(1, 4)], steps=3)
    page, said = write_report(run).read_text(), str(diagnose(run))
    for finding in all_of_them:
        heading = f"{finding.name}, {finding.when}"
        assert f"{heading}." in page if finding.wrong else f"<li>{heading}. {finding}</li>" in page
        assert heading in said
        assert markup("{}", finding.cure) in page
        assert finding.cure in said
        for each in finding.follows:
            below = f"{each.name}, {each.when}. {each.sentence}"
            assert f"<li>{below}</li>" in page
            assert f"   -  {below}\n" in said
    headings = set(re.findall(r"^ *(\S.*):$", said, re.MULTILINE))  # of lists
    assert all(f"{words}:<ul>" in page for words in headings)


def test_the_console_names_what_is_wrong_as_diagnose_does(all_of_them):
    printed = Monitors().observe({"step": 3, "reward": 0.5})
    assert printed == [f"{each.name}: {each}" for each in all_of_them if each.wrong and not each.condition.updated]


def test_nobody_else_spells_their_names():
    """They are names of the table's rows, which the diagnosis knows them by; elsewhere they would grow old."""
    source, names = Path(oblrpo.__file__).parent, {each.name for each in CONDITIONS}
    assert {name for each in CONDITIONS for name in each.brings} <= names
    for path in {*source.rglob("*.py")} - {*(source / "diagnosis").glob("*.py")}:
        spelt = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)} & names
        assert not spelt - {"solved"}, path  # that is a word, too


def test_conditions_read_metrics_of_the_table():
    assert all(metric_of(column) for condition in CONDITIONS for column in condition.columns)


def test_names_in_verl_are_those_of_the_table():
    known, adapter = {metric.verl for metric in METRICS}, Path(oblrpo.__file__).parent / "adapters" / "verl"
    for path in adapter.glob("*.py"):
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert {text for text in texts if re.fullmatch(r"(actor|critic)/\S+", str(text))} <= known, path
