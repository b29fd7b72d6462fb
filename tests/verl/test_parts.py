"""Parts of the adapter, each by itself: grouping, placing, settings, refusals, estimators, loading."""

import re
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from torch.nn.functional import pad
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry

from oblrpo import estimators
from oblrpo.adapters.shared import check_version
from oblrpo.adapters.verl import KNOWN_VERSIONS
from oblrpo.adapters.verl.advantages import taken_from
from oblrpo.adapters.verl.engine import OBLREngine
from oblrpo.adapters.verl.prompt_rows import PromptRows, place_on_ranks
from oblrpo.adapters.verl.scoring import FEATURES, GRAM, SKETCH
from oblrpo.adapters.verl.settings import RULES, Settings, check_config, read_settings
from oblrpo.adapters.verl.trainer import BatchScores, _rows
from oblrpo.errors import InputError
from oblrpo.scores import CalibratedProxy
from oblrpo.step import StepBaseline
from tests.verl.support.batches import nested
from tests.verl.support.launch import ROOT, environment

EXACT = Settings(score_norms="exact")
UIDS = ["b", "pad1", "a", "b", "a", "c", "pad1", "a"]


def test_groups_are_found_in_any_order_and_padding_left_out():
    groups = PromptRows(UIDS)
    assert groups.rows_of == [[0, 3], [2, 4, 7], [5]]
    values_PG = groups.take(torch.arange(8.0), -1.0)
    assert values_PG.tolist() == [[0, 3, -1], [2, 4, 7], [5, -1, -1]]
    assert groups.valid_PG.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert groups.put(values_PG).tolist() == [0, 0, 2, 3, 4, 5, 0, 7]


def test_rows_without_a_scored_token_do_not_count():
    valid_S = torch.ones(8, dtype=torch.bool)
    valid_S[4] = False
    assert PromptRows(UIDS, valid_S).valid_PG.tolist()[1] == [True, False, True]


def test_a_batch_of_padding_alone_is_refused():
    with pytest.raises(ValueError, match="padding only"):
        PromptRows(["pad1", "pad1"])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_prompts_are_kept_whole_on_ranks_with_even_loads(ranks):
    uids = [f"{prompt}" for prompt in range(8) for _ in range(3)]
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    uids = [uids[place] for place in shuffled]
    loads = [10.0 if uid in {"0", "1"} else 1.0 for uid in uids]
    order = place_on_ranks(uids, loads, ranks)
    assert sorted(order) == list(range(24))
    size = 24 // ranks
    parts = [order[start : start + size] for start in range(0, 24, size)]
    for part in parts:
        for uid in {uids[row] for row in part}:
            assert sum(uids[row] == uid for row in part) == 3
    if ranks == 2:
        assert [sum(loads[row] for row in part) for part in parts] == [39.0, 39.0]


def test_padding_fills_what_prompts_of_different_size_leave():
    uids = ["a"] * 3 + ["b"] * 2 + ["c"] * 2 + ["pad"]
    order = place_on_ranks(uids, [1.0] * 8, 2)
    halves = [{uids[row] for row in order[:4]}, {uids[row] for row in order[4:]}]
    assert {"b", "c"} in halves
    assert {"a", "pad"} in halves


def test_prompts_that_do_not_fit_are_reported():
    assert place_on_ranks(["a"] * 3 + ["b"] * 3 + ["c"] * 3 + ["d"] * 3, [1.0] * 12, 3) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedul": "off"}, "oblrpo has no 'schedul'; .* Did you mean 'schedule'"),
        ({"schedule": "kl"}, "oblrpo: schedule is .kl.; choose one of: auto"),
        ({"score_norms": "guessed"}, "oblrpo: score_norms is .guessed.; choose one of"),
        ({"calibration_steps": 0}, "calibration_steps is 0; it must be a finite number of at least 1"),
        ({"calibration_share": 0.0}, "calibration_share is 0.0; it must be between"),
        ({"kl": 0.0}, "kl is 0.0; it must be a finite number of at least"),
        ({"schedule": "fast"}, "oblrpo: schedule is .fast.; choose one of"),
        ({"inner_products": "none"}, "oblrpo: inner_products is .none.; choose one of"),
        ({"kl": "much"}, "oblrpo: kl is 'much', but it must be a number"),
        ({"ledger_steps": -1}, "ledger_steps is -1; it must be a finite number of at least 0"),
        ({"ledger_steps": 1.5}, "oblrpo: ledger_steps is 1.5, but it must be a whole number"),
        ({"sketch_dimensions": 0}, "sketch_dimensions is 0; it must be"),
    ],
)
def test_wrong_settings_are_refused_by_name(given, message):
    with pytest.raises(InputError, match=message):
        read_settings(given)


