"""On every rank: verl's FSDP2 engine with our part, against loop autograd on the unsharded model in float64."""

import json
import math
import os
import sys
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugins
from peft import PeftModel
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from oblrpo import estimators
from oblrpo.adapters.shared import key_of, measured
from oblrpo.adapters.verl.engine import OBLREngine
from oblrpo.adapters.verl.prompt_rows import place_on_ranks
from oblrpo.adapters.verl.scoring import FEATURES
from oblrpo.adapters.verl.settings import Settings
from oblrpo.adapters.verl.trainer import BatchScores
from oblrpo.estimators.measured_rate import BEGIN
from oblrpo.scores import CalibratedProxy, oracle
from tests.verl.support.batches import as_data, logps, make_rows, nested
from tests.verl.support.ranks import answer

PROMPTS, OUTPUTS, PADDING, RATE = 6, 4, 1, 1e-3
MEAN_LENGTH, ROWS = 3.0, 9  # what is told to the schedule: of outputs, and of prompts in all
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
BFLOAT16 = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


EXACT = Settings(score_norms="exact")
PLUGIN = replace(EXACT, schedule="plugin")  # whose factor is not 0 whatever the batch


def make_engine(path, settings, packed=False, checkpointing=False, precision=FLOAT32, adapter=None, **engine_config):
    lora = {"lora_rank": 4, "lora_adapter_path": adapter} if adapter else {}
    model = HFModelConfig(
        path=path,
        use_remove_padding=packed,
        enable_gradient_checkpointing=checkpointing,
        override_config={"attn_implementation": "sdpa"},
        **lora,
    )
    config = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=precision, use_torch_compile=False, wrap_policy={}, **engine_config
    )
    optimizer = FSDPOptimizerConfig(lr=RATE, total_training_steps=10, weight_decay=0.0)
    engine = OBLREngine(model, config, optimizer, CheckpointConfig())
    engine.initialize()
    engine.configure(settings)
    return engine


def truth_of(path, adapter=None):
    """The model in float64, which grouped_mm does not know."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **eager).eval()
    return PeftModel.from_pretrained(model, adapter, is_trainable=True).double().eval() if adapter else model


def gathered(value):
    """This value of every rank, in a list."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def of_this_rank(rows):
    size = len(rows) // dist.get_world_size()
    return rows[dist.get_rank() * size : (dist.get_rank() + 1) * size]


def scored(engine, settings, rows, packed, step=1):
    """Columns of the whole batch, as the driver gets them."""
    products = BatchScores(settings, step, OUTPUTS, [row["uid"] for row in rows])
    data = as_data(
        of_this_rank(rows),
        calculate_entropy=True,
        use_remove_padding=packed,
        micro_batch_size_per_gpu=1,
        **products.requests(),
    )
    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    columns = {name: torch.cat(gathered(output[name])) for name in products.columns}
    by_token = [
        [row for part in gathered([row.clone() for row in output[name].unbind()]) for row in part]
        for name in ("log_probs", "entropy")
    ]
    uids, masks = [row["uid"] for row in rows], nested([row["response_mask"] for row in rows])
    products.take(tu.get_tensordict({**columns, "response_mask": masks, "uid": uids}, {}))
    return products, *by_token


