"""Settings that are called otherwise in TRL, or are not there; and those of earlier versions, for who types them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NAMED_HERE = {
    "attn_impl": "attn_implementation",
    "dataset_name": "data",
    "dataset_config": "data",
    "dataset_train_split": "data",
    "dataset_test_split": "eval_data",
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
    "peft_config": "lora",
    "per_device_train_batch_size": "prompts_per_micro_batch",
    "resume_from_checkpoint": "resume",
    "reward_funcs": "rewards",
    "reward_weights": "rewards",
    "run_name": "output",
    "scale_rewards": "normalisation",
    "torch_dtype": "dtype",
    "use_peft": "lora",
    "use_vllm": "sampler",
    "vllm_importance_sampling_cap": "sampler_correction",
    "vllm_importance_sampling_correction": "sampler_correction",
    "warmup_ratio": "warmup_steps",
}
"""TRL's or transformers' name of a setting -> ours."""

NAMED_BY_OTHERS = {
    "batch_size": "prompts_per_step",
    "clip_ratio": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "epochs": "steps",
    "group_size": "num_generations",
    "kl_coef": "beta",
    "kl_loss_coef": "beta",
    "max_response_length": "max_completion_length",
    "num_prompts": "prompts_per_step",
    "num_samples": "num_generations",
    "ppo_epochs": "num_iterations",
    "rollout_n": "num_generations",
    "train_batch_size": "prompts_per_step",
}
"""What verl, OpenRLHF and others call a setting -> ours."""

NOT_HERE = {
    "logging_steps": "every step is logged",
    "min_p": "the policy is sampled as it is, which the gradient relies on",
    "repetition_penalty": "the policy is sampled as it is, which the gradient relies on",
    "top_k": "the policy is sampled as it is, which the gradient relies on",
    "top_p": "the policy is sampled as it is, which the gradient relies on",
    "weight_decay": "write --optimizer-args '{weight_decay: 0.1}'",
}
"""A setting that we do not have -> why, or what to write instead."""

GONE = {
    "eval_split": "write it behind the name, such as `eval_data` owner/name[validation]",
    "hidden_size": "write `model_args` {hidden_size: 128}",
    "importance_sampling_clip_max": "write it behind `sampler_correction`, such as truncated:2",
    "initializer_range": "write `model_args` {initializer_range: 0.05}",
    "ledger": "`ledger_steps` 0 takes none; inner products come from random projections",
    "lora_alpha": "write `lora` {r: 16, alpha: 32}",
    "lora_r": "write `lora` {r: 16}",
    "lora_target_modules": "write `lora` {r: 16, target_modules: [q_proj, v_proj]}",
    "max_position_embeddings": "write `model_args` {max_position_embeddings: 2048}",
    "max_skipped_steps": "a run ends after 5 steps in a row without a finite gradient, or after half of its steps",
    "merge": "oblrpo export RUN --merge writes the model with its adapters added",
    "num_attention_heads": "write `model_args` {num_attention_heads: 4}",
    "num_hidden_layers": "write `model_args` {num_hidden_layers: 4}",
    "prior_memory": "an earlier step counts 0.8 in the next one",
    "prior_strength": "it is chosen from earlier steps",
    "prompt_sampling": "prompts come in epochs",
    "sampler_logps": "`sampler_correction` truncated or measured takes what the sampler draws tokens with",
    "sampling_cost": "`train_on` compute-optimal takes what sampling costs as it was measured",
    "schedule_ceiling": "no rule takes more than the rate itself",
    "schedule_ema": "signal and noise are averaged as suits the schedule: 0.97 with auto, 0.9 with the others",
    "schedule_floor": "no rule has a floor; schedule off follows no signal",
    "schedule_kl_every": "an update is measured on one completion of four",
    "schedule_metric": "the gradient is measured as it is",
    "score_memory_mb": "auto keeps gradients where they are smaller than their factors",
    "split": "write it behind the name, such as `data` owner/name[validation]",
    "train_on_tolerance": "`train_on` compute-optimal chooses how many completions are drawn",
    "vllm_dtype": "write `vllm_args` {dtype: float16}",
    "vllm_gpu_memory_utilization": "write `vllm_args` {gpu_memory_utilization: 0.4}",
    "vllm_max_model_length": "write `vllm_args` {max_model_len: 4096}",
    "warm_start_batch": "write `warm_start_args` {batch: 16}",
    "warm_start_learning_rate": "write `warm_start_args` {learning_rate: 1e-4}",
    "warm_start_noise": "write `warm_start_args` {noise: 0.05}",
}
"""A setting that earlier versions had -> what there is in its place."""

GONE_VALUES = {
    ("algorithm", "otb"): "the variance ledger goes on measuring its baseline",
    ("baseline", "oblr_crossfit"): "oblr leaves the completion out, and varied less",
    ("score_method", "projected"): "auto is exact, and no slower",
    ("sampler_correction", "none"): "measured takes the sampler for the policy, and tells how far it is from it",
    ("schedule", "length"): "auto measures how far a step moves the policy, and takes the length of completions in",
    ("score_method", "folds"): "auto is exact, too, for every baseline",
    ("score_norms", "projected"): "calibrated learns from exact norms, and costs no backward",
    ("train_on", "tolerance"): "compute-optimal chooses how many completions are drawn",
}
"""A setting and a value that it had in earlier versions -> what there is in its place."""


def lost(name: str, value: object) -> str:
    """What became of a value that a setting had in an earlier version, as the end of a sentence, or nothing."""
    why = GONE_VALUES.get((name, str(value)), "")
    if name == "train_on" and str(value).replace(".", "", 1).isdecimal():  # a share
        why = GONE_VALUES[name, "tolerance"]
    return f" {value} is gone: {why}." if why else ""


def hint(name: str, known: Iterable[str], sign: str = "") -> str:
    """What somebody who typed an unknown setting may have meant, as the end of a sentence, or nothing.

    Args:
        name: the setting, underscored.
        known: all settings of ours, underscored.
        sign: `--` for flags, which have dashes for underscores.
    """

    def written(setting: str) -> str:
        return sign + (setting.replace("_", "-") if sign else setting)

    if name in GONE:
        return f" {written(name)} is gone: {GONE[name]}."
    if name in NAMED_HERE:
        return f" TRL's {written(name)} is {written(NAMED_HERE[name])} here."
    if name in NAMED_BY_OTHERS:
        return f" It is {written(NAMED_BY_OTHERS[name])} here."
    if name in NOT_HERE:
        return f" TRL's {written(name)} is not there: {NOT_HERE[name]}."
    close = difflib.get_close_matches(name[:100], list(known), n=1)
    return f" Did you mean '{written(close[0])}'?" if close else ""
