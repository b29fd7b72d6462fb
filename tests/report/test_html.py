"""Text of anybody's in a page."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

from oblrpo.report.charts import Line, chart
from oblrpo.report.html import markup, render
from oblrpo.report.page import write_report
from tests.report.conftest import row

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def text(plain):
    """It as a page has it."""
    return str(markup("{}", plain))


NAMES = ["nul\x00", "pay \u202eeurt", "red\x1b[31m", "half \ud800", "$\\frac$", "<script>alert(1)</script>"]
"""Keys of metrics that a reward, a baseline or another trainer's log may bring."""

SHOWN = ["nul\\u0000", "pay \\u202eeurt", "red\\u001b[31m", "half \\ud800", "$\\frac$", "<script>alert(1)</script>"]


@pytest.fixture
def hostile(write_run):
    """The page of a run whose ledger has such names."""
    ledger = {f"variance/{name}": 2.0 for name in ("rloo", *NAMES)}
    return write_report(write_run([row(step, **ledger) for step in (1, 2, 3)]))


def test_names_in_drawings_are_text(hostile):
    page = hostile.read_text("utf-8")
    printed = {
        element.text
        for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL)
        for element in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")
    }
    assert printed >= set(SHOWN)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]|<script", page)


@pytest.mark.skipif(not BROWSER, reason="no Chromium")
def test_a_browser_sees_names_as_text(hostile, tmp_path):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", hostile.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    for name in SHOWN:
        assert f">{text(name)}</text>" in done.stdout
    assert "<script" not in done.stdout


def test_names_of_another_trainer_are_text(tmp_path):
    logged = [{"step": 1, "reward": 0.5} | {f"variance/{name}": 2.0 for name in ("rloo", *NAMES)}]
    state = {"log_history": logged, "max_steps": 1}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    page = write_report(tmp_path).read_text("utf-8")
    assert all(f">{text(name)}</text>" in page for name in SHOWN)


def test_a_line_of_any_name_has_numbers_at_its_axes():
    drawn = chart("t", [Line(name, [1, 100], [1e-9, 1.0]) for name in NAMES], logarithmic=True, log_x=True)
    assert all(f">{text(name)}</text>" in drawn for name in SHOWN)
    assert "mathdefault" not in drawn


@pytest.mark.parametrize(
    ("plain", "shown"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("\" onload='x'", "&#34; onload=&#39;x&#39;"),
        ("a\x00b", r"a\u0000b"),
        ("pay \u202eeurt", r"pay \u202eeurt"),
        ("\u2067x\u2069", r"\u2067x\u2069"),
        ("a\u200bb\u2028c\U000e0041", r"a\u200bb\u2028c\ue0041"),
        ("half \ud800", r"half \ud800"),
        ("lines\n\tand שלום, 日本, é stay", "lines\n\tand שלום, 日本, é stay"),
    ],
)
def test_text_does_nothing_to_the_page(plain, shown):
    assert text(plain) == shown
    page = render("page.html", title=plain, reload_seconds=0)
    assert f"<title>{shown}</title>" in page
    page.encode()
