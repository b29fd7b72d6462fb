"""The peak of sampling and of training in a process of its own, beside what `oblrpo train --dry-run` foretells.

    python -m lab.benchmarks.memory --model models/smollm2-135m-instruct [--tokens 512 768 1024 0] [--lora-r 0 8]

Prompts are random tokens, and no completion ends before it is as long as it may be. The peak is that of the second
step, which has a look, and in which the optimizer has its averages; the phase is the one in which it is foretold. The
heap keeps what it had in one phase for the next. A budget of 0 takes the whole batch at once.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import torch

from oblrpo.memory import keep_freed, resident_bytes
from oblrpo.policy import Policy, make_policy
from oblrpo.settings import PolicyConfig, RolloutConfig, ScoresConfig, TrainConfig
from oblrpo.step import Samples
from oblrpo.trainer.peak_memory import GB, peak_memory
from oblrpo.trainer.setup import make_learner


def peak_of(function) -> tuple[object, float]:
    """The result of a function, and the most memory that the process had while it ran, in GB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    result = function()
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    return result, peak / GB


def measure(arguments: argparse.Namespace) -> None:
    """Foretell one case in this process, take two steps, and print the figures as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = resident_bytes()
    rollout = RolloutConfig(
        prompts_per_step=arguments.prompts, num_generations=arguments.generations,
        max_completion_length=arguments.completion, tokens_per_micro_batch=arguments.tokens[0],
        max_num_seqs=arguments.max_num_seqs[0],
    )  # fmt: skip
    lora = {"r": arguments.lora_r[0]} if arguments.lora_r[0] else {}
    policy = PolicyConfig(model=arguments.model, lora=lora, bf16=arguments.bf16, dtype=arguments.dtype,
                          gradient_checkpointing=arguments.gradient_checkpointing)  # fmt: skip
    config = TrainConfig(policy=policy, rollout=rollout, scores=ScoresConfig(ledger_steps=0))
    learner = make_learner(make_policy(config.policy), None, config)
    keep_freed()
    foretold = peak_memory(learner.policy, config, arguments.prompt, before)
    rows_PQ = torch.randint(learner.policy.vocabulary, (arguments.prompts, arguments.prompt)).tolist()
    peaks = {}
    with patch.object(Policy, "encode", lambda *_, **__: rows_PQ[: len(_[1])]), patch.object(Policy, "end_tokens", []):
        for step in (1, 2):
            how = (arguments.generations, arguments.completion, 1.0)
            rollouts, peaks["sampling"] = peak_of(
                lambda how=how: learner.sampler.sample([""] * arguments.prompts, *how)
            )
            rewards_PG = torch.rand(arguments.prompts, arguments.generations)
            samples = Samples(rollouts, rewards_PG, torch.ones_like(rewards_PG, dtype=torch.bool))
            _, peaks["training"] = peak_of(lambda step=step, samples=samples: learner.learn(samples, step))
    print(json.dumps({"peaks": peaks, "foretold": foretold.total / GB, "words": str(foretold)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 768, 1024, 0])
    parser.add_argument("--lora-r", type=int, nargs="+", default=[0])
    parser.add_argument("--max-num-seqs", type=int, nargs="+", default=[0], help="completions sampled at once; 0: all")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=30, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=33, help="tokens of a completion")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        measure(arguments)
        return
    print("| adapters | tokens a micro-batch | sampled at once | peak, GB | foretold, GB | foretold / peak | in |")
    print("|---|---|---|---|---|---|---|")
    for rank in arguments.lora_r:
        for tokens in arguments.tokens:
            for rows in arguments.max_num_seqs:
                words = ["--tokens", tokens, "--lora-r", rank, "--max-num-seqs", rows, "--here"]
                command = [sys.executable, "-m", "lab.benchmarks.memory", *sys.argv[1:], *map(str, words)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                print(found["peaks"], found["words"], file=sys.stderr)
                name, bound, many = f"rank {rank}" if rank else "none", tokens or "no bound", rows or "all"
                peak, phase = max(found["peaks"].values()), found["words"].split(", in ")[1].split(" (")[0]
                figures = f"{peak:.2f} | {found['foretold']:.2f} | {found['foretold'] / peak:.2f} | {phase}"
                print(f"| {name} | {bound} | {many} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
