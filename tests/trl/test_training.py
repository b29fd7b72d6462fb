"""Refusals, checkpoints, learning, logs, and the ledger on TRL's own trainers."""

import json
import logging
import math
import runpy
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.training_args import OptimizerNames
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, TrlParser

from oblrpo.adapters.trl import OBLRPOConfig, OBLRPOTrainer, VarianceLedgerCallback
from oblrpo.adapters.trl.config import RULES
from oblrpo.errors import InputError
from oblrpo.report.record import read_trl
from oblrpo.tables.baselines import UNBIASED
from oblrpo.tables.metrics import ADDED, ROW_OF
from tests.metric_rows import metric_of
from tests.trl.support import PROMPTS, ours, reward, settings, theirs, tiny_policy
from tests.trl.test_gradient import assert_close, expected, run

WRONG = {
    "scale_rewards": "group", "multi_objective_aggregation": "normalize_then_sum", "temperature": 0.0,
    "optim": OptimizerNames.LOMO, "fp16": True, "fsdp": "full_shard",
    "deepspeed": {"zero_optimization": {"stage": 3}}, "baseline": "grpo", "score_norms": "guessed", "look_steps": -1,
    "schedule": "linear",
}  # fmt: skip


def test_every_rule_has_a_wrong_value_here():
    assert set(WRONG) == {rule.key for rule in RULES}


@pytest.mark.parametrize("key", WRONG)
def test_what_would_change_the_gradient_is_refused_by_name(tmp_path, key):
    """On a valid configuration changed afterwards, so that no check of TRL's or transformers' comes first."""
    from oblrpo.adapters.trl.config import check_config

    args = OBLRPOConfig(**settings(tmp_path))
    check_config(args)
    setattr(args, key, WRONG[key])
    with pytest.raises(InputError, match=rf"{key}=.*; set "):
        check_config(args)


def test_all_that_is_refused_is_said_at_once(tmp_path):
    """With the cure of each, and those of parameters that depend on each other."""
    wrong = {"scale_rewards": "batch", "temperature": 0.0, "per_device_train_batch_size": 2, "steps_per_generation": 6}
    wrong["schedule"] = "auto"
    with pytest.raises(InputError) as raised:
        OBLRPOConfig(**settings(tmp_path, **wrong))
    first, *rest = str(raised.value).split("\n- ")
    assert first == "OBLRPOTrainer does not work with 3 settings:"
    assert [line.split("=")[0] for line in rest[:2]] == ["scale_rewards", "temperature"]
    assert rest[2].startswith(
        "schedule='auto' and updates of fewer than two prompts (2 x 2 completions per process, 4 per prompt)"
    )
    assert all("; set " in line for line in rest)


