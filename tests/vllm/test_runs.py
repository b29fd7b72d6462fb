"""Whole runs and evaluations that sample with vLLM, from the command line and from Python."""

import json
import signal
import subprocess
import sys

import pytest

import oblrpo as library
from oblrpo.rollout import vllm
from oblrpo.tasks import Problem
from tests.cli.conftest import (  # noqa: F401
    DENSE_REWARD,
    NO_PAGE,
    SMALL,
    complained,
    dense_reward,
    metrics_of,
    no_page,
    oblrpo,
    small_run,
    weights_of,
)
from tests.vllm.support import tiny_policy

pytestmark = [
    pytest.mark.usefixtures("dense_reward", "no_page"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),  # torch's own, which vLLM imports
]

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def run(small_run, tmp_path):  # noqa: F811
    """The small run, sampled by vLLM from a policy that it can run; the output is tmp_path / `name`."""

    def call(name, *arguments, **settings):
        own = {"sampler": "vllm"} | ({} if "model" in settings else {"model_args": SIZES}) | settings
        return small_run(*arguments, output=tmp_path / name, **own)

    return call


@pytest.fixture
def opened(monkeypatch):
    """The engines that are opened."""
    engines, open_engine = [], vllm.open_engine

    def counted(*given, **settings):
        engines.append(open_engine(*given, **settings))
        return engines[-1]

    monkeypatch.setattr(vllm, "open_engine", counted)
    return engines


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers for it
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dynamic_sampling": 2, "num_iterations": 2, "warm_start_steps": 2},
        {"score_norms": "length", "lora": "{r: 2}"},
        {"optimizer": "AdamWScheduleFree", "schedule": "off"},
    ],
    ids=["plain", "several", "proxy-lora", "schedule-free"],
)
def test_a_run_repeats_itself_and_resumes(run, oblrpo, tmp_path, opened, model, settings):  # noqa: F811
    """A second run of the seed, and one that stops after two steps and is resumed: the same to the last bit."""
    if "optimizer" in settings:
        pytest.importorskip("schedulefree")
    if "lora" in settings:
        settings = settings | {"model": model}
    code, out, err = run("whole", **settings)
    assert code == 0, err
    assert "sampler    vllm in float32; completions end with" in out
    assert run("part", steps=2, **settings)[0] == 0
    code, out, err = oblrpo("train", "--resume", "--output", tmp_path / "part", "--steps", 4)
    assert code == 0, err
    assert len(opened) == 3
    rows = metrics_of(tmp_path / "whole")
    assert metrics_of(tmp_path / "part") == rows
    names = ("adapter_model" if "lora" in settings else "model") + ".safetensors"
    whole, part = (tmp_path / name / "checkpoints" / "step_4" / names for name in ("whole", "part"))
    assert whole.read_bytes() == part.read_bytes()
    assert whole.read_bytes() != (tmp_path / "whole" / "checkpoints" / "step_2" / names).read_bytes()
    for row in rows[1:]:
        assert 0 < row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 4]
    assert len({row["eval/accuracy"] for row in rows if "eval/accuracy" in row}) > 1


