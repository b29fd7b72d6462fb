"""Whole steps of the trainer at the sizes of Qwen3, random weights: seconds, and memory beside what was foretold."""

from __future__ import annotations

import gc
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lab.benchmarks.gpu.page import Page
from oblrpo.step.look import FIRST

COMMON = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, int]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
CASES: tuple[tuple[str, str, torch.dtype, dict[str, Any]], ...] = (
    ("Qwen3-0.6B", "all parameters", torch.float32, {}),
    ("Qwen3-4B", "adapters on bfloat16", torch.bfloat16, {"lora": {"r": 16, "alpha": 32}}),
    ("Qwen3-1.7B", "all parameters", torch.float32, {}),
)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "oblrpo_thrifty, measured rate": {},
    "rloo, fixed rate": {"algorithm": "rloo", "schedule": "off"},
}
STEP = {
    "steps": FIRST + 3, "prompts_per_step": 8, "num_generations": 4, "max_completion_length": 64, "eval_prompts": 2,
    "eval_samples": 1, "tokens_per_micro_batch": 4096, "gradient_checkpointing": True, "learning_rate": 1e-6,
    "bf16": True, "save_steps": 0, "ledger_steps": 0,
}  # fmt: skip
TINY = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
TINY_STEP = {"steps": 3, "max_completion_length": 4, "tokens_per_micro_batch": 0}
PROMPT = 128


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that random weights earn half of the time."""
    return [float(ids[0] % 2) for ids in completion_ids]


def run(page: Page, device: str, small: bool) -> None:
    """Every case by the default, then by RLOO, as long as there is time."""
    page.table(
        f"{'Tiny steps' if small else 'Steps'} of {STEP['prompts_per_step']} prompts of {PROMPT} tokens with "
        f"{STEP['num_generations']} completions of {STEP['max_completion_length']}, random weights. Seconds are "
        f"medians of steps without a look, after the first {FIRST}; memory is that of all tensors at a run's peak.",
        "model", "trained", "algorithm", "steps", "seconds a step", "sampling", "training", "memory (GB)", "foretold",
        "KL of each step over its target",
    )  # fmt: skip
    for name, trained, dtype, words in CASES[:1] if small else CASES:
        for algorithm, further in ALGORITHMS.items():
            try:
                _line(page, (name, trained, algorithm), dtype, words | further, device, small)
            except torch.OutOfMemoryError:
                page.add(name, trained, algorithm, "out of memory", *[""] * 6)
            gc.collect()
            if device.startswith("cuda"):
                torch.cuda.empty_cache()


def _line(
    page: Page, names: tuple[str, str, str], dtype: torch.dtype, words: dict[str, Any], device: str, small: bool
) -> None:
    """One run of the trainer."""
    from oblrpo.objects import split_objects
    from oblrpo.policy.load import byte_tokenizer
    from oblrpo.report.console import Progress, console_of_program
    from oblrpo.settings import TrainConfig, with_settings
    from oblrpo.trainer.loop import Trainer
    from oblrpo.trainer.peak_memory import GB, peak_memory

    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model("qwen3", **COMMON | SIZES[names[0]] | (TINY if small else {}), eos_token_id=1)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rows = [{"prompt": f"{number:0{4 if small else PROMPT}d}"} for number in range(100)]
    given, objects = split_objects(model, byte_tokenizer(), rows, rewards=first_token)
    with TemporaryDirectory() as folder:
        settings = given | STEP | words | (TINY_STEP if small else {}) | {"output": f"{folder}/run"}
        trainer = Trainer(with_settings(TrainConfig(), settings, "sizes"), objects=objects)
        foretold = peak_memory(trainer.policy, trainer.config, trainer.longest_prompt).total / GB
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(device)
        try:
            trainer.run(Progress(console_of_program(False)))
        finally:  # a run whose time is up shows the steps it made
            file = Path(folder) / "run" / "metrics.jsonl"
            written = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            steps = [row for row in written if row["step"]]
            peak = f"{torch.cuda.max_memory_allocated(device) / GB:.1f}" if device.startswith("cuda") else ""
            later = steps[FIRST:] or steps
            seconds = [
                f"{statistics.median(row[key] for row in later):.2f}" if later else ""
                for key in ("step_time", "time/sampling", "time/training")
            ]
            moved = [row["step_kl"] / row["step_kl_target"] for row in steps if row.get("step_kl_target")]
            page.add(*names, len(steps), *seconds, peak, f"{foretold:.1f}", " ".join(f"{ratio:.2f}" for ratio in moved))
