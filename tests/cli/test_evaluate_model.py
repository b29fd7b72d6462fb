"""`oblrpo evaluate MODEL`: a policy of known accuracy; an evaluation that is stopped, gone on with, graded again."""

import json
import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from oblrpo.cli.evaluate import _folder_of
from oblrpo.evaluation.evaluate import clustered
from oblrpo.evaluation.sampled import SavedCompletions, collect
from oblrpo.policy import Sequences, make_policy
from oblrpo.rollout import Rollouts
from oblrpo.settings import PolicyConfig, SamplingConfig
from oblrpo.tasks import Problem
from tests.cli.conftest import complained
from tests.cli.test_families import folder_of

pytest.importorskip("math_verify")


def scripted(chances):
    """The `sample` of a sampler whose completions of problem i are right with probability chances[i]."""

    def sample(prompts, num_generations, max_completion_length, temperature, top_p):
        rng = random.Random(int(torch.randint(2**31, ()).item()))
        texts = []
        for prompt in prompts:
            index = int(prompt.split()[0])
            texts += [
                rf"\boxed{{{7 if rng.random() < chances[index] else rng.randint(8, 9)}}}"
                for _ in range(num_generations)
            ]
        ones = torch.ones(len(texts), 3, dtype=torch.long)
        return Rollouts(Sequences.of(ones, ones, ones, ones), texts, torch.zeros(len(texts), dtype=torch.bool))

    return sample


def majority(chance, k):
    """Probability that the right answer wins a vote of k, the wrong ones two alike; ties drawn."""
    total = 0.0
    for right in range(k + 1):
        for one in range(k - right + 1):
            other = k - right - one
            ways = math.comb(k, right) * math.comb(k - right, one)
            probability = ways * chance**right * ((1 - chance) / 2) ** (one + other)
            top = max(right, one, other)
            total += probability * (right == top) / [right, one, other].count(top)
    return total


def test_a_policy_of_known_accuracy(oblrpo, tmp_path, tiny_policy):
    """The figures lie within four standard errors of their closed forms, and pass@k is the file's own closed form."""
    rng = random.Random(1)
    chances = [rng.random() for _ in range(200)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"problem": f"{i} ?", "answer": "7"}) + "\n" for i in range(200)))
    problems = [Problem(f"{i} ?", "7") for i in range(200)]
    saved = SavedCompletions(tmp_path / "out", "math500")
    asked = SamplingConfig(samples=8, max_completion_length=9)
    sampler = SimpleNamespace(policy=tiny_policy, sample=scripted(chances))
    collect(tiny_policy, lambda: sampler, problems, asked, saved)
    rows = saved.rows()
    code, out, err = oblrpo(
        "evaluate", "--regrade", "--benchmark", "math500", "--data", data, "--output", tmp_path / "out", "--json"
    )
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    right = [sum(row["completion"] == r"\boxed{7}" for row in rows[8 * i : 8 * i + 8]) for i in range(200)]
    for k in (1, 2, 4, 8):
        found = result["pass@k"][str(k)]
        exact = sum(1 - math.comb(8 - c, k) / math.comb(8, k) for c in right) / 200
        assert found["value"] == pytest.approx(exact, abs=1e-12)
        for estimate, expected in (
            (found, sum(1 - (1 - p) ** k for p in chances) / 200),
            (result["maj@k"][str(k)], sum(majority(p, k) for p in chances) / 200),
        ):
            stderr = (estimate["interval"][1] - estimate["interval"][0]) / 2 / 1.96
            assert abs(estimate["value"] - expected) < 4 * stderr
    assert result["avg@k"]["value"] == pytest.approx(sum(right) / 1600)
    assert (result["mean_length"], result["clipped_ratio"]) == (3.0, 0.0)


def test_the_clustered_interval_covers():
    """Of 300 evaluations of 40 problems each, about 95 % have an interval of avg@4 that holds the mean."""
    rng, held = random.Random(0), 0
    for _ in range(300):
        chances = [rng.betavariate(0.5, 0.5) for _ in range(40)]
        estimate = clustered([sum(rng.random() < p for _ in range(4)) / 4 for p in chances])
        held += estimate.interval[0] <= 0.5 <= estimate.interval[1]
    assert 0.90 <= held / 300 <= 0.985


@pytest.fixture
def model(tmp_path):
    return folder_of("qwen3-tied", tmp_path / "model")


@pytest.fixture
def ask(oblrpo, tmp_path, model):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1", "answer": f"#### {i + 1}"}) + "\n" for i in range(7)))

    def call(*more, model=model, output="out"):
        drawing = [
            model, "--samples", 2, "--max-completion-length", 5, "--problems-per-batch", 3, "--prompt-template",
            "{prompt}=", "--device", "cpu",
        ]  # fmt: skip
        where = ["--benchmark", "gsm8k", "--data", data, "--output", tmp_path / output]
        return oblrpo("evaluate", *(drawing if model else []), *where, *more)

    return call


