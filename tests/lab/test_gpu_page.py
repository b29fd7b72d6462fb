"""The page of `make gpu`, in small on the CPU: what it measures, refuses, and keeps when it is stopped."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from lab.benchmarks.gpu import __main__ as gpu
from lab.benchmarks.gpu import exactness, sizes, training, wheels, where
from lab.benchmarks.gpu.page import OutOfTime, Page
from oblrpo.errors import InputError

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
    monkeypatch.setattr(where, "WEIGHTS", ("autocast", "adapters"))
    assert run_page(monkeypatch, "--device", "cpu", "--small", "--output", tmp_path) == 0
    page = (tmp_path / "GPU.md").read_text()
    assert capsys.readouterr().out.split() == page.split()
    assert "Wrong" not in page
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert torch.__version__.startswith(found["head"]["torch"])  # without +cu130
    time, exact, whole, vllm, trainer, real = found["parts"]
    speeds, methods, kernels = time["tables"]
    assert [row[2] for row in speeds["rows"]] == ["3", "600", "52", "5"]
    assert [row[:3] for row in methods["rows"]] == [
        [weights, "4 x 8", method] for weights in where.WEIGHTS for method in where.METHODS
    ]
    assert all(int(row[8]) > 100 for row in methods["rows"])
    assert len(kernels["rows"]) == where.KERNELS
    assert vllm["said"] == ["Skipped: vllm is not installed here."]
    rows = exact["tables"][0]["rows"]
    assert {(row[0], row[1]) for row in rows} == {
        (name, dtype) for name in ("gpt2-tied", "qwen3-tied, LoRA") for dtype in ("float32", "bfloat16")
    }
    assert {row[2] for row in rows} == {"auto", "gram"}
    assert [row[1:3] for row in trainer["tables"][0]["rows"]] == [["0.0e+00", "0.0e+00"]]
    assert [row[:4] for row in whole["tables"][0]["rows"]] == [
        [name, trained, algorithm, "3"] for name, trained, _ in sizes.CASES for algorithm in sizes.ALGORITHMS
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
    """The tape runs without the command line's libraries; the trainer's parts name what is missing."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['rich', 'ruamel', 'ruamel.yaml', 'psutil', 'peft', 'vllm'])); "
        "import lab.benchmarks.gpu.exactness as e, lab.benchmarks.gpu.__main__ as g; "
        "e.run = lambda page, *_: page.say('the tape'); "
        f"sys.argv = ['gpu', '--device', 'cpu', '--small', '--output', {str(tmp_path)!r}]; g.main()"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [part["said"] for part in json.loads((tmp_path / "gpu.json").read_text())["parts"]]
    assert said[0][1:] == ["Adapters were skipped: peft is not installed here."]
    assert said[1] == ["the tape"]
    for (sentence,) in said[2:]:
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


def small_time(tmp_path, monkeypatch):
    """The first part, all parameters under autocast alone, and its lines."""
    monkeypatch.setattr(where, "WEIGHTS", ("autocast",))
    page = Page(tmp_path, {})
    page.begin("one")
    where.run(page, "cpu", small=True)
    return page.parts[0], page.parts[0].tables[1].rows


def test_what_does_not_fit_is_told_and_the_next_method_goes_on(tmp_path, monkeypatch):
    step = where._step

    def full(method, *rest):
        if method == "auto":
            raise torch.OutOfMemoryError
        return step(method, *rest)

    monkeypatch.setattr(where, "_step", full)
    part, rows = small_time(tmp_path, monkeypatch)
    assert [row[3] == "out of memory" for row in rows] == [False, True, False, False]
    assert not part.wrong
    monkeypatch.setattr(where, "_model", lambda *_: full("auto"))
    part, rows = small_time(tmp_path, monkeypatch)
    assert [row[2:4] for row in rows] == [("all", "out of memory")]


def test_a_wrong_norm_is_told(tmp_path, monkeypatch):
    norm2 = where.ScoreTape.norm2
    monkeypatch.setattr(where.ScoreTape, "norm2", lambda tape: 1.1 * norm2(tape))
    part, _ = small_time(tmp_path, monkeypatch)
    assert [wrong.partition(" with ")[0] for wrong in part.wrong] == list(where.METHODS[1:])
    assert part.wrong[0].endswith("a norm is off by 1.0e-01.")


@pytest.mark.parametrize(
    ("kernel", "is_one"),
    [
        ("ampere_sgemm_128x64_nn", True),
        ("sm90_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_cublas", True),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>", True),
        ("sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize64x64x64_cublas", False),
        ("cutlass_80_tensorop_s1688tf32gemm_128x128", False),
        ("vectorized_elementwise_kernel<4, float>", False),
    ],
)
def test_products_that_no_tensor_core_takes(kernel, is_one):
    assert where.is_float32_product(kernel) is is_one


def test_the_lab_book_has_what_is_foretold():
    """Ratio and launches of every method, in the table of the entry."""
    lines = (ROOT / "docs" / "lab_book" / "h100.md").read_text().splitlines()
    rows = {tuple(line.split(" | ")[:2]): line.strip(" |").split(" | ")[2:] for line in lines if line.startswith("| Q")}
    for (weights, batch), foretold in where.FORETOLD.items():
        cells = [re.fullmatch(r"\d+ \((.*)\), (.*)", cell).groups() for cell in rows[f"| Qwen3-4B, {weights}", batch]]
        assert cells == [(f"{ratio:.2f}", f"{launches:,}") for ratio, launches in foretold]


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
    *_, command = done.stdout.splitlines()
    assert command.startswith("PYTHONPATH=src:gpu-wheels/installed python9 -m lab.benchmarks.gpu ")
    assert ".venv" not in done.stdout


def test_what_the_wheels_are_for():
    """What oblrpo needs and torch and transformers do not ask for, with what these need in turn."""
    there = {"torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "jinja2", "filelock"}
    names = wheels.beyond(there, Requirement("oblrpo[lora]"))
    assert {"oblrpo", "peft", "accelerate", "rich", "markdown-it-py", "mdurl", "ruamel-yaml", "matplotlib"} <= names
    assert not names & (there | {"pyarrow", "gguf", "math-verify", "pytest"})
    assert "gguf" in wheels.beyond(there, Requirement("oblrpo[gguf]"))


def test_wheels_without_a_network(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert wheels.main([str(tmp_path / "carried"), "--without-model"]) == 2
    assert capsys.readouterr().err.startswith("pip cannot download the wheels for Python 3.11: ")


def test_wheels_too_large_to_carry(tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "old-1-py3-none-any.whl").write_bytes(b"x" * 900)
    monkeypatch.setattr(wheels, "MOST", 500)

    def download(command, **_):
        (folder / f"new-1-cp{command[command.index('--python-version') + 1]}.whl").write_bytes(b"x" * 200)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels.subprocess, "run", download)
    wheels.fetch(["new==1"], folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "new-1-cp3.11.whl",
        "new-1-cp3.12.whl",
        "requirements.txt",
    ]
    monkeypatch.setattr(wheels, "MOST", 300)
    with pytest.raises(InputError, match="more than the 0 MB that can be carried"):
        wheels.fetch(["new==1"], folder)
