"""`oblrpo theory` as a whole: what holds, what does not, how long it takes, what it writes."""

import html.parser
import re

import pytest

from oblrpo.theory import run_all
from oblrpo.theory.claims import Claim, worst
from tests.cli.conftest import oblrpo  # noqa: F401

FALSE = {
    "c <= B L + B^2 M, small rewards",
    "T6: the mean gradient norm falls as T^-1/2 or faster",
    "in-sample exact weights are unbiased",
}


@pytest.fixture(scope="module")
def findings():
    return run_all()


def test_what_holds_holds_and_what_is_false_has_a_counterexample(findings):
    assert {claim.result for claim in findings.claims if not claim.holds} == FALSE
    for number in range(1, 8):
        assert any(claim.result.startswith(f"T{number}:") for claim in findings.claims)
    assert all(claim.note for claim in findings.claims)


def test_identities_hold_to_ten_digits(findings):
    identities = [claim for claim in findings.claims if claim.relation == "=" and claim.holds]
    assert len(identities) > 20
    assert max(claim.slack for claim in identities) < 1e-10


def test_the_claims_that_fail_fail_by_more_than_chance(findings):
    norm = next(
        claim for claim in findings.claims if claim.result.startswith("T6: the mean gradient") and not claim.holds
    )
    slope, margin = map(float, re.search(r"slope (\S+) \+- (\S+)", norm.note).groups())
    assert slope - margin > -0.5
    constant = next(claim for claim in findings.claims if claim.result == "c <= B L + B^2 M, small rewards")
    assert constant.computed > 1.2 * constant.claimed


def test_the_command_prints_a_table_and_writes_a_page(oblrpo, tmp_path, monkeypatch, findings):  # noqa: F811
    monkeypatch.setattr("oblrpo.theory.run_all", lambda note: findings)
    monkeypatch.setenv("COLUMNS", "250")
    code, out, _ = oblrpo("theory", "--output", tmp_path / "page.html")
    assert code == 0
    assert "T7: b* = E[w F] / E[w]" in out
    count = len(findings.claims)
    failing = sum(not claim.holds for claim in findings.claims)
    assert f"{count} statements, {count - failing} hold, {failing} do not" in out
    page = (tmp_path / "page.html").read_text()
    html.parser.HTMLParser().feed(page)
    assert page.count("<svg") == len(findings.curves) + len(findings.ascents)
    assert page.count("does not hold</b>") == failing
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>', "", page).replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("arguments", "word"), [(["--threads", "0"], "threads is 0"), (["--output", "no/such/folder.html"], "cannot write")]
)
def test_bad_input(oblrpo, arguments, word):  # noqa: F811
    code, _, err = oblrpo("theory", *arguments)
    assert code == 2
    assert word in err


@pytest.mark.parametrize(
    ("relation", "claimed", "computed", "holds"),
    [
        ("=", 0.0, 1e-11, True), ("=", 0.0, 1e-9, False), ("=", 1e6, 1e6 + 1e-5, True), ("=", 1.0, float("nan"), False),
        ("<=", 1.0, 0.9, True), ("<=", 1.0, 1.0, True), ("<=", 1.0, 1.01, False), ("<=", 1.0, float("nan"), False),
        (">=", 1.0, 1.1, True), (">=", 1.0, 0.99, False),
    ],
)  # fmt: skip
def test_verdicts_are_computed(relation, claimed, computed, holds):
    claim = Claim("", "", claimed, computed, relation)
    assert claim.holds == holds
    assert claim.verdict == ("holds" if holds else "does not hold")


def test_the_worst_claim_is_the_one_that_says_most():
    equal = [Claim("", "", 0.0, gap) for gap in (1e-12, 1e-3, 1e-16)]
    assert worst(equal).computed == 1e-3
    bounds = [Claim("", "", 1.0, value, "<=") for value in (0.5, 1.2, 0.9)]
    assert worst(bounds).computed == 1.2
    assert not worst([*bounds, Claim("", "", 1.0, float("nan"), "<=")]).holds
