"""What a step at the paper's setting takes on 1, 8 and 64 H100s, by arithmetic: `python -m lab.benchmarks.scale`.

Nothing here is measured but the constants that say so; docs/lab_book/scale.md has the formulas and what they leave out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The sizes of a Qwen3."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    tied: bool
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936

    @property
    def head(self) -> int:
        """Weights of the head, and of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Weights of a layer, without its norms (10,000 numbers)."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def multiplied(self) -> int:
        """Weights that every token is multiplied with."""
        return self.layers * self.layer + self.head

    @property
    def parameters(self) -> int:
        return self.multiplied + (0 if self.tied else self.head)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a token in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def forward(self, tokens: int) -> float:
        """Operations of one token in a causal forward over so many tokens: 2 a weight, 4 a pair of attention."""
        return 2 * self.multiplied + 4 * self.layers * self.heads * self.head_dim * tokens / 2


MODELS = {
    "0.6b": Model(1024, 3072, 28, 16, True),
    "1.7b": Model(2048, 6144, 28, 16, True),
    "4b": Model(2560, 9728, 36, 32, True),
    "8b": Model(4096, 12288, 36, 32, False),
}
RATE = 300e12  # operations a second in training, of an H100's 989 trillion; assumed
BANDWIDTH = 2.4e12  # bytes a second while decoding, of 3.35 trillion; assumed
NETWORK = 300e9  # bytes a second of a gather, over NVLink and eight 400 Gb/s links a node; assumed
MEMORY, RESERVED, ENGINE = 80e9, 4e9, 0.5  # a GPU; CUDA and libraries; verl's share for vLLM
MICRO_BATCH = 5120  # tokens, as in examples/verl_qwen3.sh
LOOK = 1 + 3 * 1.04  # forwards: one recomputed, and norms over a plain forward and backward (docs/lab_book/h100.md)
GAUGE = 2 * 0.25  # forwards: every fourth completion, twice in bfloat16, measures the update
CALIBRATION = 0.25 / 10  # looks a step: a quarter of the prompts in one step of ten


