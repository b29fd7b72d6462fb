"""The peak of a training step in a process of its own, beside what `oblrpo train --dry-run` foretells.

    python -m lab.benchmarks.memory --model models/smollm2-135m-instruct [--tokens 512 768 1024 0] [--lora-r 0 8]

Prompts and completions are random tokens, all of one length. The peak is that of the second step, which has a
look, and in which the optimizer has its averages. A budget of 0 takes the whole batch at once.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from oblrpo.memory import keep_freed, resident_bytes
from oblrpo.policy import Sequences, make_policy
from oblrpo.rollout import Rollouts
from oblrpo.scores import Features
from oblrpo.settings import PolicyConfig, RolloutConfig, ScoresConfig, TrainConfig
from oblrpo.step import Samples
from oblrpo.trainer.peak_memory import GB, peak_memory
from oblrpo.trainer.setup import make_learner


def measure(arguments: argparse.Namespace) -> None:
    """Foretell one case in this process, take two steps, and print both figures as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = resident_bytes()
    rollout = RolloutConfig(
        prompts_per_step=arguments.prompts, num_generations=arguments.generations,
        max_completion_length=arguments.completion, tokens_per_micro_batch=arguments.tokens[0],
    )  # fmt: skip
    policy = PolicyConfig(model=arguments.model, lora={"r": arguments.lora_r[0]} if arguments.lora_r[0] else {})
    config = TrainConfig(policy=policy, rollout=rollout, scores=ScoresConfig(ledger_steps=0))
    learner = make_learner(make_policy(config.policy), None, config)
    keep_freed()
    foretold = peak_memory(learner, config, arguments.prompt, before)
    rows, width = arguments.prompts * arguments.generations, arguments.prompt + arguments.completion
    ids_ST = torch.randint(learner.policy.vocabulary, (rows, width))
    own_ST = torch.ones_like(ids_ST)
    own_ST[:, : arguments.prompt] = 0
    sequences = Sequences(ids_ST, torch.ones_like(ids_ST), own_ST, arguments.prompt)
    features = Features(sequences.lengths_S.float(), *torch.rand(3, rows))  # no forward, whose room would be kept
    rollouts = Rollouts(sequences, [""] * rows, torch.zeros(rows, dtype=torch.bool), features=features)
    for step in (1, 2):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        rewards_PG = torch.rand(arguments.prompts, arguments.generations)
        learner.learn(Samples(rollouts, rewards_PG, torch.ones_like(rewards_PG, dtype=torch.bool)), step)
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    print(json.dumps({"peak": peak / GB, "foretold": foretold.total / GB, "activations": foretold.activations / GB}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 768, 1024, 0])
    parser.add_argument("--lora-r", type=int, nargs="+", default=[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=30, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=33, help="tokens of a completion")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        measure(arguments)
        return
    print("| adapters | tokens a micro-batch | peak, GB | foretold, GB | foretold / peak |")
    print("|---|---|---|---|---|")
    for rank in arguments.lora_r:
        for tokens in arguments.tokens:
            words = ["--tokens", tokens, "--lora-r", rank, "--here"]
            command = [sys.executable, "-m", "lab.benchmarks.memory", *sys.argv[1:], *map(str, words)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            name, bound = f"rank {rank}" if rank else "none", tokens or "no bound"
            ratio = found["foretold"] / found["peak"]
            print(f"| {name} | {bound} | {found['peak']:.2f} | {found['foretold']:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
