"""verl's own trainer with Ray, FSDP2 and TransferQueue on a CPU: learning, our own numbers, kill and resume."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from oblrpo import estimators
from oblrpo.adapters.verl.prompt_rows import PromptRows
from oblrpo.estimators.measured_rate import BEGIN
from oblrpo.scores import oracle
from tests.verl.support import launch
from tests.verl.support.batches import logps
from tests.verl.support.learning import OURS

SHRUNK = OURS | {"algorithm.adv_estimator": "oblr_po_shrunk", "trainer.resume_mode": "auto"}


def copy_of(model_folder, tmp_path_factory, name):
    folder = tmp_path_factory.mktemp(name)
    shutil.copytree(model_folder / "model", folder / "model")
    shutil.copy(model_folder / "train.parquet", folder)
    return folder


def learned(folder, steps, ranks, **changes):
    code, printed = launch.run(folder, ranks, steps, **changes)
    assert code == 0, printed[-6000:]
    lines = launch.metrics(folder)
    assert sorted(lines) == list(range(1, steps + 1))
    rewards = [lines[step]["critic/score/mean"] for step in sorted(lines)]
    return lines, sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


def test_twenty_five_steps_learn_the_toy_reward(model_folder, tmp_path_factory):
    folder = copy_of(model_folder, tmp_path_factory, "learning")
    changes = OURS | {"algorithm.adv_estimator": "oblr_po", "+oblrpo.ledger_steps": 10}
    lines, first, last = learned(folder, 25, 1, **changes)
    print(f"\noblr_po: reward {first:.3f} -> {last:.3f}")
    assert last > first + 0.15
    for step, line in lines.items():
        assert line["actor/lr"] == pytest.approx(2e-3)  # eta_0, which verl's scheduler sees
        assert line["actor/lr_used"] == pytest.approx(2e-3 * line["actor/lr_factor"])
        assert ("critic/variance/oblr" in line) is (step in {1, 10, 20})
        assert ("actor/trace_cov" in line) is (step in {1, 10, 20})  # where norms are exact
        assert line["actor/step_kl"] > 0
    assert len({line["actor/lr_used"] for line in lines.values()}) > 20


@pytest.fixture(scope="module")
def killed_and_resumed(model_folder, tmp_path_factory):
    """Metrics of six steps on two ranks; of the same run, killed after its fourth and resumed; the first batch."""
    changes = OURS | {
        "algorithm.adv_estimator": "oblr_po_shrunk",
        "+oblrpo.score_norms": "exact",
        "trainer.save_freq": 3,
        "trainer.resume_mode": "auto",
    }
    whole = copy_of(model_folder, tmp_path_factory, "whole")
    lines, *_ = learned(whole, 6, 2, **changes)

    cut = copy_of(model_folder, tmp_path_factory, "cut")
    dump = cut / "first.pt"
    with (cut / "log").open("w") as log:
        process = subprocess.Popen(
            launch.command(launch.overrides(cut, 2, 6) | changes),
            cwd=cut, env=launch.environment(cut, dump), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        end = time.time() + 1800
        while process.poll() is None and time.time() < end and 4 not in launch.metrics(cut):
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)  # in the fifth step; the checkpoint is of the third
        process.wait()
    before = launch.metrics(cut)
    assert 4 in before, (cut / "log").read_text()[-6000:]
    assert 6 not in before
    (cut / "metrics.jsonl").unlink()
    code, printed = launch.run(cut, 2, 6, **changes)
    assert code == 0, printed[-6000:]
    return lines, before, launch.metrics(cut), torch.load(dump), cut


SAME = [
    "critic/score/mean",
    "critic/baseline/mean",
    "critic/score_norm2/mean",
    "actor/snr",
    "actor/lr_used",
    "actor/trace_cov",
    "actor/step_kl",
]


def test_a_resumed_run_goes_on_as_one_that_was_not_killed(killed_and_resumed):
    lines, before, after, *_ = killed_and_resumed
    assert sorted(after) == [4, 5, 6]
    for step in (1, 2, 3, 4):
        assert {key: before[step][key] for key in SAME} == pytest.approx(
            {key: lines[step][key] for key in SAME}, rel=1e-4
        )
    for step in (4, 5, 6):
        assert {key: after[step][key] for key in SAME} == pytest.approx(
            {key: lines[step][key] for key in SAME}, rel=1e-4
        )


def test_the_schedule_and_the_prior_were_on_the_disk(killed_and_resumed):
    """And matter: a fresh average would hold one step, not four."""
    *_, folder = killed_and_resumed
    checkpoint = folder / "checkpoints" / "global_step_3"
    states = [json.loads((checkpoint / "actor" / f"oblrpo_schedule_rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert states[0] == states[1]
    assert states[0]["steps"] == 3
    assert len(states[0]["average"]["batches"]) == 3
    assert sum(json.loads((checkpoint / "oblrpo_baseline.json").read_text())["prior"]["sums"]) > 0


def test_a_checkpoint_without_the_schedule_is_refused(killed_and_resumed):
    *_, folder = killed_and_resumed
    for rank in (0, 1):
        (folder / "checkpoints" / "global_step_6" / "actor" / f"oblrpo_schedule_rank_{rank}.json").unlink()
    code, printed = launch.run(folder, 2, 7, **SHRUNK)
    assert code != 0
    assert "was written without oblr_po" in printed


def test_baseline_and_rate_of_the_first_step_are_those_of_our_own_functions(killed_and_resumed, model_folder):
    """On the batch that verl sampled, from loop autograd in float64."""
    _, before, _, batch, _ = killed_and_resumed
    rows = [
        {"prompts": prompt, "responses": response, "response_mask": mask}
        for prompt, response, mask in zip(batch["prompts"], batch["responses"], batch["response_mask"], strict=True)
    ]
    model = AutoModelForCausalLM.from_pretrained(model_folder / "model", dtype=torch.float64).eval()
    score_SN = torch.stack(
        [torch.cat([g.flatten() for g in oracle.scores(model, logps(model, [row]))[0]]) for row in rows]
    )
    norm2_S = score_SN.square().sum(1)
    groups = PromptRows(batch["uid"])
    assert groups.row_PG.shape == (16, 8)
    found_S = groups.put(groups.take(torch.stack(batch["oblrpo_gram"])).diagonal(dim1=1, dim2=2))
    assert ((found_S - norm2_S).abs() / norm2_S).max() <= 1e-5

    rewards_PG = groups.take(torch.stack([each.double().sum() for each in batch["rm_scores"]]))
    prior = estimators.Prior()
    baseline_PG = estimators.baseline("oblr_shrunk", rewards_PG, norm2_PG=groups.take(norm2_S), prior=prior)
    advantage_PG = groups.take(torch.stack([each[0].double() for each in batch["advantages"]]))
    assert torch.allclose(advantage_PG, rewards_PG - baseline_PG, atol=1e-5)
    assert before[1]["critic/baseline/mean"] == pytest.approx(float(baseline_PG.mean()), rel=1e-5)

    share_SN = -groups.put(rewards_PG - baseline_PG)[:, None] * score_SN / 128
    group_norm2_P = torch.stack([(share_SN[rows].sum(0) * 16).square().sum() for rows in groups.rows_of])
    # Of prompts without number: these come in an order that is no chance (data.shuffle).
    moments = estimators.moments(group_norm2_P, share_SN.sum(0).square().sum())
    assert before[1]["actor/trace_cov"] == pytest.approx(moments.trace_cov, rel=1e-4)
    # auto's first update is as long as it was meant, whatever the optimizer's rate.
    meant = BEGIN * float(torch.stack([each.double().sum() for each in batch["response_mask"]]).mean())
    assert meant < before[1]["actor/step_kl_target"]
    assert meant / 4 <= before[1]["actor/step_kl"] <= meant * (1 + 1e-6)
    assert before[2]["actor/lr_used"] != before[1]["actor/lr_used"]
    assert before[1]["actor/grad_norm"] == pytest.approx(float(share_SN.sum(0).norm()), rel=1e-4)


def test_a_refusal_reaches_the_user(model_folder, tmp_path_factory):
    folder = copy_of(model_folder, tmp_path_factory, "refused")
    code, printed = launch.run(folder, 1, 1, **{"algorithm.adv_estimator": "oblr_po"})  # verl's own trainer
    assert code != 0
    assert "trainer_mode=oblr_po" in printed