@dataclass(frozen=True)
class Step:
    """A step's seconds and a GPU's bytes."""

    model: Model
    gpus: int
    sequences: int
    prompt: int
    completion: int

    @property
    def adapters(self) -> bool:
        """Whether adapters alone are trained: all parameters do not fit on one GPU."""
        return self.gpus == 1

    @property
    def forward(self) -> float:
        """Seconds of one forward of all rows."""
        tokens = self.prompt + self.completion
        return self.sequences * tokens * self.model.forward(tokens) / RATE / self.gpus

    @property
    def at_once(self) -> int:
        """Completions of full length whose keys and values fit on a GPU."""
        held = 2 * self.model.multiplied
        room = MEMORY - RESERVED - 2 * held - 8e9 if self.adapters else ENGINE * MEMORY - held
        most = int(room / self.model.kv_bytes / (self.prompt + self.completion))
        return min(self.sequences // self.gpus, most)

    @property
    def decoding(self) -> tuple[float, float, float]:
        """Seconds that decoding reads weights, multiplies beyond that, and reads keys and values."""
        own, most = self.sequences / self.gpus, self.at_once
        steps = own / most * self.completion
        weights = steps * 2 * self.model.multiplied / BANDWIDTH
        multiplied = steps * 2 * self.model.multiplied * most / RATE
        cached = own * self.completion * (self.prompt + self.completion / 2) * self.model.kv_bytes / BANDWIDTH
        return weights, max(0.0, multiplied - weights), cached

    @property
    def sampling(self) -> float:
        return sum(self.decoding)

    @property
    def update(self) -> float:
        """Forward, recomputation and backward; under adapters no gradient of a frozen weight."""
        return (3 if self.adapters else 4) * self.forward

    @property
    def look(self) -> float:
        """Norms of all completions."""
        return (3 if self.adapters else LOOK) * self.forward

    def passes(self, norms: str) -> float:
        """Seconds of a step beside sampling: verl's two passes, or ours with calibrated or exact norms."""
        if norms == "none":
            return self.forward + self.update
        if norms == "exact":
            return self.look + self.update + GAUGE * self.forward
        return (1 + GAUGE) * self.forward + CALIBRATION * self.look + self.update

    @property
    def gathered(self) -> float:
        """Seconds of FSDP's transfers, which overlap: each micro-batch gathers weights twice and spreads a gradient."""
        if self.gpus == 1:
            return 0.0
        micro_batches = self.sequences * (self.prompt + self.completion) / self.gpus / MICRO_BATCH
        return micro_batches * (2 * 2 + 4) * self.model.parameters / NETWORK

    def memory(self, optimizer_bytes: int) -> dict[str, float]:
        """GB of a GPU during an update, while vLLM sleeps."""
        m, n = self.model, self.gpus
        if self.adapters:
            state = {"weights": 2 * m.parameters, "gradient": 0.0, "optimizer": 0.0, "copies": 0.0, "gathered": 0.0}
        else:
            state = {
                "weights": 4 * m.parameters / n, "gradient": 4 * m.parameters / n,
                "optimizer": optimizer_bytes * m.parameters / n, "copies": (4 + 4 + 2) * m.parameters / n,
                "gathered": 2 * (2 * m.layer + 2 * m.head),
            }  # fmt: skip
        kept = 2 * MICRO_BATCH * m.hidden * m.layers
        inside = 2 * MICRO_BATCH * (4 * m.intermediate + 10 * m.hidden)
        logits = MICRO_BATCH * m.vocabulary * (2 + 4 + 4)
        return {key: value / 1e9 for key, value in (state | {"activations": kept + inside, "logits": logits}).items()}


def table(rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    head, *body = [[str(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def report(model: Model, gpus: Sequence[int], sequences: int, prompt: int, completion: int) -> str:
    """Both tables."""
    steps = [Step(model, n, sequences, prompt, completion) for n in gpus]
    times: list[list[object]] = [["seconds", *(f"{n} H100{'s' * (n > 1)}" for n in gpus)]]
    times.append(["trained", *("adapters" if step.adapters else "all parameters" for step in steps)])
    times.append(["completions at once on a GPU", *(step.at_once for step in steps)])
    times.append(["sampling", *(f"{step.sampling:.0f}" for step in steps)])
    for place, what in enumerate(("weights", "products beyond that", "keys and values")):
        times.append([f"of which {what}", *(f"{step.decoding[place]:.0f}" for step in steps)])
    times.append(["log-probabilities", *(f"{step.forward:.0f}" for step in steps)])
    times.append(["update", *(f"{step.update:.0f}" for step in steps)])
    times.append(["FSDP's transfers (hidden)", *(f"{step.gathered:.0f}" for step in steps)])
    for norms, name in (("none", "verl's step"), ("calibrated", "calibrated norms"), ("exact", "exact norms")):
        totals = [(step.sampling + step.passes(norms), step.passes(norms) / step.passes("none")) for step in steps]
        times.append(
            [name, *(f"{total:.0f}" + (f" ({ratio:.2f})" if norms != "none" else "") for total, ratio in totals)]
        )
    bytes_of = [step.memory(8) for step in steps]
    memory: list[list[object]] = [["GB a GPU", *times[0][1:]]]
    memory += [[key, *(f"{parts[key]:.1f}" for parts in bytes_of)] for key in bytes_of[0]]
    memory.append(["all", *(f"{sum(parts.values()):.0f}" for parts in bytes_of)])
    return f"{table(times)}\n\n{table(memory)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.scale", description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--sequences", type=int, default=1024, help="completions of a step")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=3072, help="tokens of every completion")
    said = parser.parse_args()
    print(report(MODELS[said.model], said.gpus, said.sequences, said.prompt, said.completion))


if __name__ == "__main__":
    main()