def relative(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


def check(folder, packed=False, checkpointing=False, precision=FLOAT32, settings=None, adapter=None, **engine_config):
    """Errors of one scenario, relative."""
    settings = settings or PLUGIN
    path = f"{folder}/model"
    engine = make_engine(path, settings, packed, checkpointing, precision, adapter, **engine_config)
    truth = truth_of(path, adapter)
    rows = make_rows(PROMPTS, OUTPUTS, PADDING, truth.config.vocab_size, seed=7)
    rows = [rows[row] for row in place_on_ranks([row["uid"] for row in rows], [1.0] * len(rows), dist.get_world_size())]
    products, log_probs, entropy = scored(engine, settings, rows, packed)

    true_logps_S = logps(truth, rows)
    score_SN = torch.stack([torch.cat([g.flatten() for g in row]) for row in oracle.scores(truth, true_logps_S)])
    result = {"norm2": max_relative(products.groups.put(products.norm2_PG), score_SN.square().sum(1))}
    sums = [
        (row_logps(row, each) - logp).abs().item()
        for row, each, logp in zip(rows, log_probs, true_logps_S, strict=True)
    ]
    result["logps"] = max(sums)
    result["entropy"] = max(
        abs((row_logps(row, each) - features_of(truth, row)[2]).item()) for row, each in zip(rows, entropy, strict=True)
    )

    groups = products.groups
    rewards_PG = groups.take(torch.rand(len(rows), generator=torch.Generator().manual_seed(3)).double())
    baseline_PG = estimators.baseline("oblr", rewards_PG, norm2_PG=products.norm2_PG, valid_PG=groups.valid_PG)
    advantage_S = groups.put(torch.where(groups.valid_PG, rewards_PG - baseline_PG, 0))
    for row, advantage in zip(rows, advantage_S.tolist(), strict=True):
        row["advantage"] = torch.tensor(advantage)
    count = PROMPTS * OUTPUTS
    after = tu.get_tensordict(
        {key: nested([row["advantage"] * row["response_mask"] for row in rows]) for key in ("advantages",)}
        | {"response_mask": nested([row["response_mask"] for row in rows])},
        {},
    )
    told = products.group_norm2(after, 1 / count, rewards_PG, ROWS)
    share_SN = -advantage_S[:, None] * score_SN / count
    true_groups = torch.stack([share_SN[rows].sum(0) for rows in groups.rows_of]) * PROMPTS
    true_norm2_P = true_groups.square().sum(1)
    result["group_norm2"] = max_relative(torch.tensor(told["group_norm2"]), true_norm2_P)
    unit_P = groups.valid_PG.sum(1) / OUTPUTS  # an output that does not count is one of advantage 0
    score_PGN = groups.take(score_SN) * unit_P[:, None, None]
    true_own2 = estimators.own_norm2(score_PGN @ score_PGN.mT, rewards_PG, groups.valid_PG)
    result["own2"] = abs(told["own2"] - true_own2) / true_norm2_P.mean().item()

    before = [p.detach().clone() for p in engine.module.parameters()]
    metrics = update(engine, rows, packed, told, count)
    true_norm2 = share_SN.sum(0).square().sum()
    moments = estimators.moments(true_norm2_P, true_norm2).of_rows(true_own2, ROWS)
    plain = torch.nn.Linear(1, 1)
    schedule = estimators.SNRSchedule(torch.optim.AdamW(plain.parameters(), lr=RATE), settings.schedule)
    schedule.step(moments)
    result["grad_norm"] = abs(metrics["grad_norm"] / true_norm2.sqrt().item() - 1)
    result["trace_cov"] = abs(metrics["trace_cov"][0] / moments.trace_cov - 1)
    result["signal2"] = abs(metrics["signal2"][0] - moments.signal2) / true_norm2.item()
    result["lr_used"] = abs(metrics["lr_used"][0] - schedule.learning_rates[0]) / RATE
    moved = max(
        (p.detach() - b).full_tensor().abs().max().item()
        for p, b in zip(engine.module.parameters(), before, strict=True)
    )
    result["moved"] = (
        abs(moved - schedule.learning_rates[0]) / RATE
    )  # AdamW's first step moves every parameter by its rate
    result["factor"] = metrics["lr_factor"][0]
    result["lr_after"] = engine.optimizer.param_groups[0]["lr"]
    return result


def row_logps(row, log_probs):
    """What verl's log_probs, one a token of the whole sequence, say of the scored ones."""
    start = len(row["prompts"])
    return (log_probs[start - 1 : start - 1 + len(row["responses"])] * row["response_mask"]).sum()


def max_relative(got, expected):
    known = expected > 0
    assert (got[~known] == 0).all()
    return ((got[known] - expected[known]).abs() / expected[known]).max().item()


def update(engine, rows, packed, told, count, size=1):
    """One update by verl's own loss, so many rows at a time; `told` is what the trainer says of the batch."""
    data = as_data(
        of_this_rank(rows),
        use_remove_padding=packed,
        micro_batch_size_per_gpu=size,
        global_batch_size=count,
        oblrpo_batch=json.dumps({"differs": True, "mean_length": MEAN_LENGTH} | told),
    )
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=OUTPUTS,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-sum",
        policy_loss=PolicyLossConfig(loss_mode="gpg"),
    )
    with engine.train_mode():
        return engine.train_batch(data, partial(ppo_loss, config=actor))["metrics"]


