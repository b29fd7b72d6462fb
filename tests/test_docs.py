"""The code in the documents runs, and their links lead somewhere."""

import doctest
import importlib
import inspect
import json
import re
import shlex
import shutil
import struct
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from lab import pages
from oblrpo.cli.train import _parse
from oblrpo.commands import check_settings
from oblrpo.environments import Environments
from oblrpo.estimators import BASELINES, RATIOS
from oblrpo.rollout import engine
from oblrpo.rollout.episodes import turn_metrics
from oblrpo.settings import AlgorithmConfig, TrainConfig, flags_in
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.tables.metrics import ROW_OF
from oblrpo.tasks.episode import STOPS, Episode
from tests.cli.conftest import dense_reward, no_page, oblrpo, small_run  # noqa: F401
from tests.metric_rows import metric_of

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "oblrpo"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [file for file in sorted(SOURCE.rglob("*.py")) if ">>> " in file.read_text()]


def slug(heading):
    """The anchor of a heading, on GitHub and on the site."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "\n```python\n" in page.read_text()], ids=lambda page: page.name
)
def test_python_blocks_run(page, capsys, tmp_path, monkeypatch):
    """One after the other, in two steps where a run has more; what they write lies in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(re.sub(r"\bsteps=\d+", "steps=2", block), page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if target.startswith("http"):
            continue
        led = page.parent / target if target else page
        assert led.exists(), target
        if anchor and led.suffix == ".md":
            heads = re.findall(r"^#+ (.*)", led.read_text(), re.MULTILINE)
            assert anchor in {slug(head) for head in heads}, f"{target}#{anchor}"


LAB_BOOK = sorted((ROOT / "docs" / "lab_book").glob("*.md"))
PROSE = [page for page in PAGES if page not in LAB_BOOK and page.name not in {"theory.md", "conditions.md"}]
"""Pages that are read from top to bottom; of the others, entries are looked up one by one."""


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_a_page_is_read_in_one_sitting(page):
    """Prose: without code and tables. README is what a stranger reads first."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    words = sum(len(line.split()) for line in text.splitlines() if not line.startswith("|"))
    assert page.name == "CHANGELOG.md" or words <= (500 if page.name == "README.md" else 1200)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_of_docstrings(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted
    assert not failed


def test_the_site_builds_and_all_links_and_anchors_exist(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for folder in ("src", "lab"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [Path(sys.executable).parent / "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout
    assert (tmp_path / "site" / "reference" / "estimators.html").exists()


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in set((ROOT / "docs").rglob("*.md")) - set(LAB_BOOK):
        assert re.search(rf"[ ]{page.relative_to(ROOT / 'docs')}$", navigation, re.MULTILINE), page


def test_the_lab_book_lists_every_entry_under_its_date_and_the_newest_first():
    """An entry's date is the first one on its page."""
    index = (ROOT / "docs" / "lab_book.md").read_text().partition("\n## ")[0]
    _, *dated = re.split(r"^\*\*(.*)\*\*$", index, flags=re.MULTILINE)
    days = [datetime.strptime(day, "%d %B %Y") for day in dated[::2]]
    assert days == sorted(set(days), reverse=True)
    listed = {
        name: day
        for day, entries in zip(dated[::2], dated[1::2], strict=True)
        for name in re.findall(r"^- .*?\]\(lab_book/(\w+\.md)\)", entries, re.MULTILINE)
    }
    assert listed == {page.name: re.search(r"\d+ [A-Z][a-z]+ \d{4}", page.read_text())[0] for page in LAB_BOOK}


def test_the_pages_that_a_user_needs_are_read_in_an_hour():
    """Those before "Reference": 10,900 words, code and tables counted; 700 of them are the page of environments."""
    needed = (ROOT / "mkdocs.yml").read_text().partition("nav:\n")[2].partition("- Reference:")[0]
    words = {page: len((ROOT / "docs" / page).read_text().split()) for page in re.findall(r"[\w/]+\.md", needed)}
    assert {"index.md", "limitations.md"} <= set(words)
    assert sum(words.values()) <= 10_900, words


def test_the_page_of_environments_has_one_and_every_way_to_end():
    page = (ROOT / "docs" / "environments.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == ["stop", *STOPS]
    exec(re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1], names := {})
    made = Environments("python:Guess", objects={"python:Guess": names["Guess"]})
    assert (made.name, made.reward, [tool["function"]["name"] for tool in made.tools]) == ("Guess", "Guess", ["guess"])


def test_a_link_to_the_site_is_shown_with_a_title_and_a_picture():
    card = (ROOT / "docs" / ".theme" / "main.html").read_text()
    assert {"og:title", "og:description", "og:image", "twitter:card"} <= set(re.findall(r'="(\w+:\w+)"', card))
    width_height = struct.unpack(">II", (ROOT / "docs" / "pictures" / "card.png").read_bytes()[16:24])
    assert width_height == (1200, 630)


@pytest.mark.parametrize("name", pages.PARTS)
def test_a_page_says_what_the_tables_say(name):
    """`python -m lab.pages` writes it."""
    assert (ROOT / "docs" / name).read_text() == pages.page(name)


def test_every_algorithm_has_a_section():
    page = (ROOT / "docs" / "reference" / "algorithms.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(ALGORITHMS)


def test_the_table_has_the_metrics_of_a_run_and_no_others(small_run, no_page, dense_reward, tmp_path):  # noqa: F811
    """Two steps that measure all there is; `warnings` come of what goes wrong, others of settings that are off here."""
    code, _, err = small_run(
        sampler_correction="truncated", steps=2, eval_steps=1, ledger_steps=1, schedule="auto",
        save_steps=0, beta=0.1, num_iterations=2, ratio="ppo",
    )  # fmt: skip
    assert code == 0, err
    again = {"model": tmp_path / "run" / "checkpoints" / "step_2", "warm_start_steps": 1, "steps": 0}
    assert small_run(output=tmp_path / "again", **again)[0] == 0
    files = [tmp_path / name / "metrics.jsonl" for name in ("run", "again")]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    written = {re.sub(rf"^(variance|signal2)/({'|'.join(BASELINES)})$", r"\1/NAME", key) for row in rows for key in row}
    written = {re.sub("^rewards/task/", "rewards/NAME/", key) for key in written}
    assert not {key for row in rows for key in row if not metric_of(key)}
    ours = {key for key, metric in ROW_OF.items() if metric.ours}
    assert ours == written | {"warnings", "num_gen_batches", "cispo_clip_ratio"} | set(turn_metrics([Episode()]))


def test_the_help_names_every_baseline_to_train_with_algorithm_and_ratio():
    text = inspect.getsource(AlgorithmConfig)
    trainable = [name for name, entry in BASELINES.items() if entry.trainable]
    for name in (*trainable, *ALGORITHMS, *RATIOS):
        assert re.search(rf"\b{name}\b", text), name
    assert not re.search(rf"\b({'|'.join(set(BASELINES) - set(trainable))})\b", text)


PAPERS = re.findall(r"^\| ([^|]+) \|[^|]+\| ([^|]+) \|", (ROOT / "docs" / "papers.md").read_text(), re.MULTILINE)[1:]


@pytest.mark.parametrize(("method", "flags"), PAPERS, ids=[method for method, _ in PAPERS])
def test_the_flags_of_a_paper_are_settings_that_a_run_takes(method, flags, monkeypatch):
    monkeypatch.setattr(engine, "check_version", lambda: None)  # vLLM is not installed here
    words = shlex.split(" ".join(re.findall(r"`(--.+?)`", flags)))
    assert words or flags.startswith("none")
    if "--load-in-4bit" in words:
        pytest.importorskip("bitsandbytes")
    more = ["--model", "owner/name"] if "--lora" in words else ["--prompts-per-step", "8"]
    config = _parse([*words, *more], TrainConfig()).config
    check_settings(config, flags_in(words), TrainConfig())


def test_the_papers_name_every_algorithm_and_ratio():
    page = (ROOT / "docs" / "papers.md").read_text()
    for name in ALGORITHMS:
        assert f"--algorithm {name}" in page, name
    for name in set(RATIOS) - {"sequence", "none"}:
        assert f"--ratio {name}" in page, name
