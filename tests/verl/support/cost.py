"""What taking scores costs beside verl's own passes: `python -m tests.verl.support.cost FOLDER [TOKENS]` (one rank).

CPU seconds of one thread, the least of three, and peak memory beyond what is there before, on random completions.
"""

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

from oblrpo.adapters.verl.batch_scores import BatchScores
from oblrpo.adapters.verl.settings import Settings
from oblrpo.config import PolicyConfig
from oblrpo.memory import peak_bytes
from oblrpo.policy import make_policy
from tests.verl.support.batches import as_data
from tests.verl.support.engine_scenarios import make_engine
from tests.verl.support.task import qwen_like

PROMPTS, OUTPUTS = 2, 8


def rows_of(tokens):
    rows = []
    for prompt in range(PROMPTS):
        question = torch.randint(2, 258, (8,))
        for _ in range(OUTPUTS):
            ids = torch.randint(2, 258, (tokens,))
            rows.append({"uid": f"{prompt}", "prompts": question, "responses": ids})
            rows[-1] |= {"response_mask": torch.ones_like(ids), "advantage": torch.randn(())}
    return rows


def measured(run):
    times = []
    for _ in range(3):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times), peak_bytes(run, "cpu") / 1e6


def main(folder, tokens):
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    dist.init_process_group(backend="gloo")
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    policy = make_policy(PolicyConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, device="cpu"))
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
        extra = {"global_batch_size": len(rows), "oblrpo_group_norm2": (1e9,) * PROMPTS}
        with engine.train_mode():
            engine.train_batch(as_data(rows, **common, **extra), partial(ppo_loss, config=actor))

    def infer(engine, **wanted):
        with engine.eval_mode():
            engine.infer_batch(as_data(rows, calculate_entropy=True, **common, **wanted))

    settings = {
        "norms (schedule=off)": replace(Settings(), schedule="off"),
        "norms and inner products, exact": Settings(),
        "norms and inner products, sketched": replace(Settings(), inner_products="sketched"),
    }
    for checkpointing in (False, True):
        print(f"{tokens} tokens{', checkpointing' if checkpointing else ''}", flush=True)
        for name, setting in settings.items():
            engine = make_engine(str(folder / "model"), setting, checkpointing=checkpointing)
            if name.endswith("off)"):
                old, update = measured(partial(infer, engine)), measured(partial(train, engine))
                show("old log-probabilities by verl", old, "")
                show("update by verl", update, "")
            scores = measured(partial(infer, engine, **BatchScores(setting, 3, OUTPUTS).wanted()))
            show(name, scores, f", with the update {(scores[0] + update[0]) / (old[0] + update[0]):.2f}x")


def show(name, cost, rest):
    print(f"    {name}: {cost[0]:.2f} s, {cost[1]:.0f} MB{rest}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 128)
