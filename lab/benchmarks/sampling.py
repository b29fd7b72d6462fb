"""Tokens a second of sampling: our loop, `generate` with prompts read once, as TRL calls it, a static cache, vLLM.

    python -m lab.benchmarks.sampling --model models/smollm2-135m-instruct [--rounds 3] [--max-completion-length 128]
    python -m lab.benchmarks.sampling --model models/smollm2-135m-instruct --contenders oblrpo trl vllm vllm-bfloat16
    python -m lab.benchmarks.sampling --family qwen3_next --lengths even --subject 400

16 chat prompts x 4 completions at temperature 1, on one thread. A third of the prompts ask for one word, a third for
one sentence, a third for five bullets: uneven lengths. For even lengths the end token is one that is never drawn. TRL's
GRPOTrainer without vLLM hands every prompt to `generate` as often as it has completions and runs until the longest of
the batch has ended. The contenders take turns in every round, which has a seed of its own; their draws differ, so
tokens are those up to the end of each completion, and seconds are the process's own CPU time. Memory is the highest
resident size during a call over that before it, of all rounds (Linux; elsewhere it is left out). With even lengths the
limit is printed, too: a token of every row takes a product with every weight matrix, and nothing that takes these from
torch is faster; vLLM has products of its own.

vllm computes in the policy's type (--dtype), vllm-bfloat16 in bfloat16 whatever that is. Their cache of prompts is
emptied after every call, as it is at every step of a run. What opening an engine and a sync take is printed first. An
engine that the other one has closed is opened again before the clock runs.

--family takes random weights of one of `lab.benchmarks.hybrids`' sizes in the place of a model, and --subject repeats
what a prompt is about, to make prompts long.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor
from transformers import GenerationConfig

from lab.benchmarks import hybrids, tiny
from oblrpo.policy import Policy, adopt_policy, byte_tokenizer, load_policy
from oblrpo.rollout import VLLMSampler, sample
from oblrpo.rollout.transformers import _by_generate
from oblrpo.settings import VLLM, PolicyConfig, TrainConfig, load_recipe
from oblrpo.trainer.task import task_of

SUBJECTS = ("the sea", "a bicycle", "rain", "bread", "the moon", "a lighthouse", "winter", "chess", "a violin", "tea",
            "the desert", "an owl", "glass", "a market", "trains", "honey")  # fmt: skip
WISHES = (
    "Answer with one word: which colour goes with {}?",
    "Write one short sentence about {}.",
    "List five facts about {} as bullets, each of one short line.",
)
LABELS = {
    "oblrpo": "oblrpo", "generate": "`generate`, prompts read once", "trl": "`generate` as TRL calls it",
    "static": "the same with a static cache", "vllm": "vLLM", "vllm-bfloat16": "vLLM in bfloat16",
}  # fmt: skip
Contender = Callable[[list, int, int], Tensor]


def contenders(policy: Policy, names: list[str]) -> dict[str, Contender]:
    """Name -> what draws G completions of every prompt and returns how long each is."""

    def ours(prompts: list, copies: int, longest: int) -> Tensor:
        return sample(policy, prompts, copies, longest, 1.0).sequences.lengths_S

    def read_once(prompts: list, copies: int, longest: int) -> Tensor:
        prompt_PQ, mask_PQ = policy.pad_prompts(policy.encode(prompts, longest))
        return _lengths(policy, _by_generate(policy, prompt_PQ, mask_PQ, copies, longest, 1.0, 1.0, False)[0])

    def repeated(prompts: list, copies: int, longest: int, **further: str) -> Tensor:
        prompt_PQ, mask_PQ = policy.pad_prompts(policy.encode(prompts, longest))
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, eos_token_id=policy.end_tokens,
            pad_token_id=policy.pad_token, **further,
        )  # fmt: skip
        prompt_SQ, mask_SQ = (each.repeat_interleave(copies, 0) for each in (prompt_PQ, mask_PQ))
        ids_ST = policy.model.generate(input_ids=prompt_SQ, attention_mask=mask_SQ, generation_config=settings)
        return _lengths(policy, ids_ST[:, prompt_SQ.shape[1] :])

    def static(prompts: list, copies: int, longest: int) -> Tensor:
        return repeated(prompts, copies, longest, cache_implementation="static")

    own = {"oblrpo": ours, "generate": read_once, "trl": repeated, "static": static}
    return {name: own[name] if name in own else engine(policy, name) for name in names}


def engine(policy: Policy, name: str) -> Contender:
    """Return what draws by a vLLM engine, which is opened here."""
    memory, begun = _resident(), time.process_time()
    sampler = VLLMSampler(policy, VLLM(dtype=name.partition("-")[2] or "auto"))
    opened = time.process_time()
    sampler.sync(policy)
    synced = time.process_time()
    print(
        f"{LABELS[name]} ({sampler.dtype}): opened in {opened - begun:.1f} CPU s, synced in {synced - opened:.2f}, "
        f"{(_resident() - memory) / 1e6:.0f} MB",
        flush=True,
    )

    def draw(prompts: list, copies: int, longest: int) -> Tensor:
        lengths_S = sampler.sample(prompts, copies, longest, 1.0).sequences.lengths_S
        sampler.engine.reset_prefix_cache()
        return lengths_S

    return draw


def _lengths(policy: Policy, completion_SC: Tensor) -> Tensor:
    ended_SC = torch.isin(completion_SC, torch.tensor(policy.end_tokens))
    return (ended_SC.cumsum(1) - ended_SC.long() == 0).sum(1)


def measured(draw: Callable[[], Tensor]) -> tuple[Tensor, float, float]:
    """Lengths, CPU seconds, and MB over what was resident before."""
    gc.collect()
    before = _resident()
    begun = time.process_time()
    lengths_S = draw()
    return lengths_S, time.process_time() - begun, (_resident("VmHWM") - before) / 1e6


def _resident(which: str = "VmRSS") -> float:
    """Bytes that are resident, or the most (VmHWM) since the last question for those; 0 where there is no /proc."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0.0
    if which == "VmRSS":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    return next(float(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(which))


def limit(policy: Policy, rows: int) -> float:
    """Tokens a CPU second of the products with all weight matrices alone, for so many rows."""
    head, embedding = policy.model.get_output_embeddings().weight, policy.model.get_input_embeddings().weight
    matrices = [
        each for each in policy.model.parameters() if each.ndim == 2 and (each is head or each is not embedding)
    ]
    inputs = {width: torch.randn(rows, width, dtype=head.dtype) for width in {matrix.shape[1] for matrix in matrices}}
    taken = []
    for _ in range(5):
        begun = time.process_time()
        for matrix in matrices:
            torch.nn.functional.linear(inputs[matrix.shape[1]], matrix)
        taken.append(time.process_time() - begun)
    return rows / median(taken)


def prompts_of(policy: Policy, arguments: argparse.Namespace) -> list:
    """The prompts; a recipe's are those of its first step, and bring its sizes."""
    if arguments.recipe:
        recipe = load_recipe(arguments.recipe, TrainConfig())
        arguments.prompts, arguments.generations = recipe.rollout.prompts_per_step, recipe.rollout.num_generations
        arguments.max_completion_length = recipe.rollout.max_completion_length
        return [problem.prompt for problem in task_of(recipe).train_batch(1, arguments.prompts)]
    wishes = [
        WISHES[index % len(WISHES)].format(" ".join([SUBJECTS[index % len(SUBJECTS)]] * arguments.subject))
        for index in range(arguments.prompts)
    ]
    chats = policy.tokenizer.chat_template is not None
    return [[{"role": "user", "content": wish}] if chats else wish for wish in wishes]


def compare(policy: Policy, draws: dict[str, Contender], arguments: argparse.Namespace) -> None:
    """Print a table of all contenders on the same prompts."""
    prompts = prompts_of(policy, arguments)
    found: dict[str, list[tuple[float, float, float]]] = {}
    spread: list[int] = []
    for number in range(arguments.rounds):
        names = [*draws][number % len(draws) :] + [*draws][: number % len(draws)]
        for name in names:
            draws[name](prompts[:2], 2, 2)  # whatever a first call sets up
            torch.manual_seed(number)
            lengths_S, seconds, memory = measured(
                lambda draw=draws[name]: draw(prompts, arguments.generations, arguments.max_completion_length)
            )
            spread += lengths_S.tolist()
            found.setdefault(name, []).append((lengths_S.sum().item() / seconds, seconds, memory))
    middle = sorted(spread)
    print(f"\nlengths {middle[0]} to {middle[-1]}, mean {mean(middle):.0f}, median {middle[len(middle) // 2]}\n")
    bases = [name for name in ("trl", "oblrpo") if name in draws]
    over = "".join(f"over {name} | ".replace("trl", "TRL's") for name in bases)
    print(f"| | tokens a CPU second | {over}CPU s | MB |\n|{'---|' * (4 + len(bases))}")
    for name in draws:
        rates, seconds, memory = zip(*found[name], strict=True)
        cells = [LABELS[name], f"{mean(rates):.0f}"]
        for base in bases:
            ratios = [rate / other[0] for rate, other in zip(rates, found[base], strict=True)]
            cells.append(f"{mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print("|", " | ".join([*cells, f"{mean(seconds):.1f}", f"{max(memory):.0f}"]), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", default="")
    which.add_argument("--family", default="")
    parser.add_argument("--recipe", default="", help="sample the prompts of a recipe's first step, as many and as long")
    parser.add_argument("--subject", type=int, default=1, help="how often a prompt says what it is about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--max-completion-length", type=int, default=128)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="type of the model's weights"
    )
    parser.add_argument("--bf16", action="store_true", help="bfloat16 arithmetic (ours and vLLM's) on float32 weights")
    parser.add_argument("--contenders", nargs="+", choices=[*LABELS], default=["oblrpo", "generate", "trl", "static"])
    parser.add_argument("--lengths", nargs="+", choices=["uneven", "even"], default=["uneven", "even"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.family:
        tiny.SIZES.update(hybrids.WIDER | {"max_position_embeddings": 4096})
        model = hybrids.build(arguments.family, 4, 8).model
        model.generation_config.use_cache = model.config.use_cache = True
        policy = adopt_policy(model, byte_tokenizer(), PolicyConfig(device="cpu"))
    else:
        config = PolicyConfig(model=arguments.model, dtype=arguments.dtype, bf16=arguments.bf16, device="cpu")
        policy = load_policy(arguments.model, config, train=False)
    draws = contenders(policy, arguments.contenders)
    with torch.no_grad():
        if "uneven" in arguments.lengths:
            compare(policy, draws, arguments)
        if "even" in arguments.lengths:
            never = policy.model.config.vocab_size - 1
            policy.model.generation_config.eos_token_id = policy.tokenizer.eos_token_id = never
            policy.__dict__["_ends_of_turn"] = []
            compare(policy, draws, arguments)
            rows = arguments.prompts * arguments.generations
            print(f"| the products with all weight matrices alone | {limit(policy, rows):.0f} | | | |", flush=True)


if __name__ == "__main__":
    main()