def test_right_settings_are_read():
    assert read_settings(None) == Settings()
    assert Settings().score_norms == "calibrated"
    assert read_settings({"kl": 2, "schedule": "plugin", "ledger_steps": 5}) == Settings("plugin", 2.0, ledger_steps=5)


@pytest.fixture(scope="module")
def config():
    """verl's own defaults with the documented block of overrides."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                "algorithm.adv_estimator=oblr_po",
                "trainer.v1.trainer_mode=oblr_po",
                "data.train_batch_size=128",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.n=8",
                "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
                "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
                "actor_rollout_ref.actor.ppo_mini_batch_size=128",
            ],
        )


def test_the_documented_block_is_accepted(config):
    check_config(config, Settings())


WRONG = {
    "trainer.use_v1": False,
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.ppo_epochs": 2,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.entropy_coeff": 0.01,
    "algorithm.filter_groups.enable": True,
    "algorithm.rollout_correction.bypass_mode": True,
    "algorithm.rollout_correction.rollout_is": "sequence",
    "algorithm.rollout_correction.rollout_rs": "token_k1",
    "actor_rollout_ref.rollout.top_p": 0.9,
    "actor_rollout_ref.rollout.top_k": 50,
    "actor_rollout_ref.rollout.full_determinism": True,
    "actor_rollout_ref.rollout.temperature": 0.0,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
    "actor_rollout_ref.model.use_fused_kernels": True,
    "actor_rollout_ref.model.use_liger": True,
    "actor_rollout_ref.actor.use_prefix_grouper": True,
    "actor_rollout_ref.model.mtp.enable": True,
    "actor_rollout_ref.actor.fsdp_config.qat.enable": True,
    "trainer.critic_warmup": 3,
    "distillation.enabled": True,
    "actor_rollout_ref.actor.fsdp_config.offload_policy": True,
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp16",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "algorithm.adv_estimator": "gae",
}


def test_every_rule_is_tried():
    assert {rule.key for rule in RULES} <= set(WRONG)


@pytest.mark.parametrize("key", WRONG)
def test_settings_that_change_the_gradient_are_refused_by_name(config, key):
    changed = config.copy()
    if not key.endswith("param_dtype"):  # which has no default
        assert OmegaConf.select(changed, key, default="missing") != "missing"
    with open_dict(changed):
        if key.endswith("param_dtype"):
            changed.actor_rollout_ref.actor.fsdp_config.mixed_precision = {}
        OmegaConf.update(changed, key, WRONG[key])
    with pytest.raises(InputError, match=key.rsplit(".", 1)[-1] if WRONG[key] != "gae" else "gae"):
        check_config(changed, Settings())


def test_a_loss_scaled_by_the_longest_output_is_refused(config):
    changed = config.copy()
    changed.actor_rollout_ref.actor.loss_agg_mode = "seq-mean-token-sum-norm"
    with pytest.raises(InputError, match="loss_scale_factor"):
        check_config(changed, Settings())
    changed.actor_rollout_ref.actor.loss_scale_factor = 1024
    check_config(changed, Settings())


def test_choices_that_cannot_work_with_the_rest_are_refused(config):
    check_config(config, Settings())
    changed = config.copy()
    changed.actor_rollout_ref.actor.optim.optimizer = "Adafactor"
    with pytest.raises(InputError, match="Adafactor chooses its own"):
        check_config(changed, Settings())
    check_config(changed, Settings(schedule="off"))
    changed = config.copy()
    changed.actor_rollout_ref.rollout.n = 1
    with pytest.raises(InputError, match=r"rollout\.n=1: .* set it to at least 2"):
        check_config(changed, Settings())
    check_config(changed, EXACT)
    changed.data.train_batch_size = changed.actor_rollout_ref.actor.ppo_mini_batch_size = 1
    with pytest.raises(InputError, match=r"- data\.train_batch_size=1: one prompt's gradient"):
        check_config(changed, Settings())


def batch(seed=0):
    """Rewards, mask and uids of 3 prompts x 4 outputs in random order, with 2 rows of padding."""
    generator = torch.Generator().manual_seed(seed)
    uids = [f"{prompt}" for prompt in range(3) for _ in range(4)] + ["pad", "pad"]
    order = torch.randperm(14, generator=generator).tolist()
    uids = [uids[place] for place in order]
    length_S = torch.randint(1, 6, (14,), generator=generator)
    mask = (torch.arange(5) < length_S[:, None]).long()
    mask[[row for row, uid in enumerate(uids) if uid == "pad"]] = 0
    rewards = torch.zeros(14, 5)
    rewards[torch.arange(14), length_S - 1] = torch.rand(14, generator=generator)
    return rewards * mask, mask, uids


@pytest.mark.parametrize(("name", "baseline"), [("oblr_po", "oblr"), ("oblr_po_shrunk", "oblr_shrunk")])
def test_advantages_are_those_of_our_own_functions(name, baseline):
    """Two batches one after the other, as our own trainer takes them."""
    ours, theirs, metrics = estimators.Prior(), StepBaseline(baseline), {}
    for seed in (0, 1):
        rewards, mask, uids = batch(seed)
        rewards, mask = pad(rewards, (1, 0)), pad(mask, (0, 1))  # given for the token after the policy's own, a tool's
        made, score_SN, *_ = products(EXACT, 3, seed)
        first = theirs.begin()
        with taken_from(partial(made.advantages, baseline=first, metrics=metrics)):
            advantages, _ = get_adv_estimator_fn(name)(
                token_level_rewards=rewards, response_mask=mask, index=uids, config=None
            )
        theirs.end_step(first)
        prompts = list(dict.fromkeys(uid for uid in uids if uid != "pad"))
        rows_PG = torch.tensor([[row for row, uid in enumerate(uids) if uid == prompt] for prompt in prompts])
        rewards_PG, norm2_PG = rewards.double().sum(1)[rows_PG], score_SN.square().sum(1)[rows_PG]
        baseline_PG = estimators.baseline(baseline, rewards_PG, norm2_PG=norm2_PG, prior=ours)
        ours.observe(rewards_PG, norm2_PG)
        ours.next_step()
        expected = torch.zeros(14, dtype=torch.float64)
        expected[rows_PG] = rewards_PG - baseline_PG
        assert torch.allclose(advantages.double(), expected[:, None] * mask, atol=1e-6)
        assert expected.abs().max() > 0.1
        assert metrics["critic/baseline/mean"] == pytest.approx(float(baseline_PG.mean()), rel=1e-6)
        assert metrics["critic/score_norm2/mean"] == pytest.approx(float(norm2_PG.mean()), rel=1e-6)


def test_the_estimators_refuse_a_trainer_that_takes_no_norms():
    rewards, mask, uids = batch()
    with pytest.raises(InputError, match="trainer_mode=oblr_po"):
        get_adv_estimator_fn("oblr_po")(token_level_rewards=rewards, response_mask=mask, index=uids, config=None)


CALIBRATED = Settings(calibration_steps=5, calibration_share=0.5)


def features(mask, seed):
    """Features of these rows; zeros where there is no token."""
    generator = torch.Generator().manual_seed(seed + 1)
    length_S = mask.sum(1).double()
    others_SK = torch.rand(len(mask), 3, generator=generator).double() * torch.tensor([-1.0, 1.0, 1.0])
    return torch.cat([length_S[:, None], others_SK * length_S[:, None]], 1)


def test_norms_are_exact_when_they_are_due_and_of_prompts_chosen_by_uid_alone():
    uids = [f"{prompt}" for prompt in (3, 1, 2, 0) for _ in range(2)] + ["pad"]
    asked = {step: BatchScores(CALIBRATED, step, 2, uids) for step in range(1, 11)}
    assert [step for step, made in asked.items() if made.exact] == [1, 5, 10]
    assert asked[1].requests()["oblrpo_prompts"] == ("0", "1")
    assert asked[2].columns == [FEATURES]
    assert asked[5].columns == [FEATURES, GRAM]
    due = BatchScores(replace(CALIBRATED, ledger_steps=3), 3, 2, uids)  # the ledger is of the whole batch
    assert due.exact
    assert due.requests()["oblrpo_prompts"] is None


def test_calibrated_weights_know_nothing_of_the_other_outputs_of_the_batch():
    """Which is why leave-one-out leaves the gradient unbiased: they are fixed before this batch's norms are seen."""
    proxy = CalibratedProxy()
    made, *_ = products(CALIBRATED, 5)
    before_PG = made.weight_PG(proxy)
    assert (before_PG > 0).all()
    made._columns[FEATURES][1, 2] *= 2  # another output's
    changed_PG = made.weight_PG(proxy) != before_PG
    assert changed_PG.nonzero().tolist() == [[1, 2]]
    made._columns[FEATURES][1, 2] /= 2
    made.teach(proxy)
    assert proxy.observed == 4 * 2  # of two prompts in three
    assert not torch.equal(made.weight_PG(proxy), before_PG)


