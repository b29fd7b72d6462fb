"""The page of `make gpu`, in small on the CPU: what it measures, refuses, and keeps when it is stopped."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lab.benchmarks.gpu import __main__ as gpu
from lab.benchmarks.gpu import exactness, shapes, sizes, training
from lab.benchmarks.gpu.page import OutOfTime, Page

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it


def run_page(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["gpu", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    return stopped.value.code


@pytest.mark.usefixtures("frozen", "no_page")
def test_the_whole_page_in_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exactness, "FAMILIES", ("llama-untied", "gpt2-tied"))
    monkeypatch.setattr(shapes, "THEN", ())
    assert run_page(monkeypatch, "--device", "cpu", "--small", "--output", tmp_path) == 0
    page = (tmp_path / "GPU.md").read_text()
    assert capsys.readouterr().out.strip() == page.strip()
    assert "Wrong" not in page
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert torch.__version__.startswith(found["head"]["torch"])  # without +cu130
    exact, trainer, cost, whole, real = found["parts"]
    rows = exact["tables"][0]["rows"]
    assert {(row[0], row[1]) for row in rows} == {
        (name, dtype) for name in ("gpt2-tied", "qwen3-tied, LoRA") for dtype in ("float32", "bfloat16")
    }
    assert {row[2] for row in rows} == {"auto", "gram"}
    assert [row[1:3] for row in trainer["tables"][0]["rows"]] == [["0.0e+00", "0.0e+00"]]
    assert [row[:2] for row in cost["tables"][0]["rows"]] == [["4 x 8", "exact (auto)"]]
    assert [row[:4] for row in whole["tables"][0]["rows"]] == [
        ["Qwen3-0.6B", "all parameters", algorithm, "3"] for algorithm in sizes.ALGORITHMS
    ]
    assert [(row[0], row[1]) for row in real["tables"][0]["rows"]] == [(name, "2") for name in training.REAL]
    assert all(part["seconds"] > 0 for part in found["parts"])


def test_every_method_is_measured_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(exactness, "FAMILIES", ("qwen3-tied",))
    monkeypatch.setattr(exactness, "DTYPES", (torch.float32,))
    page = Page(tmp_path, {})
    page.begin("one")
    exactness.run(page, "cpu", small=False)
    rows = {row[2]: row[3:] for row in page.parts[0].tables[0].rows if row[0] == "qwen3-tied"}
    assert list(rows) == list(exactness.METHODS)
    assert rows["streamed"][2:] == ("", "")
    assert all(float(row[0]) < 1e-4 for row in rows.values())
    assert not page.parts[0].wrong


def test_a_wrong_gradient_is_told(tmp_path, monkeypatch):
    from oblrpo.scores import ScoreTape

    accumulate = ScoreTape.accumulate
    monkeypatch.setattr(ScoreTape, "accumulate", lambda tape, coef_S, **k: accumulate(tape, 2 * coef_S, **k))
    monkeypatch.setattr(exactness, "DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(exactness, "METHODS", {"auto": {}})
    page = Page(tmp_path, {})
    page.begin("one")
    page.table("errors", *["-"] * 7)
    torch.manual_seed(0)
    model = exactness.build_family("llama-untied", torch.float32).bfloat16()
    exactness._family(page, "llama-untied", model, exactness.METHODS)
    (wrong,) = page.parts[0].wrong
    assert "llama-untied in bfloat16 by auto: gradient off by 9." in wrong
    assert f"**Wrong:** {wrong}" in (tmp_path / "GPU.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path, monkeypatch, capsys):
    assert run_page(monkeypatch, "--output", tmp_path / "page") == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "finds no GPU here" in sentence
    assert not (tmp_path / "page").exists()


def test_a_device_that_is_none(tmp_path, monkeypatch, capsys):
    assert run_page(monkeypatch, "--output", tmp_path / "page", "--device", "abacus") == 2
    assert "device 'abacus' cannot be used" in capsys.readouterr().err


def test_without_torch(monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert gpu.why_not("cpu").startswith("torch is not installed for ")


def test_what_needs_more_than_torch_and_transformers_is_skipped(tmp_path):
    """The tape and the bench run without the command line's libraries; the trainer's parts name what is missing."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['rich', 'peft'])); "
        "import lab.benchmarks.gpu.exactness as e, lab.benchmarks.gpu.shapes, lab.benchmarks.gpu.__main__ as g; "
        "e.FAMILIES = ['', 'llama-untied']; e.run = lambda page, *_: page.say('the tape'); "
        "lab.benchmarks.gpu.shapes.run = lambda page, *_: page.say('the bench'); "
        f"sys.argv = ['gpu', '--device', 'cpu', '--small', '--output', {str(tmp_path)!r}]; g.main()"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [part["said"] for part in json.loads((tmp_path / "gpu.json").read_text())["parts"]]
    assert said[:3:2] == [["the tape"], ["the bench"]]
    for (sentence,) in (said[1], said[3], said[4]):
        assert sentence.startswith("Skipped: ")
        assert sentence.endswith(" is not installed here.")