def test_weights_correct_for_a_sampler_of_fewer_digits(run, tmp_path):
    """A bfloat16 engine beside a float32 policy: ratios leave 1, and truncation binds where it is asked to."""
    shown = {}
    for correction in ("truncated:1.0001", "untruncated", "measured"):
        arguments = {"sampler_correction": correction, "max_completion_length": 40, "steps": 1, "eval_steps": 0}
        code, out, err = run(correction, vllm_args="{dtype: bfloat16, max_model_len: 128}", **arguments)
        assert code == 0, err
        assert "sampler    vllm in bfloat16" in out
        (_, shown[correction]) = metrics_of(tmp_path / correction)
    assert 1e-4 < shown["measured"]["sampling/sampling_logp_difference/mean"] < 0.1
    assert 0.2 < shown["truncated:1.0001"]["sampling/truncated_ratio"] < 0.8  # about every other ratio is above 1
    assert shown["truncated:1.0001"]["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0001)
    assert shown["untruncated"]["sampling/importance_sampling_ratio/max"] > 1.001
    assert len({row["grad_norm"] for row in shown.values()}) == 3


def test_a_run_that_is_killed_in_a_step_resumes(run, oblrpo, tmp_path):  # noqa: F811
    assert run("whole")[0] == 0
    kill = """
import os, sys
from vllm import LLM
generate, training = LLM.generate, []
def killed(self, prompts, parameters, **settings):
    training.extend([0] * (parameters[0].n == 3))  # completions a prompt: neither held-out accuracy nor the check
    drawn = generate(self, prompts, parameters, **settings)
    if len(training) == 3:
        os.kill(os.getpid(), 9)
    return drawn
LLM.generate = killed
from oblrpo.cli import main
main()
"""
    own = SMALL | {"--sampler": "vllm", "--model-args": SIZES, "--output": tmp_path / "part"}
    flags = [str(x) for pair in own.items() for x in pair]
    code = [sys.executable, "-W", "ignore", "-c", DENSE_REWARD + NO_PAGE + kill]
    child = subprocess.run([*code, "train", *flags], capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    done = max(int(each.name[5:]) for each in (tmp_path / "part" / "checkpoints").glob("step_*"))
    assert done == 2
    code, _, err = oblrpo("train", "--resume", "--output", tmp_path / "part")
    assert code == 0, err
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")
    assert weights_of(tmp_path / "part", 4) == weights_of(tmp_path / "whole", 4)


def test_an_engine_that_fails_in_a_step_ends_the_run_in_one_sentence(run, oblrpo, tmp_path, monkeypatch):  # noqa: F811
    """It says how to resume, and the resumed run is that of an engine that never failed."""
    from vllm import LLM

    assert run("whole")[0] == 0
    generate, training = LLM.generate, []

    def failing(self, prompts, parameters, **settings):
        training.extend([0] * (parameters[0].n == 3))  # completions a prompt: neither held-out accuracy nor the check
        if len(training) == 3:
            raise RuntimeError("no room for\nkeys and values")
        return generate(self, prompts, parameters, **settings)

    with monkeypatch.context() as while_it_fails:
        while_it_fails.setattr(LLM, "generate", failing)
        result = run("part")
    complained(result, "vLLM could not sample: no room for keys and values. See vllm_args", "The run stopped in step 3")
    complained(result, f"continue with: oblrpo train --resume --output {tmp_path / 'part'}")
    code, _, err = oblrpo("train", "--resume", "--output", tmp_path / "part", "--vllm-args", "{max_model_len: 256}")
    assert code == 0, err
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")
    assert weights_of(tmp_path / "part", 4) == weights_of(tmp_path / "whole", 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_args": "{}"}, ["attention heads have a size of 16", "num_attention_heads of model_args"]),
        ({"vllm_args": "{gpu_memory_utilization: 0.001}"}, ["vLLM could not open: Available memory", "give a higher"]),
        ({"vllm_args": "{gpu_memory_utilization: 1.0}"}, ["vLLM could not open: Available memory", "give a lower"]),
        ({"vllm_args": "{max_model_len: 20}"}, ["the longest prompt has", "vllm_args.max_model_len, 20: raise that"]),
    ],
    ids=["heads", "small", "whole", "short"],
)
def test_an_engine_that_cannot_open_leaves_nothing(run, tmp_path, monkeypatch, settings, words):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # an engine before has set it
    complained(run("run", **settings), *words)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def rows(tmp_path):
    """A file of questions."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(7)))
    return data


@pytest.fixture
def model(tmp_path):
    """A folder with a model."""
    tiny_policy().save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def ask(oblrpo, tmp_path, rows, model):  # noqa: F811
    """`oblrpo evaluate` on the rows; returns (code, stdout, stderr) and the file of completions."""

    def call(output, *more, **settings):
        asked = {"samples": 2, "max_completion_length": 6, "problems_per_batch": 3, "device": "cpu"} | settings
        flags = [x for key, value in asked.items() for x in (f"--{key.replace('_', '-')}", value)]
        result = oblrpo("evaluate", model, "--data", rows, "--output", tmp_path / output, *flags, *more)
        return result, tmp_path / output / "rows.jsonl"

    return call


def test_an_evaluation_with_vllm_resumes(ask, opened):
    (code, out, err), file = ask("out", sampler="vllm")
    assert code == 0, err
    assert "sampler                'vllm'" in out
    whole = file.read_text()
    assert len(whole.splitlines()) == 14
    file.write_text("".join(whole.splitlines(keepends=True)[:8]))
    assert ask("out", sampler="vllm")[0][0] == 0
    assert file.read_text() == whole
    assert len(opened) == 2
    assert ask("out", sampler="vllm")[0][0] == 0
    assert len(opened) == 2  # nothing was missing
    complained(ask("out")[0], "sampled with other settings: sampler")
    complained(
        ask("out", sampler="vllm", vllm_args="{dtype: bfloat16}")[0], "sampler_dtype (was 'auto', now 'bfloat16')"
    )
    complained(
        ask("new", vllm_args="{dtype: bfloat16}")[0], "vllm_args has no effect because the sampler is transformers"
    )
    complained(ask("new", sampler="vllm", vllm_args="{max_model_len: 8}")[0], "vllm_args.max_model_len, 8: raise that")


def test_the_most_probable_tokens_are_those_of_our_own_loop(ask):
    """Greedily, and where top_p leaves nothing else."""
    texts = []
    for name, settings in {
        "own": {"temperature": 0}, "greedy": {"temperature": 0, "sampler": "vllm"},
        "nucleus": {"top_p": 1e-6, "sampler": "vllm"},
    }.items():  # fmt: skip
        (code, _, err), file = ask(name, **settings)
        assert code == 0, err
        texts.append([json.loads(line)["completion"] for line in file.read_text().splitlines()])
    assert texts[0] == texts[1] == texts[2]


def test_benchmarks_share_an_engine(oblrpo, tmp_path, model, opened, monkeypatch):  # noqa: F811
    pytest.importorskip("math_verify")
    problems = [Problem(f"{i}+1", str(i + 1), {"answer": str(i + 1)}) for i in range(3)]
    monkeypatch.setattr("oblrpo.tasks.benchmarks.load_benchmark", lambda *_, **__: problems)
    code, out, err = oblrpo(
        "evaluate", model, "--benchmark", "gsm8k", "amc23", "--max-completion-length", 4, "--sampler", "vllm",
        "--output", tmp_path / "out", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert [each["settings"]["sampler"] for each in json.loads(out)["results"]] == ["vllm", "vllm"]
    assert len(opened) == 1


def test_from_python(tmp_path, rows, opened):
    """A run, the run's own evaluation with its sampler, another sampler's, and a loaded model's."""
    few = {"max_completion_length": 6, "progress": False}
    run = library.train(
        "demo", steps=2, warm_start_steps=1, prompts_per_step=4, eval_prompts=4, sampler="vllm", model_args=SIZES,
        output=tmp_path / "run", device="cpu", **few,
    )  # fmt: skip
    assert len(opened) == 1
    heldout = run.evaluate(progress=False)
    assert (heldout["data"], heldout["settings"]["sampler"]) == ("heldout", "vllm")
    assert "sampler" not in run.evaluate(sampler="transformers", progress=False)["settings"]
    found = library.evaluate(
        run.policy.model, str(rows), "numeric", tokenizer=run.policy.tokenizer, sampler="vllm", samples=2, **few
    )
    assert (found["samples"], found["settings"]["sampler"]) == (2, "vllm")
    of_run = library.evaluate(tmp_path / "run", progress=False, device="cpu")
    assert of_run["settings"]["sampler"] == "vllm"
    assert (of_run["avg@k"], of_run["mean_length"]) == (heldout["avg@k"], heldout["mean_length"])