def batch_on_ranks(vocabulary):
    rows = make_rows(PROMPTS, OUTPUTS, PADDING, vocabulary, seed=7)
    return [rows[row] for row in place_on_ranks([row["uid"] for row in rows], [1.0] * len(rows), dist.get_world_size())]


def token_logps(model, row):
    whole, start = torch.cat([row["prompts"], row["responses"]]), len(row["prompts"])
    logp_TV = model(input_ids=whole[None], use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
    return logp_TV.gather(1, row["responses"][:, None])[:, 0]


def plain_model(engine, path):
    """The engine's weights as they are, in float64 in one piece."""
    model = truth_of(path)
    state = {name: value.full_tensor() for name, value in engine.module.state_dict().items()}
    model.load_state_dict(state)
    model.tie_weights()
    return model


@torch.no_grad()
def follow(folder, settings, rate=RATE):
    """Errors of three updates under `auto`, against the rule on log-probabilities of the plain model's tokens.

    The batch is said to have a gradient a third as large from step to step, whose scale the optimizer's units follow.
    """
    path = f"{folder}/model"
    engine = make_engine(path, settings)
    for group in engine.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = rate
    rows = batch_on_ranks(engine.module.config.vocab_size)
    schedule = estimators.SNRSchedule(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate), "auto", kl=settings.kl
    )
    size = len(rows) // dist.get_world_size()
    keys = [
        key_of(torch.cat([row["prompts"], row["responses"]])) if row["response_mask"].any() else None for row in rows
    ]
    ranks = [keys[start : start + size] for start in range(0, len(rows), size)]
    chosen = []
    for rank in range(len(ranks)):
        places, meant = measured(ranks, rank)
        chosen += [rows[rank * size + place] for place in places[:meant]]
    width = max(len(row["responses"]) for row in chosen)

    def change_SC(before, after):
        return torch.stack(
            [
                torch.nn.functional.pad((new - old) * row["response_mask"], (0, width - len(new)))
                for row, old, new in zip(chosen, before, after, strict=True)
            ]
        )

    errors, momentum, unit = {"step_kl": 0.0, "grad_norm": 0.0, "shares": []}, {}, 0.0
    for step in range(3):
        model = plain_model(engine, path)
        before = [token_logps(model, row) for row in chosen]
        for place, row in enumerate(rows):
            row["advantage"] = torch.tensor(1.0 if place % 3 else -1.0) * row["response_mask"].any()
            row["old_log_probs"] = token_logps(model, row).float()
        told = [1e6 / 9**step] * PROMPTS
        with torch.enable_grad():
            metrics = update(engine, rows, False, {"group_norm2": told}, PROMPTS * OUTPUTS, size=4)
            logp_S = torch.stack([(token_logps(model, row) * row["response_mask"]).sum() for row in rows])
            (-torch.stack([row["advantage"].double() for row in rows]) @ logp_S / (PROMPTS * OUTPUTS)).backward()
        norm2, true_norm = metrics["grad_norm"] ** 2, estimators.squared_norm(list(model.parameters())) ** 0.5
        errors["grad_norm"] = max(errors["grad_norm"], abs(metrics["grad_norm"] / true_norm - 1))
        state = engine._schedule.rule.state
        older, unit = min(1.0, math.sqrt(state.unit / (unit or state.unit))), state.unit
        times = min(1.0, engine.optimizer_config.clip_grad / true_norm) * math.sqrt(state.first_unit / unit)
        for name, parameter in model.named_parameters():
            momentum[name] = 0.9 * older * momentum.get(name, 0.0) + 0.1 * times * parameter.grad
        # The slope that the engine saw; this schedule has no gradient of its own to see one by.
        vars(schedule.rule.slope).update(vars(engine._schedule.rule.slope))
        moments = estimators.moments(torch.tensor(told), norm2)
        schedule.step(moments, mean_length=MEAN_LENGTH, fresh=False)
        expected = schedule.learning_rates[0]
        schedule.optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        schedule.optimizer.step()
        share = metrics["lr_used"][0] / expected
        model = plain_model(engine, path)
        true_SC = change_SC(before, [token_logps(model, row) for row in chosen])
        true_kl = estimators.measuring.mean_kl(true_SC)
        errors["step_kl"] = max(errors["step_kl"], abs(metrics["step_kl"][0] - true_kl) / max(true_kl, 1e-9))
        errors.setdefault("first", true_kl / (BEGIN * MEAN_LENGTH))
        errors["shares"].append(share)
        # the engine's own knowledge of the update is what the rule goes on with
        schedule.load_state_dict(engine._schedule.state_dict())
        schedule._unmeasured = None
    errors["ranks agree"] = float(len(set(gathered(json.dumps(engine._schedule.state_dict())))) == 1)
    errors["most"] = max(errors["shares"])
    errors["last"] = errors["shares"][-1]
    errors["least"] = min(errors.pop("shares"))
    errors["scale"] = unit / state.first_unit
    errors["momentum"] = max(
        relative(engine.optimizer.state[parameter]["exp_avg"].full_tensor().double(), momentum[name])
        for name, parameter in engine.module.named_parameters()
    )
    return errors