def test_a_part_that_is_late_or_fails_leaves_the_others_and_what_it_has(tmp_path):
    page = Page(tmp_path, {"device": "none"})

    def late():
        page.table("counted", "n")
        page.add(1)
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # a library that goes on after whatever happens
                continue

    def fails():
        raise ValueError("no such kernel")

    gpu.run_part(page, "late", late, time.monotonic() + 0.2)
    gpu.run_part(page, "fails", fails, time.monotonic() + 60)
    gpu.run_part(page, "fine", lambda: page.say(str(page.has_time(9))), time.monotonic() + 60)
    late, fails, fine = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert late["tables"][0]["rows"] == [["1"]]
    assert late["said"] == ["The rest was skipped: the time of this part was up."]
    assert fails["wrong"] == ["it ended with ValueError: no such kernel"]
    assert fine["said"] == ["True"]


def test_a_deadline_within_another(tmp_path):
    """The inner one passes first and the outer one holds on; an inner one that is later does not move the outer one."""
    page, now = Page(tmp_path, {}), time.monotonic()
    passed = []
    try:
        with page.until(now + 0.4):
            try:
                with page.until(now + 0.1):
                    time.sleep(5)
            except OutOfTime:
                passed.append(time.monotonic() - now)
            with page.until(now + 60):
                time.sleep(5)
    except OutOfTime:
        passed.append(time.monotonic() - now)
    inner, outer = passed
    assert 0.1 <= inner < 0.4 <= outer < 3


def test_sequences_that_do_not_fit_are_halved(tmp_path, monkeypatch):
    """The first method says how many fit; one that needs more than it is told so and not tried with fewer."""
    asked = []

    def measure(workload, names, *_):
        asked.append((len(workload.ids_ST), *names))
        if len(workload.ids_ST) > 2 or names == [shapes.FIRST[-1]]:
            raise torch.OutOfMemoryError
        return 0.5, 2e9, [shapes.Row(names[0], 1.5, 1.4, 1.6, 1.1, 1.2, None, 1e-3)]

    monkeypatch.setattr(shapes, "measure", measure)
    monkeypatch.setattr(shapes, "THEN", ())
    monkeypatch.setitem(shapes.SHAPES, "qwen3-4b", shapes.SMALL)
    monkeypatch.setattr(shapes, "SIZES", [(8, 512)])
    page = Page(tmp_path, {})
    page.begin("one")
    with page.until(time.monotonic() + 60):
        shapes.run(page, "cpu", small=False)
    assert asked == [(8, shapes.FIRST[0]), (4, shapes.FIRST[0])] + [(2, name) for name in shapes.FIRST]
    rows = page.parts[0].tables[0].rows
    assert [row[2] for row in rows] == ["out of memory", "out of memory", "0.500", "out of memory"]
    monkeypatch.setattr(shapes, "_expected", {512: 1e9})
    assert shapes._line(page, shapes.replace(shapes.SMALL, tokens=512), "plain", "cpu")
    assert "was skipped: there was no time left for it." in page.parts[0].said[-1]


def test_a_run_that_is_stopped_shows_the_steps_it_made(tmp_path):
    page, output = Page(tmp_path, {}), tmp_path / "run"
    output.mkdir()
    rows = [{"step": 0, "eval/accuracy": 0.2, "eval/accuracy_stderr": 0.01}]
    rows += [{"step": n, "reward": n / 10, "step_time": 2.0, "learning_rate": 1e-6} for n in (1, 2, 3)]
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.begin("one")
    page.table("runs", *["-"] * 9)
    training._summary(page, "rloo", output, "cpu")
    cells = ("rloo", "3", "2.00", "0.200 +- 0.010", "not measured", "0.200", "0.200", "1.0e-06", "")
    assert page.parts[0].tables[0].rows == [cells]
    training._summary(page, "grpo", tmp_path / "none", "cpu")
    assert page.parts[0].said == ["grpo made no step."]


def test_without_the_real_model(tmp_path):
    page = Page(tmp_path / "page", {})
    page.begin("one")
    training.real_model(page, "cpu", False, tmp_path / "models")
    assert page.parts[0].said == [
        f"Skipped: there is no folder {tmp_path / 'models'}; `make smollm2` makes it, with network."
    ]


def test_make_gpu_needs_no_environment():
    done = subprocess.run(
        ["make", "-n", "gpu", "PYTHON=python9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MAKEFLAGS": "", "MAKELEVEL": ""},
    )
    (command,) = done.stdout.splitlines()
    assert command.startswith("PYTHONPATH=src python9 -m lab.benchmarks.gpu ")
