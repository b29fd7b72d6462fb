"""What a step with exact score norms costs a small hybrid over a plain one: ratios of CPU seconds.

    python -m lab.benchmarks.hybrids [FAMILY ...] [--rounds 9] [--shapes 32x24 8x128]

The families are `lab.benchmarks.tiny`'s with wider layers, 3 to 10 M parameters, in float32 and one thread, without
other libraries' kernels. A step is a forward, a backward and the gradient; ours has a new tape in each step and every
output's norm. Both take turns; the ratio is the median over rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from lab.bench.workload import Workload
from lab.benchmarks import tiny
from oblrpo.scores import ScoreTape, by_operations

FAMILIES = ("qwen3", "qwen3_next", "qwen3_5_text", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h", "olmo_hybrid")
WIDER: dict[str, Any] = {
    "vocab_size": 1024, "max_position_embeddings": 512, "sliding_window": 256, "hidden_size": 384, "head_dim": 96,
    "intermediate_size": 768, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 192,
    "shared_intermediate_size": 192, "linear_key_head_dim": 48, "linear_value_head_dim": 48, "mamba_n_heads": 6,
    "mamba_num_heads": 6, "mamba_d_head": 128, "mamba_head_dim": 128, "mamba_d_ssm": 768, "mamba_d_state": 32,
    "ssm_state_size": 32, "mamba_chunk_size": 64, "chunk_size": 64, "conv_dim": 384, "conv_dim_out": 384,
    "block_dim": 384, "block_ff_dim": 768,
}  # fmt: skip
"""Sizes in the place of those of `tiny.SIZES`."""


def plain(workload: Workload) -> None:
    """Coefficients that are known beforehand."""
    (workload.logps() * workload.coef_S).sum().backward()


def exact(workload: Workload) -> None:
    """Norms, then the gradient."""
    with ScoreTape(workload.model) as tape:
        tape.record(workload.logps())
    tape.norm2()
    tape.accumulate(workload.coef_S, workload.group_size)


def seconds(step: Callable[[Workload], None], workload: Workload) -> float:
    """CPU seconds of a step."""
    workload.model.zero_grad()
    begun = time.process_time()
    step(workload)
    return time.process_time() - begun


def build(family: str, sequences: int, tokens: int) -> Workload:
    """A batch of random tokens for a model with random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config_for(family)).eval()
    ids_ST = torch.randint(3, tiny.SIZES["vocab_size"], (sequences, tokens))
    return Workload(model, ids_ST, torch.randn(sequences), torch.zeros(sequences // 4), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", nargs="*", default=["32x24", "8x128"], help="sequences x tokens, in groups of 4")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    tiny.SIZES.update(WIDER)
    print("| family | parameters | by operations | " + " | ".join(arguments.shapes) + " |")
    print("|---" * (3 + len(arguments.shapes)) + "|")
    for family in arguments.families:
        cells = []
        for shape in arguments.shapes:
            workload = build(family, *map(int, shape.split("x")))
            exact(workload), plain(workload)  # memory is found, and rows are checked
            ratios = [seconds(exact, workload) / seconds(plain, workload) for _ in range(arguments.rounds)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        without = sorted(set(by_operations(workload.model).values()))
        size = f"{sum(p.numel() for p in workload.parameters) / 1e6:.1f} M"
        print(f"| {family} | {size} | {', '.join(without)} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