def test_a_head_in_float32_on_a_model_in_bfloat16(tmp_path):
    """It is trained in float32, as in TRL, and its gradient is that of one backward a completion."""
    trainer, [update] = run(tmp_path, policy=tiny_policy(torch.bfloat16), baseline="oblr", cast_lm_head_to_fp32=True)
    assert trainer.model.lm_head.weight.dtype == torch.float32
    wanted = expected(trainer, update, "oblr").mean(0)
    assert_close(-torch.cat([grad.float().flatten() for grad in update["grads"].values()]), wanted, 2e-2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale_rewards": True}, "scale_rewards='group'"),
        ({"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "schedule": "auto"}, "two prompts"),
        (
            {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16, "schedule": "auto"},
            "per_device_train_batch_size=8 and gradient_accumulation_steps=2, which is the same update",
        ),
        (
            {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16, "look_steps": 1, "loss_type": "grpo"},
            "only for an oblr baseline whose objective is the expected reward alone",
        ),
        (
            {"num_iterations": 2, "steps_per_generation": 1, "schedule": "auto", "per_device_train_batch_size": 4},
            "make steps_per_generation a multiple of gradient_accumulation_steps",
        ),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "reentrant"),
        ({"learning_rate": 0.0}, "above 0"),
        ({"optim": "adafactor"}, "Adafactor"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(tmp_path, given, message):
    with pytest.raises(InputError, match=message):
        ours(tmp_path, **given).train()


@pytest.mark.parametrize(
    "given",
    [{"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}],
)
def test_one_prompt_an_update_will_do_without_a_signal(tmp_path, caplog, given):
    """With nothing set the rate stays the user's then, and a warning says what would let it be measured."""
    with caplog.at_level(logging.WARNING, "oblrpo"):
        trainer = ours(tmp_path, **{"gradient_accumulation_steps": 1} | given)
    assert "stays yours (schedule='off'): updates of fewer than two prompts" in caplog.text
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["learning_rate"] for log in logs] == [1e-3] * 2
    assert not any("snr" in log for log in logs)


def test_the_wrong_configuration_is_refused(tmp_path):
    with pytest.raises(InputError, match="OBLRPOConfig"):
        OBLRPOTrainer(tiny_policy().model, reward, args=GRPOConfig(**settings(tmp_path)))


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (math.inf, {}),
        (1e30, {}),
        (-1e30, {}),
        (1e5, {"reward_weights": [1.0, -1e9]}),
        (1e13, {"reward_weights": [1.0, 1e-9]}),  # as a metric it is without its weight
    ],
)
def test_a_reward_that_is_too_large_is_refused_by_name(tmp_path, value, given):
    def huge(completions, **_):
        return [0.0, None, value] + [0.0] * (len(completions) - 3)

    with pytest.raises(InputError, match=r"reward 'huge' is \S+ for completion 2 of the batch .* at most 1e\+12"):
        ours(tmp_path, reward_funcs=[reward, huge], **given).train()


@pytest.mark.parametrize(("value", "weight"), [(1e12, 1.0), (-1e12, 0.5), (1e4, -1e8)])
def test_the_largest_reward_is_taken(tmp_path, value, weight):
    def huge(completions, **_):
        return [0.0, None, value] + [0.0] * (len(completions) - 3)

    trainer = ours(tmp_path, reward_funcs=[reward, huge], reward_weights=[1.0, weight], max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["skipped"] == 0


def test_a_user_who_changes_two_names_gets_a_valid_configuration(tmp_path):
    """TRL's defaults otherwise: eight completions a prompt, eight a device."""
    args = OBLRPOConfig(str(tmp_path), use_cpu=True, report_to="none")
    assert args.generation_batch_size == 64


def test_trl_s_own_parser_reads_it(tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--schedule", "kl", "--schedule_kl", "0.5"]
    [args] = TrlParser((OBLRPOConfig,)).parse_args_and_config(words)
    assert (args.schedule, args.schedule_kl, args.scale_rewards, args.loss_type) == ("kl", 0.5, "none", "luspo")


class Rates(TrainerCallback):
    """The rate that the optimizer had in each of its steps."""

    def __init__(self):
        self.used = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
        self.used.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("schedule", ["debiased", "off", "plugin"])
def test_the_logs_tell_the_rate_that_was_used(tmp_path, schedule):
    """With TRL's own scheduler under it, which goes on from its own rate."""
    rates = Rates()
    trainer = ours(tmp_path, schedule=schedule, callbacks=[rates], max_steps=3, lr_scheduler_type="linear")
    trainer.train()
    for index, (used, log) in enumerate(zip(rates.used, trainer.state.log_history, strict=False)):
        assert log["learning_rate"] == used == pytest.approx(1e-3 * (1 - index / 3) * log["lr_factor"])


def test_the_logs_tell_the_advantages_that_were_used(tmp_path):
    trainer = ours(tmp_path, log_completions=True, max_steps=2, look_steps=1)
    trainer.train()
    shown = trainer._logs
    rewards, advantages = (torch.tensor(list(each)) for each in (shown["rewards"]["reward"], shown["advantages"]))
    baseline, norm2 = (torch.tensor(list(shown["extra"][key])) for key in ("baseline", "score_norm2"))
    assert len(advantages) == 16
    torch.testing.assert_close(advantages, rewards - baseline)
    assert (norm2 > 0).all()
    log = trainer.state.log_history[1]
    assert log["baseline/mean"] == pytest.approx(float(baseline.mean()), rel=1e-5)
    assert log["score_norm2/mean"] == pytest.approx(float(norm2.mean()), rel=1e-5)
    logged = {key for each in trainer.state.log_history for key in each}
    assert logged >= {key for key, metric in ROW_OF.items() if metric.trl == ADDED and "agreement" not in key}
    assert all(metric.trl for key in logged if (metric := metric_of(key)))


@pytest.mark.parametrize(
    "given",
    [
        {"resumed": 1, "entropy_coef": 0.1, "loss_type": "dapo"},
        {"shuffle_dataset": False, "look_steps": 2, "bf16": True},
        {"shuffle_dataset": False, "look_steps": 1, "per_device_train_batch_size": 2,
         "gradient_accumulation_steps": 8},
    ],
)  # fmt: skip
def test_a_resumed_run_goes_on_as_if_it_had_not_been_cut(tmp_path, given):
    """Completions included; of shuffled prompts in the first epoch, for TRL begins to shuffle anew in a later one."""
    words = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, **given}
    resumed = words.pop("resumed", 2)
    whole = ours(tmp_path / "whole", **words)
    whole.train()
    again = ours(tmp_path / "again", **words)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{resumed}"))
    assert all(torch.equal(again.model.state_dict()[name], value) for name, value in whole.model.state_dict().items())
    first, second = (each.state.log_history[3] for each in (whole, again))
    timeless = {key for key in first if "time" not in key and key != "num_tokens"}
    assert {key: first[key] for key in timeless} == {key: second[key] for key in timeless}


def test_a_checkpoint_of_another_trainer_or_schedule_is_refused(tmp_path):
    words = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    theirs(tmp_path / "theirs", **words).train()
    with pytest.raises(InputError, match="without OBLRPOTrainer's state"):
        ours(tmp_path / "ours", **words).train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-1"))
    ours(tmp_path / "ours", **words).train()
    state = json.loads((tmp_path / "ours" / "checkpoint-1" / "oblrpo_state.json").read_text())
    assert {"schedule", "prior", "proxy", "looks", "generations"} == set(state)
    with pytest.raises(InputError, match="schedule='auto'"):
        ours(tmp_path / "kl", **words, schedule="kl").train(
            resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-1")
        )


def test_a_run_that_was_broken_off_begins_with_a_new_batch(tmp_path):
    """Its other half would be that of an older policy."""
    calls, sizes = [], []

    class Broken(OBLRPOTrainer):
        def _compute_loss(self, model, inputs):
            calls.append(self._update.micro_batches)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return super()._compute_loss(model, inputs)

        def _set_rate(self, fresh):
            sizes.append(self._update.prompts)
            super()._set_rate(fresh)

    trainer = ours(tmp_path, kind=Broken)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.model.zero_grad()
    trainer.train()
    assert calls == [0, 1, 0, 1, 0, 1]
    assert sizes == [4, 4]


def test_evaluation_leaves_training_as_it_is(tmp_path):
    trainer = ours(tmp_path, max_steps=2)
    trainer.train()
    metrics = trainer.evaluate(Dataset.from_dict({"prompt": PROMPTS}))
    assert 0 < metrics["eval_reward"] < 2


def test_it_learns_beside_grpo_from_the_same_seed(tmp_path):
    """The reward is the share of upper bytes; both climb from one half, at TRL's rate for ours to start from."""

    def high(completions, **_):
        return [sum(ord(byte) > 64 for byte in text) / 12 for text in completions]

    words = {
        "max_steps": 25, "max_completion_length": 12, "per_device_train_batch_size": 16,
        "lr_scheduler_type": "constant", "logging_steps": 5, "learning_rate": 5e-3,
    }  # fmt: skip
    found = {}
    for kind, config in ((OBLRPOTrainer, OBLRPOConfig), (GRPOTrainer, GRPOConfig)):
        policy = tiny_policy()
        trainer = kind(
            policy.model, high, args=config(**settings(tmp_path, **words)),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}), processing_class=policy.tokenizer,
        )  # fmt: skip
        trainer.train()
        rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
        found[kind] = rewards[0], rewards[-1]
    assert all(last > first + 0.03 for first, last in found.values()), found


@pytest.mark.parametrize(
    ("kind", "config", "given"),
    [
        (GRPOTrainer, GRPOConfig, {}),
        (GRPOTrainer, GRPOConfig, {"num_iterations": 2, "gradient_checkpointing": True}),
        (RLOOTrainer, RLOOConfig, {"beta": 0.0}),
        (OBLRPOTrainer, OBLRPOConfig, {}),
    ],
)
def test_the_ledger_changes_nothing(tmp_path, kind, config, given):
    weights, logs = [], []
    for looks in (False, True):
        trainer = theirs(tmp_path, kind=kind, config=config, max_steps=4, **given)
        if looks:
            trainer.add_callback(VarianceLedgerCallback(trainer, every=2))
        trainer.train()
        weights.append(trainer.model.state_dict())
        logs.append(trainer.state.log_history)
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    assert not any("variance/rloo" in log for log in logs[0])
    looked = [index + 1 for index, log in enumerate(logs[1]) if "variance/rloo" in log]
    assert looked == [1, 3]
    log = logs[1][0]
    assert all(f"variance/{name}" in log for name in (*UNBIASED, "grpo", "dr_grpo"))
    assert {"snr", "n_snr", "critical_batch_size", "signal2/oblr"} <= set(log)


def test_the_ledger_agrees_with_the_variance_of_prompts_gradients(tmp_path):
    """Sketches are unbiased; over many of them the variance under RLOO is that of the gradients themselves."""
    from oblrpo import estimators
    from tests.trl.support import scores

    policy = tiny_policy()
    trainer = theirs(tmp_path, policy, max_steps=1, learning_rate=0.0)
    ledger = VarianceLedgerCallback(trainer, every=1)
    kept = {}
    take = ledger._metrics

    def metrics(batch, step):
        kept["batch"] = batch
        runs = [take(batch, seed) for seed in range(1, 41)]
        return {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}

    ledger._metrics = metrics
    trainer.add_callback(ledger)
    trainer.train()
    scores_SN = scores(ledger._policy, kept["batch"])
    rewards_PG = ledger._rewards.sum(1).view(-1, 4)
    advantages_PG = rewards_PG - estimators.baseline("rloo", rewards_PG)
    g_PN = (advantages_PG[..., None] * scores_SN.view(4, 4, -1)).mean(1)
    exact = float(g_PN.var(0).sum() / 4)
    assert trainer.state.log_history[0]["variance/rloo"] == pytest.approx(exact, rel=0.05)
    assert trainer.state.log_history[0]["trace_cov"] == pytest.approx(4 * exact, rel=0.05)  # of one prompt


def test_the_ledger_refuses_what_it_cannot_look_at(tmp_path):
    trainer = theirs(tmp_path)
    for given, message in (({"every": 0}, "every"), ({"baseline": "otb"}, "otb")):
        with pytest.raises(InputError, match=message):
            VarianceLedgerCallback(trainer, **given)
    with pytest.raises(InputError, match="two prompts"):
        VarianceLedgerCallback(theirs(tmp_path, gradient_accumulation_steps=1, per_device_train_batch_size=4))


@pytest.mark.parametrize("words", [[], ["--look"]])
def test_the_example_runs(tmp_path, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["trl_oblrpo", "--steps", "5", "--output", str(tmp_path), *words])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_oblrpo.py"), run_name="__main__")
    assert ("variance/oblr" if words else "baseline/mean") in capsys.readouterr().out
    assert [row["step"] for row in read_trl(tmp_path).steps] == [5]


def test_the_benchmark_prints_its_table(monkeypatch, capsys):
    from lab.benchmarks import trl_steps

    monkeypatch.setattr(trl_steps, "SHAPES", {"tiny": trl_steps.Shape(16, 1, 16, 1, 4)})
    monkeypatch.setattr("sys.argv", ["trl_steps", "--rounds", "1"])
    trl_steps.main()
    last = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert last[0] == "tiny: 16 x 4 tokens"
    assert all(0.2 < float(cell) < 20 for cell in last[2:])


def test_the_benchmark_of_memory_measures_a_step():
    from lab.benchmarks import trl_memory

    arguments = Namespace(tokens=16, shortest=None, hidden_size=32, layers=1)
    found = {case: trl_memory.measure(case, 2, arguments) for case in ("grpo", "look")}
    assert all(abs(each["peak"]) < 1 and each["seconds"] > 0 for each in found.values())


def test_weights_that_are_no_numbers_are_named_before_any_training(tmp_path):
    policy = tiny_policy()
    with torch.no_grad():
        policy.model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(InputError, match=r"NaN or infinities in model\.layers\.1\.mlp\.up_proj\.weight before any"):
        ours(tmp_path, policy)
