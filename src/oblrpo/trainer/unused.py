"""Settings that would change nothing, because others leave them nothing to say."""

from __future__ import annotations

from collections.abc import Mapping

from oblrpo.config import TrainConfig
from oblrpo.errors import InputError
from oblrpo.tasks import BENCHMARKS
from oblrpo.tasks.sources import is_hub_name


def refuse_unused(given: Mapping[str, str], config: TrainConfig) -> None:
    """Refuse what somebody has said and a run would pass over.

    Args:
        given: settings that were said, with how they are written there.
        config: all settings of the run.

    Raises:
        InputError: names those that do nothing, and why.
    """
    for why, names in unused(config).items():
        if idle := [written for name, written in given.items() if name in names]:
            raise InputError(f"{', '.join(idle)} would change nothing, for {why}; leave it out.")


def unused(config: TrainConfig) -> dict[str, tuple[str, ...]]:
    """Why -> the settings that do nothing under this config."""
    policy, task, rollout = config.policy, config.task, config.rollout
    benchmark, generated = task.task in BENCHMARKS, not task.data and task.task not in BENCHMARKS
    built_in_test = benchmark and not task.data  # its own splits on the hub
    found: dict[str, tuple[str, ...]] = {}
    if policy.model:
        found["a model that is loaded has its own sizes"] = (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "initializer_range", "max_position_embeddings",
        )  # fmt: skip
    else:
        found["no model is loaded"] = ("attn_implementation", "trust_remote_code")
    if not policy.lora_r:
        found["no adapters are made (lora_r)"] = ("lora_alpha", "lora_target_modules")
    if not config.warm_start.warm_start_steps:
        found["warm_start_steps is 0"] = ("warm_start_batch", "warm_start_learning_rate", "warm_start_noise")
    if task.data and not benchmark:
        found["the problems come from data"] = ("task", "task_args")
    if benchmark:
        found[f"{task.task} names its columns itself"] = ("prompt_column", "answer_column")
    if generated:
        found[f"the task {task.task!r} generates its problems"] = (
            "prompt_column", "answer_column", "split", "eval_split", "heldout_fraction",
        )  # fmt: skip
    elif task.eval_data or built_in_test:
        found["held-out problems have a source of their own"] = ("heldout_fraction",)
    if not generated and not _of_hub(task.data):
        found["data does not come from the hub by name"] = ("split",)
    if not generated and not _of_hub(task.eval_data) and (task.eval_data or not built_in_test):
        found["eval_data does not come from the hub"] = ("eval_split",)
    if not {"wandb", "trackio"} & set(config.run.report_to):
        found["neither wandb nor trackio is in report_to"] = ("project",)
    if rollout.sampler != "vllm":
        found["the sampler is transformers"] = (
            "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_dtype",
        )  # fmt: skip
        if not rollout.sampler_logps:
            found["the sampler keeps no log-probabilities (sampler_logps)"] = (
                "sampler_correction", "importance_sampling_clip_max",
            )  # fmt: skip
    return found


def _of_hub(names: tuple[str, ...]) -> bool:
    return len(names) == 1 and is_hub_name(names[0])