def test_prompts_that_were_not_scored_are_taken_for_the_mean_of_those_that_were():
    made, _, masks, uids = products(CALIBRATED, 5)
    advantages = nested([(1.0 + row % 3) * mask for row, mask in enumerate(masks.unbind())])
    data = tu.get_tensordict({"advantages": advantages, "response_mask": masks}, {})
    got = made.group_norm2(data, 1 / 12)["group_norm2"]
    whole, *_ = products(EXACT, 5)
    every = whole.group_norm2(data, 1 / 12)["group_norm2"]
    names = [uids[rows[0]] for rows in made.groups.rows_of]
    known = {name: norm2 for name, norm2 in zip(names, every, strict=True) if name in {"0", "1"}}
    mean = sum(known.values()) / 2
    assert got == pytest.approx([known.get(name, mean) for name in names])


def test_without_norms_nothing_is_said_of_gradients_but_that_none_is_none():
    made, _, masks, _ = products(CALIBRATED, 6)
    some = nested([1.0 * mask for mask in masks.unbind()])
    none = nested([0.0 * mask for mask in masks.unbind()])
    assert made.group_norm2(tu.get_tensordict({"advantages": some, "response_mask": masks}, {}), 1.0) == {}
    found = made.group_norm2(tu.get_tensordict({"advantages": none, "response_mask": masks}, {}), 1.0)
    assert found == {"group_norm2": [0.0] * 3}


