"""What forward and backward of an update cost by each tape over plain autograd: ratios of CPU seconds.

    python -m benchmarks.passes [--rounds 9] [--shapes tokens words answers] [--model models/smollm2-135m-instruct]

The shapes are those of `benchmarks.trl_steps`, with prompts of 33 tokens; one pass is one micro-batch. All contenders
take the same log-probabilities (`Policy.logps`, with what proxies need) of the same rows, and the same coefficients:

- autograd: the backward of sum a log pi, and nothing more;
- gradient: `GroupTape` with the whole batch for a group, which gives no signal and noise;
- groups: `GroupTape`, which gives every group's squared norm beside the gradient (calibrated steps);
- scores: `ScoreTape`, asked for no norms (what calibrated steps took before there was a `GroupTape`);
- norms: `ScoreTape` with every output's squared norm (exact steps).

They take turns in one process and one thread, in float32. A ratio's interval is Student's t over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.runs import mean_interval
from benchmarks.trl_shapes import REAL, SHAPES, G, Shape
from oblrpo.config import PolicyConfig
from oblrpo.policy import Policy, Sequences, make_policy
from oblrpo.scores import GroupTape, ScoreTape

PROMPT = 33


def passes_of(policy: Policy, sequences: Sequences, coef_S: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What every contender runs, by name."""
    groups, scores, norms = GroupTape(policy.model), ScoreTape(policy.model), ScoreTape(policy.model)

    def logps() -> torch.Tensor:
        return policy.logps(sequences, features=True).logps_S

    def by_autograd() -> None:
        (logps() * coef_S).sum().backward()

    def by_groups(group_size: int) -> None:
        with groups:
            groups.accumulate(logps(), coef_S, group_size)

    def by_scores(tape: ScoreTape, asked: bool) -> None:
        with tape:
            tape.record(logps())
        if asked:
            tape.norm2()
        tape.accumulate(coef_S, G)
        tape.forget()

    return {
        "autograd": by_autograd,
        "gradient": lambda: by_groups(len(coef_S)),
        "groups": lambda: by_groups(G),
        "scores": lambda: by_scores(scores, False),
        "norms": lambda: by_scores(norms, True),
    }


def measure(shape: Shape, model: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """CPU seconds of a pass, round by round."""
    torch.manual_seed(0)
    built = PolicyConfig(hidden_size=shape.hidden_size, num_hidden_layers=shape.layers, num_attention_heads=4)
    policy = make_policy(PolicyConfig(model=model, device="cpu") if model else built)
    rows, width = shape.rows // shape.parts, PROMPT + shape.tokens
    ids_ST = torch.randint(min(200, policy.vocabulary), (rows, width))
    own_ST = torch.zeros_like(ids_ST)
    own_ST[:, PROMPT:] = 1
    passes = passes_of(policy, Sequences(ids_ST, torch.ones_like(ids_ST), own_ST, PROMPT), torch.randn(rows))
    found: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(-1, rounds):  # the first is not counted: tapes check rows, and memory is found
        names = list(passes)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begun = time.process_time()
            for _ in range(repeats):
                passes[name]()
                policy.model.zero_grad()
            found[name].append((time.process_time() - begun) / repeats)
    return {name: seconds[1:] for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=3, help="passes of a round, of each contender")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--model", default="", help="folder of a model for the shape `real`")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes = {name: (SHAPES[name], "") for name in arguments.shapes}
    shapes |= {"real": (REAL, arguments.model)} if arguments.model else {}
    titles = ["a pass of", "autograd, CPU s", "gradient", "groups", "scores", "norms"]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for name, (shape, model) in shapes.items():
        found = measure(shape, model, arguments.rounds, arguments.repeats)
        cells = [f"{name}: {shape.rows // shape.parts} x {shape.tokens} tokens"]
        cells += [f"{statistics.median(found['autograd']):.3f}"]
        for contender in titles[2:]:
            cells += [mean_interval([a / b for a, b in zip(found[contender], found["autograd"], strict=True)])]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
