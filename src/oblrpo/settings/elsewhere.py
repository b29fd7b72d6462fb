"""Settings of TRL that have another name here, or none, for those who type them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NAMED_HERE = {
    "attn_impl": "attn_implementation",
    "dataset_name": "data",
    "dataset_config": "data",
    "dataset_train_split": "split",
    "dataset_test_split": "eval_split",
    "eval_dataset": "eval_data",
    "generation_batch_size": "prompts_per_step",
    "gradient_accumulation_steps": "prompts_per_micro_batch",
    "lr": "learning_rate",
    "loss_type": "algorithm",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_train_epochs": "steps",
    "optim": "optimizer",
    "optim_args": "optimizer_args",
    "output_dir": "output",
    "peft_config": "lora_r",
    "per_device_train_batch_size": "prompts_per_micro_batch",
    "resume_from_checkpoint": "resume",
    "reward_funcs": "rewards",
    "reward_weights": "rewards",
    "run_name": "output",
    "scale_rewards": "normalisation",
    "torch_dtype": "dtype",
    "use_peft": "lora_r",
    "use_vllm": "sampler",
    "vllm_importance_sampling_cap": "importance_sampling_clip_max",
    "vllm_importance_sampling_correction": "sampler_correction",
    "vllm_max_model_len": "vllm_max_model_length",
    "warmup_ratio": "warmup_steps",
}
"""TRL's or transformers' name of a setting -> ours."""

NOT_HERE = {
    "logging_steps": "every step is logged",
    "min_p": "the policy is sampled as it is, which the gradient relies on",
    "repetition_penalty": "the policy is sampled as it is, which the gradient relies on",
    "top_k": "the policy is sampled as it is, which the gradient relies on",
    "top_p": "the policy is sampled as it is, which the gradient relies on",
    "weight_decay": "write --optimizer-args '{weight_decay: 0.1}'",
}
"""A setting that we do not have -> why, or what to write instead."""


def hint(name: str, known: Iterable[str], sign: str = "") -> str:
    """What somebody who typed an unknown setting may have meant, as the end of a sentence, or nothing.

    Args:
        name: the setting, underscored.
        known: all settings of ours, underscored.
        sign: `--` for flags, which have dashes for underscores.
    """

    def written(setting: str) -> str:
        return sign + (setting.replace("_", "-") if sign else setting)

    if name in NAMED_HERE:
        return f" TRL's {written(name)} is {written(NAMED_HERE[name])} here."
    if name in NOT_HERE:
        return f" TRL's {written(name)} is not there: {NOT_HERE[name]}."
    close = difflib.get_close_matches(name[:100], list(known), n=1)
    return f" Did you mean '{written(close[0])}'?" if close else ""