def products(settings, step, seed=0):
    """BatchScores of a batch of random scores, and what it was made of."""
    _, mask, uids = batch(seed)
    score_SN = torch.randn(14, 30, generator=torch.Generator().manual_seed(seed)).double() * (mask.sum(1) > 0)[:, None]
    made = BatchScores(settings, step, 4, uids)
    gram = score_SN.square().sum(1, keepdim=True)
    if settings.exact_pairs:
        gram = torch.zeros(14, 5, dtype=torch.float64)  # one output more was requested than any prompt has
        for rows in PromptRows(uids).rows_of:
            gram[rows, : len(rows)] = score_SN[rows] @ score_SN[rows].T
    sketches = torch.cat([score_SN, score_SN], 1).float()  # not compressed at all
    masks = nested([row[: max(1, int(row.sum()))] for row in mask])
    columns = {GRAM: gram, SKETCH: sketches, FEATURES: features(mask, seed)}
    data = {key: columns[key] for key in made.columns} | {"uid": uids, "response_mask": masks}
    made.take(tu.get_tensordict(data, {}))
    return made, score_SN, masks, uids


@pytest.mark.parametrize("inner_products", ["exact", "sketched"])
def test_gradient_norms_of_prompts(inner_products):
    made, score_SN, masks, uids = products(replace(EXACT, inner_products=inner_products), 3)
    advantage_S = torch.randn(14, generator=torch.Generator().manual_seed(5)).double()
    advantages = nested([value * row for value, row in zip(advantage_S, masks.unbind(), strict=True)])
    data = tu.get_tensordict({"advantages": advantages, "response_mask": masks}, {})
    valid_PG = made.groups.valid_PG
    rewards_PG = torch.rand(valid_PG.shape, generator=torch.Generator().manual_seed(6)).double()
    found = made.group_norm2(data, 1 / 12, rewards_PG, 40)
    got = torch.tensor(found["group_norm2"], dtype=torch.float64)
    share_SN = advantage_S[:, None] * score_SN / 12
    gradients = torch.stack([share_SN[rows].sum(0) * 3 for rows in PromptRows(uids).rows_of])
    assert torch.allclose(got, gradients.square().sum(1), rtol=1e-5)
    assert torch.allclose(gradients.mean(0), share_SN.sum(0))  # their mean is the gradient of verl's loss
    unit_P = valid_PG.sum(1) * 3 / 12  # of a prompt with fewer outputs verl's gradient is shorter
    score_PGN = made.groups.take(score_SN) * unit_P[:, None, None]
    own2 = estimators.own_norm2(score_PGN @ score_PGN.mT, rewards_PG, valid_PG)
    assert found["own2"] == pytest.approx(own2, rel=1e-5)
    assert found["rows"] == 40
    assert set(made.group_norm2(data, 1 / 12)) == {"group_norm2"}


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 500),
        ({"algorithm.adv_estimator": "rloo"}, 500),
        ({"algorithm.adv_estimator": "grpo"}, None),
        ({"data.shuffle": False}, None),
        ({"data.train_batch_size": 4}, None),
        ({"actor_rollout_ref.rollout.n": 1}, None),
    ],
)
def test_whether_prompts_are_counted_is_said_by_the_settings(config, changes, rows):
    """Drawn by chance, few for a batch, and under an unbiased baseline."""
    changed = OmegaConf.create(OmegaConf.to_container(config))
    for key, value in changes.items():
        OmegaConf.update(changed, key, value)
    assert _rows(changed, range(500)) == rows