def test_an_evaluation_that_was_stopped_goes_on(ask, tmp_path, model):
    code, out, err = ask()
    assert code == 0, err
    for words in ("'{prompt}='", "'0+1='", "temperature", "avg@2", "tokens per completion", "cut off"):
        assert words in out
    file = tmp_path / "out" / "gsm8k.jsonl"
    whole = file.read_text()
    assert len(whole.splitlines()) == 14
    before = file.stat().st_mtime_ns
    code, out, _ = ask("--regrade", "--json", model=None)
    assert code == 0
    shown = json.loads(out)
    assert (shown["model"], shown["results"][0]["problems"]) == (str(model), 7)
    assert file.stat().st_mtime_ns == before


@pytest.mark.parametrize("lines", [0, 6, 9])
def test_a_line_that_was_cut_is_not_gone_on_with(ask, tmp_path, lines):
    """Whether the batch it belongs to has whole lines or none."""
    assert ask()[0] == 0
    file = tmp_path / "out" / "gsm8k.jsonl"
    whole = file.read_text()
    file.write_text("".join(whole.splitlines(keepends=True)[:lines]) + '{"index": 4, "sam')
    assert ask()[0] == 0
    assert file.read_text() == whole


def test_other_weights_under_the_same_name_are_another_evaluation(ask, model):
    assert ask()[0] == 0
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.model.norm.weight += 0.01
    changed.save_pretrained(model, max_shard_size="20KB")
    complained(ask(), "sampled with other settings: weights (was")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers for it
def test_adapters_are_no_other_adapters_of_the_same_model(ask, model, tmp_path):
    pytest.importorskip("peft")
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        make_policy(PolicyConfig(model=str(model), lora={"r": 1}, device="cpu")).save(tmp_path / name)
    assert ask(model=tmp_path / "one")[0] == 0
    complained(ask(model=tmp_path / "two"), "sampled with other settings: model (was", "one', now", "weights (was")


def test_other_questions_are_not_graded(ask, tmp_path):
    assert ask("--limit", 3)[0] == 0
    code, out, _ = ask("--regrade", "--json", model=None)
    assert code == 0
    assert json.loads(out)["results"][0]["problems"] == 3
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace("2+1", "2+2"))
    complained(ask("--regrade", model=None), "answers other questions than those of the data")
    complained(ask("--limit", 3), "sampled with other settings: questions (was")


def test_greedy_completions_are_all_alike_and_other_seeds_differ(ask, tmp_path):
    assert ask("--temperature", "0")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "gsm8k.jsonl").read_text().splitlines()]
    assert all(one["completion"] == two["completion"] for one, two in zip(rows[::2], rows[1::2], strict=True))
    texts = set()
    for seed in (0, 1):
        assert ask("--seed", seed, output=f"seed{seed}")[0] == 0
        texts.add((tmp_path / f"seed{seed}" / "gsm8k.jsonl").read_text())
    assert len(texts) == 2


def test_a_short_evaluation_and_the_model_in_bfloat16(ask, tmp_path):
    code, out, err = ask("--limit", 2, "--dtype", "bfloat16", "--json")
    assert code == 0, err
    result = json.loads(out)["results"][0]
    assert result["problems"] == 2
    assert result["settings"]["precision"] == "bfloat16"


def test_models_and_checkpoints_are_kept_apart(oblrpo, tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    shutil.copytree(model, tmp_path / "other")
    asked = ["--data", "rows.jsonl", "--max-completion-length", 2, "--device", "cpu"]
    for name in ("model", "other"):
        code, out, err = oblrpo("evaluate", name, *asked)
        assert code == 0, err
        assert out.endswith(f"completions and figures are in evaluations/{name}\n")
        assert (tmp_path / "evaluations" / name / "rows.result.json").is_file()
    complained(oblrpo("evaluate", "--regrade", "--data", "rows.jsonl"), "name it with --output")
    for name, folder in {
        "runs/demo/checkpoints/step_9": "demo-step_9",
        "Qwen/Qwen3-4B": "Qwen-Qwen3-4B",
        "./models/qwen/": "qwen",
        "../a/b/checkpoint-5": "b-checkpoint-5",
        ".": "-".join(tmp_path.parts[-2:]),
        "/": "model",
    }.items():
        assert _folder_of(name) == f"evaluations/{folder}"


def test_mistakes_about_what_is_there(ask, tmp_path):
    assert ask()[0] == 0
    complained(ask("--temperature", "0.5"), "sampled with other settings", "temperature (was 1.0, now 0.5)")
    complained(ask("--regrade", model=None, output="none"), "holds no completions to grade")
    (tmp_path / "out" / "gsm8k.settings.json").unlink()
    complained(ask("--regrade", model=None), "gsm8k.settings.json cannot be read")
    for flags in (["--k", 4], ["--processes", 0], ["--prompt-template", "x"], ["--max-completion-length", 500]):
        complained(ask(*flags, output="early"))  # before anything is drawn
    assert not list((tmp_path / "early").glob("*.jsonl"))
