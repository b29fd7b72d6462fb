"""`python -m lab.theory` as a whole: what holds, what does not, how long it takes, what it writes."""

import html.parser
import os
import re

import pytest

from lab.theory import run_all
from lab.theory.claims import Claim
from lab.theory.console import REASONS
from lab.theory.suite import Findings


@pytest.fixture(scope="module")
def findings():
    return run_all()


def test_what_holds_holds_and_what_is_false_has_a_counterexample(findings):
    assert {claim.result for claim in findings.claims if not claim.holds} == set(REASONS)
    assert not [claim.result for claim in findings.claims if claim.undecided]
    for number in range(1, 8):
        assert any(claim.result.startswith(f"T{number}:") for claim in findings.claims)
    for number in range(1, 5):
        assert any(claim.result.startswith(f"A{number}:") for claim in findings.claims)
    assert all(claim.note for claim in findings.claims)


def test_identities_hold_to_ten_digits_of_what_they_are_about(findings):
    identities = [claim for claim in findings.claims if claim.relation == "=" and claim.tolerance == 1e-10]
    exact = [claim for claim in identities if claim.holds and not claim.margin]
    assert len(exact) > 35
    assert max(claim.slack for claim in exact) < 1e-10
    assert all(claim.claimed for claim in exact)  # nothing is compared with 0


def test_the_claims_that_fail_fail_by_more_than_chance(findings):
    for claim in findings.claims:
        if not claim.holds:
            assert abs(claim.computed - claim.claimed) > max(claim.margin, 0.05 * abs(claim.claimed)), claim


def test_what_was_sampled_has_an_interval(findings):
    sampled = [claim for claim in findings.claims if re.search(r"\bruns of|batches$|random .*bandits", claim.note)]
    assert len(sampled) >= 8
    assert all(claim.margin > 0 for claim in sampled)
    slopes = [each for each in findings.measurements if each.what.startswith("slope")]
    assert {each.where for each in slopes} >= {
        f"{slide}, {rate}"
        for slide in ("solvable", "flat maximum")
        for rate in ("schedule", "fixed 1/c", "fixed 0.1/c")
    }
    assert all(each.margin > 0 for each in slopes)


def test_the_command_prints_one_screen_with_every_reason(lab, tmp_path, monkeypatch, findings):
    monkeypatch.setattr("lab.theory.run_all", lambda note: findings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = lab("theory")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) < 70
    assert max(map(len, lines)) <= 110
    assert all(" ".join(reason.split()) in " ".join(out.split()) for reason in REASONS.values())
    assert not list(tmp_path.iterdir())


def test_the_command_prints_every_row_and_writes_a_page(lab, tmp_path, monkeypatch, findings):
    monkeypatch.setattr("lab.theory.run_all", lambda note: findings)
    monkeypatch.setenv("COLUMNS", "250")
    code, out, _ = lab("theory", "--all", "--output", tmp_path / "page.html")
    assert code == 0
    assert "T7: b* = E[w F] / E[w]" in out
    count = len(findings.claims)
    failing = sum(not claim.holds for claim in findings.claims)
    assert f"{count} statements, {count - failing} hold" in out
    assert "slope of mean ||grad J||^2 over the last decade of T" in out
    assert "±" in out
    page = (tmp_path / "page.html").read_text()
    html.parser.HTMLParser().feed(page)
    assert page.count("<svg") == len(findings.curves) + len(findings.ascents)
    assert page.count("does not hold</b>") == failing
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>', "", page).replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--threads", "0"], "threads is 0"),
        (["--threads", "9999999999999"], "threads is 9999999999999"),
        (["--threads", str((os.cpu_count() or 1) + 1)], "it must be at least 1 and at most"),
        (["--output", "no/such/folder.html"], "cannot write"),
        (["--output", "TMP"], "not a regular file"),
        (["--output", "TMP/" + "a" * 300], "cannot write"),
        (["--output", "TMP/a\0.html"], "cannot write"),
        (["--output", "TMP/pipe"], "not a regular file"),
        (["--output", "TMP/link"], "not a regular file"),
    ],
)
def test_bad_input_is_refused_before_the_work(lab, arguments, word, tmp_path, monkeypatch):
    monkeypatch.setattr("lab.theory.run_all", lambda note: pytest.fail("the work was begun"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    code, _, err = lab("theory", *[each.replace("TMP", str(tmp_path)) for each in arguments])
    assert code == 2
    assert word in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_the_page_replaces_an_old_one_and_leaves_nothing_beside_it(lab, tmp_path, monkeypatch):
    monkeypatch.setattr("lab.theory.run_all", lambda note: Findings([Claim("x", "y", 1.0, 2.0, note="n")], [], [], []))
    (tmp_path / "page.html").write_text("old")
    code, out, _ = lab("theory", "--output", tmp_path / "page.html")
    assert code == 0
    assert "1 statements, 0 hold" in out
    assert "does not hold" in (tmp_path / "page.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