def test_until_something_was_measured_every_step_is_due():
    """As where no reward differed in the first one."""
    assert [BatchScores(CALIBRATED, step, 4, ["0"]).exact for step in (1, 2, 5)] == [True, False, True]
    assert all(BatchScores(CALIBRATED, step, 4, ["0"], measured=False).exact for step in (1, 2, 3))


def test_advantages_by_token_are_refused():
    made, _, masks, _ = products(EXACT, 3)
    advantages = nested([torch.arange(len(row)) * row for row in masks.unbind()])
    data = tu.get_tensordict({"advantages": advantages, "response_mask": masks}, {})
    with pytest.raises(InputError, match="adv_estimator"):
        made.group_norm2(data, 1.0)


def test_the_ledger_is_taken_when_it_is_due_and_is_that_of_the_exact_inner_products():
    settings = replace(EXACT, ledger_steps=5)
    assert [step for step in range(1, 12) if BatchScores(settings, step, 4).takes_ledger] == [1, 5, 10]
    assert not BatchScores(Settings(), 1, 4).takes_ledger
    made, score_SN, *_ = products(settings, 5)
    rewards, _, uids = batch(0)
    metrics = made.ledger(made.groups.take(rewards.double().sum(1)), estimators.Prior())
    rows = torch.tensor(PromptRows(uids).rows_of)
    gram_SS = score_SN[rows.flatten()] @ score_SN[rows.flatten()].T
    rewards_PG = rewards.double().sum(1)[rows]
    advantages = {"rloo": rewards_PG - estimators.baseline("rloo", rewards_PG)}
    expected = estimators.ledger(gram_SS, advantages, rewards_PG, {"rloo": True})
    assert metrics["critic/variance/rloo"] == pytest.approx(expected.entries["rloo"].variance, rel=1e-5)
    assert metrics["critic/variance_between_prompts"] == pytest.approx(expected.between, rel=1e-4)
    assert {"critic/variance/oblr", "critic/variance/oblr_shrunk", "critic/signal2/opo"} <= set(metrics)