def left_out(folder, settings):
    """What changes in updates on batches of which no reward differs from another, and on one whose gradient is 0."""
    engine = make_engine(f"{folder}/model", settings)
    rows, count = batch_on_ranks(engine.module.config.vocab_size), PROMPTS * OUTPUTS

    def state():
        weights = [p.detach().full_tensor().clone() for p in engine.module.parameters()]
        optimizer = [
            value.full_tensor() if hasattr(value, "full_tensor") else value
            for each in engine.optimizer.state_dict()["state"].values()
            for value in each.values()
        ]
        return [each.clone() for each in (*weights, *optimizer)], json.dumps(engine._schedule.state_dict())

    def made(told, advantage_of):
        model = plain_model(engine, f"{folder}/model")
        for place, row in enumerate(rows):
            row["advantage"] = torch.tensor(advantage_of(place)) * row["response_mask"].any()
            with torch.no_grad():
                row["old_log_probs"] = token_logps(model, row).float()
        return update(engine, rows, False, told, count)

    signal, agreeing = {"group_norm2": [1e4] * PROMPTS}, {"differs": False}
    made(signal, lambda place: 1.0 if place % 3 else -1.0)
    before, found = state(), {"changed": 0.0}
    nothing = [({"group_norm2": [0.0] * PROMPTS}, 0.0)] if settings.needs_moments else []
    for told, advantage in ((agreeing, 0.3), *nothing, (agreeing, -1.0)):
        metrics = made(told, lambda _, advantage=advantage: advantage)
        now = state()
        found["changed"] += float(now[1] != before[1] or not all(map(torch.equal, now[0], before[0])))
        found["lr_used"], found["skipped"] = metrics["lr_used"][0], metrics["skipped"][0]
    made(signal, lambda place: 1.0 if place % 3 else -1.0)
    found["goes on"] = float(not all(map(torch.equal, state()[0], before[0])))
    return found


