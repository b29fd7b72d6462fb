"""What the score tape costs: (forward + record + norm2 + accumulate) over a plain forward + backward.

    python benchmarks/tape_overhead.py [--repeats 15] [--threads 1]

Both sides compute the same weighted gradient of the same Qwen3-style model; the plain one is given its coefficients.
The two are timed in turn, so that a drift of the machine's speed hits both; the ratio is that of the medians, the
interval the 10th to 90th percentile of the pairwise ratios. The parts are timed inside the same runs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oblrpo.scores import ScoreTape

# name: S, T, group size, hidden, layers, vocabulary
SHAPES = {
    "S=256 T=24": (256, 24, 8, 64, 4, 258),
    "S=16 T=128": (16, 128, 8, 384, 8, 4096),
    "S=4 T=512": (4, 512, 4, 384, 8, 8192),
}


def model_of(hidden: int, layers: int, vocabulary: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def timed(part: Callable[[], object], into: list[float]) -> object:
    start = time.perf_counter()
    result = part()
    into.append(time.perf_counter() - start)
    return result


def measure(shape: str, repeats: int) -> None:
    S, T, G, hidden, layers, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    model = model_of(hidden, layers, vocabulary)
    ids_ST = torch.randint(vocabulary, (S, T))
    coef_S = torch.randn(S)
    parts: dict[str, list[float]] = {key: [] for key in ("plain", "forward", "record", "norm2", "accumulate")}

    def forward() -> torch.Tensor:
        logits = model(input_ids=ids_ST, use_cache=False).logits[:, :-1]
        return (logits.gather(2, ids_ST[:, 1:, None])[..., 0] - logits.logsumexp(-1)).sum(1)

    def plain() -> None:
        (forward() * coef_S).sum().backward()

    for _ in range(repeats + 2):
        model.zero_grad()
        timed(plain, parts["plain"])
        model.zero_grad()
        with ScoreTape(model) as tape:
            logps_S = timed(forward, parts["forward"])
            timed(functools.partial(tape.record, logps_S), parts["record"])
        timed(tape.norm2, parts["norm2"])
        timed(functools.partial(tape.accumulate, coef_S, G), parts["accumulate"])

    parts = {key: seconds[2:] for key, seconds in parts.items()}
    ours = [sum(row) for row in zip(*(parts[key] for key in list(parts)[1:]), strict=True)]
    pairs = sorted(a / b for a, b in zip(ours, parts["plain"], strict=True))
    low, high = pairs[len(pairs) // 10], pairs[-1 - len(pairs) // 10]
    median = {key: statistics.median(seconds) for key, seconds in parts.items()}
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    shares = " ".join(f"{key} {median[key] / median['plain']:.2f}" for key in list(parts)[1:])
    print(
        f"{shape:12s} {millions:5.1f} M  plain {median['plain'] * 1e3:7.1f} ms  "
        f"ratio {statistics.median(ours) / median['plain']:.3f} [{low:.3f}, {high:.3f}]  ({shares})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in SHAPES:
        measure(name, arguments.repeats)