@pytest.mark.parametrize("version", ["0.9.0", "0.8.5", "0.11.0", "1.0"])
def test_other_versions_of_verl_are_refused_with_the_one_to_install(version):
    with pytest.raises(ImportError, match=r"verl>=0.9.1,<0.11"):
        check_version("verl", version, *KNOWN_VERSIONS)


@pytest.mark.parametrize("version", ["0.9.1", "0.9.1.post1", "0.9.2", "0.10.0.dev", "0.10.3"])
def test_known_versions_are_accepted(version):
    check_version("verl", version, *KNOWN_VERSIONS)


def test_the_plugin_has_registered_everything():
    assert get_trainer_cls("oblr_po").__name__ == "OBLRTrainer"
    assert OBLREngine in EngineRegistry._engines["language_model"]["fsdp2"].values()


@pytest.mark.parametrize("first", ["verl", "oblrpo.adapters.verl.engine", "oblrpo.adapters.verl.trainer"])
def test_whichever_is_imported_first_the_plugin_loads(first, tmp_path):
    """Ray's workers unpickle our classes before they import verl."""
    code = (
        f"import {first}; from verl.trainer.ppo.v1 import get_trainer_cls; print(get_trainer_cls('oblr_po').__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True)
    assert done.stdout.split()[-1] == "oblrpo.adapters.verl.trainer", done.stderr
    assert "did not load" not in done.stderr


def test_a_plugin_that_fails_says_so_though_verl_does_not(tmp_path):
    """verl drops the exception at level DEBUG."""
    (tmp_path / "transfer_queue.py").write_text("raise ImportError('no queue today')\n")
    env = environment(tmp_path)
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    done = subprocess.run([sys.executable, "-c", "import verl"], env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "the verl plugin did not load" in done.stderr
    assert "no queue today" in done.stderr


def test_the_launch_script_gives_settings_that_verl_knows_and_we_accept(tmp_path):
    shown = tmp_path / "shown"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shown}\n')
    python.chmod(0o755)
    subprocess.run(
        ["bash", str(ROOT / "examples" / "verl_qwen3.sh"), "trainer.total_epochs=2"],
        env=environment(tmp_path) | {"PYTHON": str(python)},
        check=True,
    )
    module, *overrides = shown.read_text().splitlines()[1:]
    assert module == "verl.trainer.main_ppo"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    settings = read_settings(OmegaConf.to_container(config.oblrpo))
    check_config(config, settings)
    assert settings.schedule == "debiased"
    assert config.trainer.total_epochs == 2
    assert config.actor_rollout_ref.actor.optim.optimizer == "SGD"


def test_the_page_names_every_refusal_and_every_setting():
    page = (ROOT / "docs" / "reference" / "verl.md").read_text()
    for rule in RULES:
        assert f"`{rule.key.removeprefix('actor_rollout_ref.')}`" in page, rule.key
    for each in fields(Settings):
        assert f"`{each.name}`" in page, each.name


def test_the_cost_command_runs_as_the_page_says(tmp_path):
    """On a CPU, with what the lab book sets before it."""
    page = (ROOT / "docs" / "lab_book" / "verl.md").read_text()
    block = next(each for each in page.split("```") if "\npython -m tests.verl.support.cost" in each)
    command = block.replace("python -m", f"{sys.executable} -m").replace("FOLDER 64 auto ", f"{tmp_path / 'cost'} 2 ")
    env = {key: value for key, value in environment(tmp_path).items() if not key.startswith("VERL_")}
    done = subprocess.run(["bash", "-ec", command], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"auto, calibrated: \d\.\d\d times verl's two passes", done.stdout)