def calibrated(folder, settings, packed=False):
    """Errors of features of every row, and of norms of the prompts that were asked for."""
    path = f"{folder}/model"
    engine = make_engine(path, settings, packed)
    truth = truth_of(path)
    rows = batch_on_ranks(truth.config.vocab_size)
    products, *_ = scored(engine, settings, rows, packed)
    true_logps_S = logps(truth, rows)
    norm2_S = torch.stack([sum(g.square().sum() for g in row) for row in oracle.scores(truth, true_logps_S)])
    known_S = products.groups.put(products._known_P[:, None].expand_as(products.groups.valid_PG).double()).bool()
    got_S = products.groups.put(products.norm2_PG)
    found = {"norm2": max_relative(got_S[known_S], norm2_S[known_S])}
    found["others"] = float(got_S[~known_S].abs().sum())
    found["chosen"] = int(products._known_P.sum())
    true_PGK = products.groups.take(torch.stack([features_of(truth, row) for row in rows]))
    found["features"] = float(((products._columns[FEATURES] - true_PGK).abs() / (1 + true_PGK.abs())).max())
    proxy, valid_PG = CalibratedProxy(), products.groups.valid_PG
    before_PG = products.weight_PG(proxy)
    found["begins"] = relative(before_PG[valid_PG], true_PGK[..., 0][valid_PG] ** 1.6)
    products.teach(proxy)
    found["taught"] = proxy.observed - int((valid_PG & products._known_P[:, None]).sum())
    found["learned"] = float((products.weight_PG(proxy) - before_PG).abs().max())
    # A step without norms: no moments, and yet an update.
    quiet, *_ = scored(engine, settings, rows, packed, step=3)
    for row in rows:
        row["advantage"] = torch.rand(()) * row["response_mask"].any()
    advantages = nested([row["advantage"] * row["response_mask"] for row in rows])
    masks = nested([row["response_mask"] for row in rows])
    after = tu.get_tensordict({"advantages": advantages, "response_mask": masks}, {})
    found["measured"] = float(quiet.group_norm2(after, 1.0) != {})
    first = update(engine, rows, packed, products.group_norm2(after, 1 / (PROMPTS * OUTPUTS)), PROMPTS * OUTPUTS)
    second = update(engine, rows, packed, {}, PROMPTS * OUTPUTS)
    found["in both"] = float({"lr_used", "snr"} <= set(first) & set(second))
    found["in the first"] = float("trace_cov" in first and "trace_cov" not in second)
    found["averages stay"] = float(first["snr"] == second["snr"])
    return found


@torch.no_grad()
def features_of(model, row):
    """Length, log-probability, entropy and logit norms of a row's scored tokens."""
    whole, start = torch.cat([row["prompts"], row["responses"]]), len(row["prompts"])
    logp_TV = model(input_ids=whole[None], use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
    logp_T, pi_TV = logp_TV.gather(1, row["responses"][:, None])[:, 0], logp_TV.exp()
    columns = [torch.ones_like(logp_T), logp_T, -(pi_TV * logp_TV).sum(1), 1 - 2 * logp_T.exp() + pi_TV.square().sum(1)]
    return torch.stack([(column * row["response_mask"]).sum() for column in columns])


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    sketched = replace(PLUGIN, inner_products="sketched", sketch_dimensions=1 << 15, sketch_directions=64)
    scenarios = {
        "padded": {},
        "debiased": {"settings": replace(EXACT, schedule="debiased")},
        "packed": {"packed": True},
        "packed, filled up": {"packed": True, "pad_to_length": True, "pad_to_length_bucket": 16},
        "checkpointed": {"checkpointing": True},
        "two prompts a pass": {"settings": replace(PLUGIN, prompts_per_micro_batch=2)},
        "sketched": {"settings": sketched},
        "bfloat16": {"precision": BFLOAT16},
    }
    results = {}
    for name, scenario in scenarios.items() if not os.environ.get("QUICK") else ():
        began = time.time()
        results[name] = check(folder, **scenario) | {"seconds": time.time() - began}
        print(os.environ["RANK"], name, results[name], flush=True)
    results["auto"] = follow(folder, EXACT)
    results["auto, confined"] = follow(folder, replace(EXACT, kl=1e-6))
    results["auto, not felt"] = follow(folder, EXACT, rate=1e-12)
    results["left out"] = left_out(folder, EXACT)
    results["left out, debiased"] = left_out(folder, replace(EXACT, schedule="debiased"))
    results["left out, off"] = left_out(folder, replace(EXACT, schedule="off"))
    half = Settings(schedule="debiased", calibration_share=0.5)  # of the default, calibrated norms
    results["calibrated"] = calibrated(folder, half)
    results["calibrated, packed, sketched"] = calibrated(folder, replace(half, inner_products="sketched"), packed=True)
    for name in list(results)[-8:]:
        print(os.environ["RANK"], name, results[name], flush=True)
    answer(folder, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
