"""Whole steps of the trainer at the sizes of Qwen3, random weights: seconds, and memory beside what was foretold."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lab.benchmarks.gpu.page import Page
from lab.benchmarks.gpu.where import COMMON, SIZES, TINY, free
from oblrpo.step.look import FIRST

ADAPTERS = {"dtype": "bfloat16", "lora": {"r": 16, "alpha": 32}}
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Qwen3-0.6B", "all parameters", {}),
    ("Qwen3-4B", "adapters on bfloat16", ADAPTERS),
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
TINY_STEP = {"steps": 3, "max_completion_length": 4, "tokens_per_micro_batch": 0}
PROMPT = 128


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that random weights earn half of the time."""
    return [float(ids[0] % 2) for ids in completion_ids]


def run(page: Page, device: str, small: bool) -> None:
    """Every case by the default, then by RLOO, as long as there is time."""
    _table(page, small)
    for name, trained, words in CASES:
        with TemporaryDirectory() as folder:
            _save(name, f"{folder}/model", device, small)
            for algorithm, further in ALGORITHMS.items():
                _line(page, (name, trained, algorithm), words | further, device, small, folder)


def with_vllm(page: Page, device: str, small: bool) -> None:
    """The adapters of the smallest model, sampled by a vLLM engine on the same device."""
    import vllm

    page.say(f"vLLM {vllm.__version__}.")
    _table(page, small)
    words = ADAPTERS | {"sampler": "vllm", "vllm_args": {"max_model_len": 2 * PROMPT}}
    with TemporaryDirectory() as folder:
        _save("Qwen3-0.6B", f"{folder}/model", device, small)
        _line(page, ("Qwen3-0.6B", "adapters on bfloat16", "oblrpo_thrifty, vLLM"), words, device, small, folder)


def _table(page: Page, small: bool) -> None:
    page.table(
        f"{'Tiny steps' if small else 'Steps'} of {STEP['prompts_per_step']} prompts of {PROMPT} tokens with "
        f"{STEP['num_generations']} completions of {STEP['max_completion_length']}, random weights from a folder. "
        f"Seconds are medians of steps without a look, after the first {FIRST}; memory is that of all tensors at a "
        "run's peak.",
        "model", "trained", "algorithm", "steps", "seconds a step", "sampling", "training", "memory (GB)", "foretold",
        "KL of each step over its target",
    )  # fmt: skip


def _line(
    page: Page, names: tuple[str, str, str], words: dict[str, Any], device: str, small: bool, folder: str
) -> None:
    """One run, after which the device is as empty as before."""
    try:
        _run(page, names, words, device, small, folder)
    except torch.OutOfMemoryError:
        page.add(*names, "out of memory", *[""] * 6)
    free(device)


def _save(name: str, folder: str, device: str, small: bool) -> None:
    """A model with random weights and a tokenizer of bytes, as a folder that anybody loads."""
    from oblrpo.policy.load import byte_tokenizer

    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model("qwen3", **COMMON | SIZES[name] | (TINY if small else {}), eos_token_id=1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    free(device)
    byte_tokenizer().save_pretrained(folder)


def _run(page: Page, names: tuple[str, str, str], words: dict[str, Any], device: str, small: bool, folder: str) -> None:
    from oblrpo.objects import split_objects
    from oblrpo.report.console import Progress, console_of_program
    from oblrpo.settings import TrainConfig, with_settings
    from oblrpo.trainer.loop import Trainer
    from oblrpo.trainer.peak_memory import GB, peak_memory

    rows = [{"prompt": f"{number:0{4 if small else PROMPT}d}"} for number in range(100)]
    given, objects = split_objects(f"{folder}/model", None, rows, rewards=first_token)
    output = f"{folder}/{names[2].partition(',')[0]}"
    settings = given | STEP | words | (TINY_STEP if small else {}) | {"output": output, "device": device}
    trainer = Trainer(with_settings(TrainConfig(), settings, "sizes"), objects=objects)
    foretold = peak_memory(trainer.policy, trainer.config, trainer.longest_prompt).total / GB
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    try:
        trainer.run(Progress(console_of_program(False)))
    finally:  # a run whose time is up shows the steps it made
        file = Path(output) / "metrics.jsonl"
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
