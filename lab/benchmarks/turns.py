"""Episodes of several turns, with what was read kept from turn to turn, and with all of it read again at every turn.

    python -m lab.benchmarks.turns [--rows 64] [--turns 2 4 8] [--own 16] [--results 32] [--prompt 128] [--repeat 3]

A policy with random weights (hidden size 256, 4 layers) draws turns that end by chance, after --own tokens on average
and 8 times as many at most; then --results tokens follow, which nobody has to wait for. It prints the CPU seconds of
sampling, the median of repeats in which both ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oblrpo.policy import Policy
from oblrpo.policy.load import byte_tokenizer
from oblrpo.rollout.decode import Draw
from oblrpo.rollout.transformers import KeptTurns

VOCABULARY = 258


def policy_of(own: int) -> Policy:
    """A policy with random weights that ends its turns by one token of `own`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = list(range(max(1, VOCABULARY // own)))
    return Policy(model, byte_tokenizer())


def seconds(policy: Policy, arguments: argparse.Namespace, turns: int, kept: bool) -> float:
    """CPU seconds of so many turns of all rows."""
    torch.manual_seed(1)
    draws, begun = KeptTurns(policy, Draw(1.0, features=True)), time.process_time()
    contexts = torch.randint(VOCABULARY, (arguments.rows, arguments.prompt)).tolist()
    for _ in range(turns):
        if not kept:
            draws._kept.clear()
        rows = list(range(len(contexts)))
        rooms = [8 * arguments.own] * len(rows)
        for context, turn in zip(contexts, draws.draw(rows, contexts, rooms), strict=True):
            context += turn.ids + [policy.end_tokens[0]] * arguments.results
        if len(draws._kept) < len(rows):  # of those that got as long as they may be nothing is kept
            contexts = [contexts[row] for row in sorted(draws._kept)]
            draws._kept = dict(enumerate(draws._kept[row] for row in sorted(draws._kept)))
    return time.process_time() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rows": 64, "own": 16, "results": 32, "prompt": 128, "repeat": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = policy_of(arguments.own)
    print("| turns | kept | read again | ratio |\n|---|---|---|---|")
    for turns in arguments.turns:
        taken = [[seconds(policy, arguments, turns, kept) for kept in (True, False)] for _ in range(arguments.repeat)]
        kept, again = (statistics.median(each) for each in zip(*taken, strict=True))
        print(f"| {turns} | {kept:.2f} s | {again:.2f} s | {again / kept:.2f} |", flush=True)


if __name__ == "__main__":
    main()
