"""The trainer at the sizes of Qwen3: whole runs on published shapes with random weights, a part at a time.

    python -m lab.benchmarks.sizes [MODEL ...] [--tokens 64 512] [--folders models/shapes] [--csv FILE] [--small]
    python -m lab.benchmarks.sizes --report

A folder in bfloat16 and shards, as a user would download it, is written for each shape, and every part is a process of
its own: `oblrpo train --dry-run`, two steps of 2 prompts x 2 completions of 64 tokens with a checkpoint, a third after
`--resume`, `oblrpo export` and `export --merge`; then, in one process, a step of 64 and one of 512 tokens with and
without a look on the same completions, and the norms of two rows against one backward each. Each part adds its line to
the CSV when it ends, and a part that has one is not taken again. Peaks are the process's own, in GB (1e9 bytes);
seconds are CPU seconds of one thread. Where the weights do not fit into the machine, the shape has fewer layers, and
its name says how many.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch

from oblrpo.memory import heap_is_kept

QWEN3 = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
MIXTURE = {
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B, 8 of 48 layers": MIXTURE | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 32,
    },
}  # fmt: skip
"""The configurations as published, beside what all share."""
SMALL = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
TRAINED: dict[str, tuple[str, ...]] = {
    "adapters": ("--lora", "{r: 32}", "--dtype", "bfloat16"),
    "all parameters": ("--dtype", "float32"),
}
ALL_FIT = {"Qwen3-0.6B"}
"""The shapes of which all parameters can be trained in 24 GB."""
PROMPT = 64
CLI = ("-c", "from oblrpo.cli import main; main()")
COLUMNS = ("model", "trained", "large tensors", "part", "seconds", "peak_gb", "foretold_gb", "note")
ALLOCATOR = "heap" if heap_is_kept() else "system"
GB = 1e9
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_folder(name: str, folder: Path, small: bool) -> None:
    """Random weights in bfloat16 by shards of at most 2 GB, with a tokenizer of as many tokens as the shape has."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    kind = "qwen3_moe" if "num_experts" in SHAPES[name] else "qwen3"
    words = QWEN3 | SHAPES[name] | (SMALL if small else {})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    filler = [f"{number}Z" for number in range(words["vocab_size"] - len(letters) - len(special))]
    known = {token: index for index, token in enumerate([*letters, *filler, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    end, _, turn = special
    ends = {"eos_token_id": known[turn], "pad_token_id": known[end]}
    config = AutoConfig.for_model(kind, **words, **ends, bos_token_id=None)
    with torch.device("meta"):
        shapes = {key: each.shape for key, each in AutoModelForCausalLM.from_config(config).state_dict().items()}
    shapes.pop("lm_head.weight" if words["tie_word_embeddings"] else "", None)
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM" if "moe" in kind else "Qwen3ForCausalLM"], "bfloat16"
    partly = folder.with_name(f".{folder.name}")
    shutil.rmtree(partly, ignore_errors=True)
    partly.mkdir(parents=True)
    torch.manual_seed(0)
    shard, places, bytes_in_all = dict[str, torch.Tensor](), dict[str, str](), 0
    for key, weight in [*_published(shapes), ("", torch.empty(0))]:
        if shard and (not key or sum(each.nbytes for each in shard.values()) + weight.nbytes > 2 * GB):
            file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
            save_file(shard, partly / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
            shard = {}
        shard[key], bytes_in_all = weight, bytes_in_all + weight.nbytes
    index = {"metadata": {"total_size": bytes_in_all}, "weight_map": places}
    (partly / "model.safetensors.index.json").write_text(json.dumps(index))
    GenerationConfig(**ends, do_sample=True, temperature=0.6, top_k=20, top_p=0.95).save_pretrained(partly)
    config.save_pretrained(partly)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=turn, pad_token=end, chat_template=TEMPLATE
    ).save_pretrained(partly)
    partly.rename(folder)


def _published(shapes: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by their published names: of experts one after the other, where transformers holds them in one."""
    for key, shape in shapes.items():
        weight = torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) > 1:
            weight.normal_(std=0.02)
        inside, _, part = key.rpartition(".experts.")
        if not inside:
            yield key, weight
            continue
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert, matrix in enumerate(weight):
            for name, half in zip(names, matrix.chunk(len(names)), strict=True):
                yield f"{inside}.experts.{expert}.{name}.weight", half.contiguous()


class Table:
    """The lines that were measured, on the disk when they are."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, list[dict[str, str]]()
        if path.is_file():
            self.lines = list(csv.DictReader(path.open()))

    def has(self, model: str, trained: str, part: str) -> bool:
        asked = (model, trained, ALLOCATOR, part)
        return any(tuple(line[name] for name in COLUMNS[:4]) == asked for line in self.lines)

    def add(self, model: str, trained: str, part: str, **values: Any) -> None:
        line = dict.fromkeys(COLUMNS, "") | dict(zip(COLUMNS, (model, trained, ALLOCATOR, part), strict=False))
        line |= {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in values.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if not self.lines:
                writer.writeheader()
            writer.writerow(line)
        self.lines.append(line)
        print(" | ".join(line.values()), flush=True)


def process(words: list[str], log: Path) -> tuple[str, float, float]:
    """What a process of this Python prints, its CPU seconds and its peak in GB."""
    with log.open("w") as output:
        one_thread = os.environ | {
            "OMP_NUM_THREADS": "1"
        }  # more of them count the seconds that they wait for each other
        begun = subprocess.Popen([sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, env=one_thread)
        _, status, used = os.wait4(begun.pid, 0)
        begun.returncode = os.waitstatus_to_exitcode(status)
    said = log.read_text()
    if begun.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {begun.returncode}: {said[-2000:]}")
    return said, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / GB


def whole_run(table: Table, name: str, trained: str, folder: Path, place: Path, short: int, long: int) -> None:
    """The run as a user starts it: foretold, trained, resumed and exported."""
    data, rewards, run = place / "rows.jsonl", place / "odd.py", place / "run"
    data.write_text("".join(json.dumps({"prompt": f"{n:0{PROMPT}d}", "answer": ""}) + "\n" for n in range(16)))
    rewards.write_text("def odd(completions, **_):\n    return [float(n % 2) for n in range(len(completions))]\n")
    given = [
        *(*CLI, "train", "--model", str(folder), "--data", str(data), "--rewards", f"{rewards}:odd"),
        *(*TRAINED[trained], "--prompts-per-step", "2", "--num-generations", "2", "--gradient-checkpointing"),
        *("--max-completion-length", str(short), "--eval-prompts", "2", "--eval-samples", "1", "--output", str(run)),
        *("--tokens-per-micro-batch", str(2 * (PROMPT + long)), "--steps", "2", "--no-chat", "--ledger-steps", "0"),
    ]
    parts: dict[str, list[str]] = {
        "dry run": [*given, "--dry-run"],
        f"two steps of {short} tokens": given,
        "resumed for a third": [*CLI, "train", "--resume", "--output", str(run), "--steps", "3"],
        "export": [*CLI, "export", str(run), "--output", str(place / "export")],
    }
    if trained == "adapters":
        parts["export --merge"] = [*parts["export"][:-1], str(place / "merged"), "--merge"]
    foretold = ""
    for part, words in parts.items():
        if table.has(name, trained, part):
            known = [line for line in table.lines if [line[key] for key in COLUMNS[:3]] == [name, trained, ALLOCATOR]]
            foretold = known[0]["foretold_gb"]
            continue
        said, seconds, peak = process(words, place / f"{part}.log")
        note = ""
        if part == "dry run":
            found = re.search(r"memory +about ([\d.]+) GB at the peak, (.*?)\n", said)
            foretold, note = (found[1], found[2]) if found else ("", "no memory foretold")
        elif (run / "metrics.jsonl").is_file() and "export" not in part:
            steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            kinds = ("sampling", "looks", "training", "evaluation", "files")
            note = ", ".join(f"{kind} {steps[-1].get(f'time/{kind}', 0):.1f}" for kind in kinds) + " s (last step)"
        table.add(name, trained, part, seconds=seconds, peak_gb=peak, foretold_gb=foretold, note=note)
    for made in ("export", "merged", "run"):
        shutil.rmtree(place / made, ignore_errors=True)


def inside(name: str, trained: str, folder: Path, csv_file: Path, short: int, long: int) -> None:
    """In a process of its own: steps with and without a look on the same completions, and norms against autograd."""
    from oblrpo.memory import give_back
    from oblrpo.objects import split_objects
    from oblrpo.scores import ScoreTape, oracle
    from oblrpo.settings import TrainConfig, with_settings
    from oblrpo.trainer.loop import Trainer

    flags = dict(zip(TRAINED[trained][::2], TRAINED[trained][1::2], strict=True))
    words: dict[str, Any] = {"dtype": flags["--dtype"]} | ({"lora": {"r": 32}} if "--lora" in flags else {})
    table, rows = Table(csv_file), [{"prompt": f"{n:0{PROMPT}d}"} for n in range(16)]
    given, objects = split_objects(str(folder), None, rows, rewards=_odd)
    fixed = {
        "prompts_per_step": 2, "num_generations": 2, "max_completion_length": long, "eval_prompts": 2,
        "gradient_checkpointing": True, "tokens_per_micro_batch": 2 * (PROMPT + long), "ledger_steps": 0, "chat": False,
    }  # fmt: skip
    trainer = Trainer(with_settings(TrainConfig(), given | fixed | words, "sizes"), objects=objects)
    learner, problems = trainer.learner, trainer.task.train_batch(1, 2)

    def part(kind: str, work: Callable[[], Any], note: str = "") -> Any:
        give_back()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        begun = process_time()
        result = work()
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        seconds, peak = process_time() - begun, int(found[1]) * 1024 / GB
        table.add(name, trained, kind, seconds=seconds, peak_gb=peak, note=note or str(result))
        return result

    for tokens in (short, long):
        if table.has(name, trained, f"{tokens} tokens, a step without a look"):
            continue
        learner.rollout = replace(learner.rollout, max_completion_length=tokens)
        samples = part(f"{tokens} tokens, sampling", lambda: learner.sample(problems), " ")
        for kind, every in (("with", 1), ("without", 0)):
            learner.looks.every = every
            learn = partial(learner.learn_from, samples, 1)
            part(f"{tokens} tokens, a step {kind} a look", learn, " ")
    if not table.has(name, trained, "norms of two rows"):
        from oblrpo.policy import Sequences

        policy, ids_ST = trainer.policy, torch.randint(300, (2, 48))
        own_ST = torch.ones_like(ids_ST)
        own_ST[:, :16] = 0
        rows_ST = Sequences(ids_ST, torch.ones_like(ids_ST), own_ST, 16)
        with torch.no_grad():  # new adapters are zeros on one side, where half of a gradient is
            for key, parameter in policy.model.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(std=0.02)

        def norms() -> str:
            with ScoreTape(policy.model, "streamed") as tape:
                tape.record(policy.logps(rows_ST).logps_S)
            ours_S = tape.norm2().double()
            one = [oracle.norm2(policy.model, policy.logps(rows_ST.at(torch.tensor([s]))).logps_S) for s in range(2)]
            off = (ours_S / torch.cat(one).double() - 1).abs().max()
            return f"off by {float(off):.1e}, norms {ours_S.sqrt().mean():.3g}"

        part("norms of two rows", norms)


def _odd(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ in every group, so that every step has an update."""
    return [float(n % 2) for n in range(len(completions))]


def report(table: Table) -> None:
    """The lines as a table in Markdown."""
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for line in table.lines:
        print("| " + " | ".join(line.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=list(SHAPES), help="shapes, in their order")
    parser.add_argument("--tokens", type=int, nargs=2, default=(64, 512), help="of short completions, and of long ones")
    parser.add_argument("--folders", type=Path, default=Path("models/shapes"))
    parser.add_argument("--csv", type=Path, default=Path("docs/results/sizes.csv"))
    parser.add_argument("--small", action="store_true", help="all of it at tiny sizes, for a try")
    parser.add_argument("--only-folders", action="store_true", help="write the folders, and measure nothing")
    parser.add_argument("--report", action="store_true", help="print what was measured")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        name, trained, folder = arguments.inside
        inside(name, trained, Path(folder), arguments.csv, *arguments.tokens)
        return
    table = Table(arguments.csv)
    if arguments.report:
        report(table)
        return
    for name in arguments.models:
        folder = arguments.folders / name.partition(",")[0].lower()
        if not folder.is_dir():
            write_folder(name, folder, arguments.small)
        for trained in () if arguments.only_folders else [*TRAINED][: 1 + (name in ALL_FIT)]:
            place = arguments.folders / f"run-{folder.name}-{len(trained)}"
            place.mkdir(exist_ok=True)
            whole_run(table, name, trained, folder, place, *arguments.tokens)
            words = ["--csv", arguments.csv, "--tokens", *arguments.tokens, "--inside", name, trained, folder]
            said, _, _ = process(["-m", "lab.benchmarks.sizes", *map(str, words)], place / "inside.log")
            print(said, end="")
            table = Table(arguments.csv)


if __name__ == "__main__":
    main()
