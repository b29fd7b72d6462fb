"""What taking scores costs beside verl's own passes, on one rank.

`python -m tests.verl.support.cost FOLDER [TOKENS] [NAME ...]`: CPU seconds of one thread, the least of three in
alternation, and peak memory beyond what is there before, on random completions.
"""

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugins
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from oblrpo.adapters.verl.settings import Settings
from oblrpo.adapters.verl.trainer import BatchScores
from oblrpo.memory import peak_bytes
from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig
from tests.verl.support.batches import as_data
from tests.verl.support.engine_scenarios import make_engine
from tests.verl.support.task import qwen_like

PROMPTS, OUTPUTS = 4, 8
ROUNDS = 3


def rows_of(tokens):
    rows = []
    for prompt in range(PROMPTS):
        question = torch.randint(2, 258, (8,))
        for _ in range(OUTPUTS):
            ids = torch.randint(2, 258, (tokens,))
            rows.append({"uid": f"{prompt}", "prompts": question, "responses": ids})
            rows[-1] |= {"response_mask": torch.ones_like(ids), "advantage": torch.randn(())}
    return rows


def measured(runs):
    """The least CPU seconds and the peak in MB of each of these."""
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.process_time()
            run()
            times[name].append(time.process_time() - began)
    return {name: (min(times[name]), peak_bytes(run, "cpu") / 1e6) for name, run in runs.items()}


def engine_logps(engine, rows, common):
    """What the engine itself says of every answer's tokens."""
    with engine.eval_mode():
        whole = engine.infer_batch(as_data(rows, calculate_entropy=True, **common))["model_output"]["log_probs"]
    start = len(rows[0]["prompts"]) - 1
    return [each[start : start + len(rows[0]["responses"])].clone() for each in whole.unbind()]


def main(folder, tokens, names):
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    dist.init_process_group(backend="gloo")
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    policy = make_policy(
        PolicyConfig(model_args={"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}, device="cpu")
    )
    policy.save(folder / "model")
    qwen_like(policy.tokenizer).save_pretrained(folder / "model")
    rows = rows_of(tokens)
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=OUTPUTS,
        ppo_micro_batch_size_per_gpu=OUTPUTS,
        loss_agg_mode="seq-mean-token-sum",
        policy_loss=PolicyLossConfig(loss_mode="gpg"),
    )
    common = {"use_remove_padding": False, "micro_batch_size_per_gpu": OUTPUTS}

    def train(engine):
        told = {"differs": True, "group_norm2": [1e9] * PROMPTS, "mean_length": tokens}
        extra = {"global_batch_size": len(rows), "oblrpo_batch": json.dumps(told)}
        with engine.train_mode():
            engine.train_batch(as_data(rows, **common, **extra), partial(ppo_loss, config=actor))

    def infer(engine, **wanted):
        with engine.eval_mode():
            engine.infer_batch(as_data(rows, calculate_entropy=True, **common, **wanted))

    # `old` is each setting's pass for log-probabilities in most steps, `due` that in a step with exact norms of a
    # quarter of the prompts; the update is verl's own plus, with auto, the measurement.
    exact = Settings(score_norms="exact")
    settings = {
        "norms alone": replace(exact, schedule="off"),
        "debiased": replace(exact, schedule="debiased"),
        "debiased, sketched": replace(exact, schedule="debiased", inner_products="sketched"),
        "auto": exact,
        "auto, calibrated": Settings(),
    }
    settings = {name: settings[name] for name in names or settings}
    uids = [row["uid"] for row in rows]
    for checkpointing in (False, True):
        print(f"{tokens} tokens{', checkpointing' if checkpointing else ''}", flush=True)
        runs = {}
        for name, setting in settings.items():
            engine = make_engine(str(folder / "model"), setting, checkpointing=checkpointing)
            for group in engine.optimizer.param_groups:
                group["lr"] = group["initial_lr"] = 1e-9  # the model stays what it is
            if not runs:
                known = engine_logps(engine, rows, common)
                for row, logp in zip(rows, known, strict=True):
                    row["old_log_probs"] = logp
                runs["verl: log-probabilities"] = partial(infer, engine)
                plain = make_engine(str(folder / "model"), Settings(schedule="off"), checkpointing=checkpointing)
                runs["verl: update"] = partial(train, plain)
            for step in (1, 2):
                wanted = BatchScores(setting, step, OUTPUTS, uids).requests()
                runs[f"{name}: pass of step {step}"] = partial(infer, engine, **wanted)
            runs[f"{name}: update"] = partial(train, engine)
        found = measured(runs)
        own = found["verl: log-probabilities"][0] + found["verl: update"][0]
        for name, (seconds, size) in found.items():
            print(f"    {name}: {seconds:.2f} s, {size:.0f} MB", flush=True)
        for name, setting in settings.items():
            first, other = (found[f"{name}: pass of step {step}"][0] for step in (1, 2))
            due = 1 / setting.calibration_steps if setting.calibrated else 1
            seconds = due * first + (1 - due) * other + found[f"{name}: update"][0]
            print(f"    {name}: {seconds / own:.2f} times verl's two passes", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 128, sys.argv[3:])
