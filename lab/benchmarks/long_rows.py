"""A look at long rows beside a plain step of the same rows, and the peak of both beside the number of completions.

    python -m lab.benchmarks.long_rows [--size Qwen3-0.6B] [--layers 2 4] [--rows 1x4096 4x2048]
    python -m lab.benchmarks.long_rows --completions 64 256 1024

The first prints operations and peak bytes of tensors at a published shape with random weights and so many layers,
checkpointed as in the trainer: of a plain forward and backward, and of a look at the rows as one group. No product is
computed for that; `--timed` does, and prints CPU seconds. The second
prints the peaks of a step's gradient, and of a look, of completions of one length at a fixed size of micro-batches.
"""

from __future__ import annotations

import argparse
import math
import resource
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from lab.benchmarks.gpu.sizes import COMMON, SIZES
from oblrpo.memory import WithoutProducts, keep_freed, peak_bytes
from oblrpo.policy import Policy, Sequences
from oblrpo.policy.adapters import add_adapter
from oblrpo.policy.load import byte_tokenizer
from oblrpo.policy.sequences import MicroBatches
from oblrpo.settings import PolicyConfig, RolloutConfig, TrainConfig
from oblrpo.step import Batch
from oblrpo.step.flow import ImportanceWeights
from oblrpo.step.look import look
from oblrpo.trainer.setup import make_learner

GB = 1e9
TRAINED: dict[str, tuple[torch.dtype, int]] = {
    "all, float32": (torch.float32, 0),
    "all, bfloat16": (torch.bfloat16, 0),
    "rank 32 on bfloat16": (torch.bfloat16, 32),
    "rank 32 on float32": (torch.float32, 32),
}
SMALL = {"vocab_size": 20_000, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}  # fmt: skip
PROMPT_SHARE = 8  # one token in so many is the prompt's


def in_place(total: Any, left: Any, right: Any, **_: Any) -> int:
    """The operations of `addmm_`, which torch does not count."""
    return 2 * left[0] * left[1] * right[1]


def policy_of(sizes: dict[str, Any], dtype: torch.dtype, rank: int) -> Policy:
    """A checkpointed policy of these sizes with random weights."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes))
    finally:
        torch.set_default_dtype(before)
    if rank:
        model = add_adapter(model, PolicyConfig(lora={"r": rank}))
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return Policy(model.eval(), byte_tokenizer(), checkpointing=True)


def rows_of_tokens(policy: Policy, count: int, length: int) -> Sequences:
    """So many rows of random tokens, all of one length."""
    ids_ST = torch.randint(policy.vocabulary, (count, length))
    start = max(1, length // PROMPT_SHARE)
    own_ST = torch.ones_like(ids_ST)
    own_ST[:, :start] = 0
    return Sequences(ids_ST, torch.ones_like(ids_ST), own_ST, start)


def seconds(function: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    function()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(size: str, layers: int, trained: str, count: int, length: int, timed: bool) -> str:
    """One row of the first table."""
    dtype, rank = TRAINED[trained]
    policy = policy_of(COMMON | SIZES[size] | {"num_hidden_layers": layers}, dtype, rank)
    sequences = rows_of_tokens(policy, count, length)

    def plain() -> None:
        policy.logps(sequences).logps_S.sum().backward()

    def looked() -> None:
        look(policy, sequences, count, 1.0, MicroBatches())

    look(policy, rows_of_tokens(policy, 2, 8), 2, 1.0, MicroBatches())  # rows are checked once a model
    times = [seconds(each) if timed else math.nan for each in (plain, looked)]
    policy.model.zero_grad()
    flops, gigabytes = [], []
    for each in (plain, looked):
        with WithoutProducts():
            gigabytes.append(peak_bytes(each, "cpu") / GB)
            policy.model.zero_grad()
            # Apart, for it keeps what checkpointing makes again.
            with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counted:
                each()
        flops.append(counted.get_total_flops() / 1e12)
        if each is plain:
            own = sum(p.grad.numel() * p.grad.element_size() for p in policy.parameters if p.grad is not None) / GB
            policy.model.zero_grad()
    cells = [f"{size}, {layers} layers", trained, f"{count} x {length:,}"]
    for (step, looks), digits in ((times, 1), (flops, 1), (gigabytes, 2)):
        cells += [f"{step:.{digits}f}", f"{looks:.{digits}f}", f"{looks / step:.2f}"]
    return f"| {' | '.join(cells)} | {own:.2f} |"


def growth(counts: list[int], tokens: int, length: int) -> None:
    """The second table."""
    print(f"Micro-batches of {tokens:,} tokens, rows of {length}; megabytes over weights and gradient.\n")
    print("| completions | gradient | look |\n|---|---|---|")
    policy = policy_of(SMALL, torch.float32, 0)
    for count in counts:
        gradient, looked = peaks(policy, count, tokens, length)
        print(f"| {count:,} | {gradient / 1e6:.1f} | {looked / 1e6:.1f} |", flush=True)


def peaks(policy: Policy, count: int, tokens: int, length: int, G: int = 4) -> tuple[int, int]:
    """Peak bytes of a step's gradient, less the gradient's own, and of a look at all, of so many completions."""
    P = count // G
    rollout = RolloutConfig(
        prompts_per_step=P, num_generations=G, max_completion_length=length, tokens_per_micro_batch=tokens
    )
    learner = make_learner(policy, None, TrainConfig(rollout=rollout))  # type: ignore[arg-type]
    sequences = rows_of_tokens(policy, count, length)
    rewards_PG = torch.rand(P, G, generator=torch.Generator().manual_seed(0))
    batch = Batch.of(sequences, rewards_PG, None, learner.algorithm)
    weights, below_PG = ImportanceWeights(learner.ratio), torch.full((P, G), -1.0)
    for parameter in policy.parameters:
        parameter.grad = None
    gradient = peak_bytes(lambda: learner.gradient(batch, below_PG, weights), "cpu")
    own = sum(p.numel() * p.element_size() for p in policy.parameters)
    for parameter in policy.parameters:
        parameter.grad = None
    return gradient - own, peak_bytes(lambda: look(policy, sequences, G, 1.0, MicroBatches(tokens=tokens)), "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="Qwen3-0.6B", choices=SIZES)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", nargs="+", default=["1x4096", "4x2048"], help="rows x tokens")
    parser.add_argument("--trained", nargs="+", default=["all, float32", "rank 32 on bfloat16"], choices=TRAINED)
    parser.add_argument("--timed", action="store_true", help="CPU seconds, too")
    parser.add_argument("--completions", type=int, nargs="+", default=[])
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch, with --completions")
    parser.add_argument("--length", type=int, default=32, help="tokens of a row, with --completions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.completions:
        growth(arguments.completions, arguments.tokens, arguments.length)
        return
    keep_freed()
    parts = [f"{name}, {unit}" for unit in ("CPU s", "TFLOP", "GB") for name in ("step", "look", "look / step")]
    names = ["model", "trained", "rows", *parts, "gradient, GB"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for trained in arguments.trained:
        for rows in arguments.rows:
            count, length = map(int, rows.split("x"))
            for layers in arguments.layers:
                print(compare(arguments.size, layers, trained, count, length, arguments.timed), flush=True)


if __name__ == "__main__":
    main()
