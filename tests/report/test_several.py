"""Several runs on one page."""

import re
from pathlib import Path

import pytest

from oblrpo.errors import InputError
from oblrpo.report.charts import line_style
from oblrpo.report.several import LINES, write_together
from oblrpo.runs import HELD_OUT, RunFolder
from tests.report.conftest import row

TRL = Path(__file__).parent / "trl_run"


def measured(step, accuracy):
    return {"step": step, "eval/accuracy": accuracy, "eval/accuracy_stderr": 0.02}


@pytest.fixture
def two(write_run):
    """Two runs of three steps on the same held-out prompts, and one more of the second's own."""
    runs = []
    for name, rate, prompts in (("first", 1e-3, ["shared"]), ("second", 1e-4, ["its own", "shared"])):
        rows = [measured(0, 0.1), row(1), row(2), row(3) | measured(3, 0.6)]
        run = write_run(rows, name=name, learning_rate=rate, seed=7, output=f"runs/{name}")
        for step in (0, 3):
            said = [
                {"prompt": each, "answer": "", "completion": f"{name} at {step}", "reward": step / 3}
                for each in prompts
            ]
            RunFolder(run).write_completions(step, said, HELD_OUT)
        runs.append(run)
    return runs


def test_runs_are_laid_over_one_another(two, tmp_path):
    page = write_together([*two, TRL], tmp_path / "page.html").read_text()
    assert re.findall(r"<figcaption><b>(.*?)</b>", page) == [title for _, title, _ in LINES]
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL)[:2]:  # reward and held-out accuracy
        for number, name in enumerate(("first", "second", "trl_run")):
            assert f">{name}</text>" in drawing
            assert f"stroke: {line_style(number)[0]}" in drawing
    assert "0.100\xa0→\xa00.600" in page


def test_settings_that_differ_stand_in_a_table(two, tmp_path):
    page = write_together(two, tmp_path / "page.html").read_text()
    settings = page[page.index("<h2>Settings") :]
    assert re.findall(r"<td><code>(\w+)</code>", settings) == ["learning_rate"]
    assert settings.index("0.001") < settings.index("0.0001")
    assert "Not comparable" not in page
    (two[1] / "config.yaml").write_text((two[0] / "config.yaml").read_text())
    assert "No setting differs." in write_together(two, tmp_path / "page.html").read_text()
    config = two[1] / "config.yaml"
    config.write_text(re.sub(r"^rewards:.*$", "rewards: [exact]", config.read_text(), flags=re.MULTILINE))
    assert "The runs differ in rewards" in write_together(two, tmp_path / "page.html").read_text()


def test_what_each_said_stands_beside_the_others_to_the_same_prompt(two, tmp_path):
    page = write_together(two, tmp_path / "page.html").read_text()
    shared, own = page[page.index("shared") :].split("its own")
    said = re.findall(r"<code>(\w+ at \d)</code>", shared)
    assert said == ["first at 0", "first at 3", "second at 0", "second at 3"]
    assert re.findall(r"<code>(\w+ at \d)</code>", own) == ["second at 0", "second at 3"]


def test_a_chart_that_no_run_has_something_for_is_left_out(write_run, tmp_path):
    without = {key: value for key, value in row(1).items() if key not in {"n_snr", "snr"}}
    runs = [write_run([without | {"step": step} for step in (1, 2)], name=name) for name in "ab"]
    page = write_together(runs, tmp_path / "page.html").read_text()
    titles = re.findall(r"<figcaption><b>(.*?)</b>", page)
    assert titles == ["Reward", "Learning rate", "Completion length"]
    assert "Before and after" not in page


def test_names(two, write_run, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "first"
    two[1].rename(other)
    page = write_together([two[0], other], tmp_path / "page.html").read_text()
    assert f"<h1>{two[0]} beside {other}</h1>" in page
    with pytest.raises(InputError, match="is given twice"):
        write_together([two[0], two[0]], tmp_path / "page.html")
    hidden = write_run([row(1), row(2)], name="_hidden")
    page = write_together([two[0], hidden], tmp_path / "page.html").read_text()
    assert re.search(r"> ?_hidden</text>", page)
