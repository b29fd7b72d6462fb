"""Settings by name: flat, from recipes and YAML files, checked against the config's types.

YAML 1.2 is read safely and written alike everywhere. Names that other trainers have for our settings are known, and why
some of theirs do not exist here.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.abc import Traversable
from importlib.resources import files
from os.path import isfile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from oblrpo.checksums import has_valid_checksum
from oblrpo.errors import InputError, did_you_mean
from oblrpo.settings.annotations import Holds, with_keys
from oblrpo.settings.train import TrainConfig
from oblrpo.settings.typed import settings_of, with_fields

RECIPES = files("oblrpo") / "recipes"

IDENTITY = "identity"
"""The key of a run's `config.yaml` for what is not a setting: see `runs.Identity`."""


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Every setting under its flag's name (underscored), without the sections."""
    return {name: _plain(value) for name, value, *_ in settings_of(config)}


def every_value(config: TrainConfig) -> dict[str, Any]:
    """Every setting as `flatten` has it; in the place of a mapping with known keys, each of them as `setting.key`."""
    settings = [each for each in with_keys(config) if not any(isinstance(note, Holds) for note in each.notes)]
    return {name: _plain(value) for name, value, *_ in settings}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value


def with_settings(
    config: TrainConfig, settings: dict[str, Any], source: str, given: Iterable[str] | None = None
) -> TrainConfig:
    """`config` with the flat settings of `source` replaced; all of them count as given, or those that `given` names."""
    known = flatten(config)
    for key in settings:
        if key not in known:
            raise InputError(
                f"{source}: unknown setting {key!r}; `oblrpo train --help-all` lists all.{hint(str(key), known)}"
            )
    new = {name for name in (settings if given is None else given) if settings.get(name) is not None}
    return dataclasses.replace(with_fields(config, settings, source), given=tuple(sorted({*config.given, *new})))


def flags_in(argv: list[str]) -> dict[str, str]:
    """Name of a setting -> the flag that sets it, of all flags among these words."""
    flags = (word.split("=")[0] for word in argv if word.startswith("--"))
    return {flag[2:].replace("-", "_").removeprefix("no_"): flag for flag in flags}


def load_recipe(name: str, base: TrainConfig) -> TrainConfig:
    """`base` with the settings of a built-in recipe or of a YAML file."""
    path, ours = file_named(name, RECIPES, "recipe")
    return dataclasses.replace(with_file(base, path, () if ours else None), recipe=name)


def with_file(config: TrainConfig, path: Path | Traversable, given: Iterable[str] | None = None) -> TrainConfig:
    """`config` with what a YAML file says; of the `config.yaml` that a run wrote only what was given counts so."""
    settings = read_yaml_file(path)
    if (of_run := settings.pop(IDENTITY, None)) and has_valid_checksum(path.read_text(encoding="utf-8")):
        given = of_run.get("given")
    return with_settings(config, settings, str(path), given)


def recipe_settings(name: str) -> dict[str, Any]:
    """What a built-in recipe or a YAML file says, and nothing else."""
    return settings_in(file_named(name, RECIPES, "recipe")[0])


def file_named(name: str, folder: Traversable, kind: str) -> tuple[Path | Traversable, bool]:
    """A built-in YAML file of a folder by its name, or any file by its path; and whether it is built in."""
    built_in = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    if name in built_in:
        return folder / f"{name}.yaml", True
    if not isfile(name):
        close = did_you_mean(name, built_in)
        raise InputError(f"no {kind} or file {name!r}; the built-in {kind}s are: {', '.join(built_in)}.{close}")
    return Path(name), False


def settings_in(path: Path | Traversable) -> dict[str, Any]:
    """What a YAML file says, which may be the `config.yaml` of a run."""
    return {key: value for key, value in read_yaml_file(path).items() if key != IDENTITY}


DEEPEST, LARGEST = 50, 100_000
"""How deep a document may be, and how many values it may hold once its aliases are written out."""


class _Constructor(SafeConstructor):
    """YAML's core schema, which has no dates: 2024-01-01 is text, and so is `=`. Keys are text, each there once."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> Any:
        """Refuse a key that is not text, or is there already."""
        if wrong := "is not text; quote it" if not isinstance(key, str) else "appears twice" if key in mapping else "":
            raise ConstructorError(None, None, f"the key {key!r:.40} {wrong}", key_node.start_mark)
        return True


for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)


def _yaml(flow: bool | None = False, sort: bool = False) -> Any:
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.max_depth, yaml.composer.warn_double_anchors = _Constructor, DEEPEST, False
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output, yaml.width = flow, sort, 10**6
    return yaml


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """A YAML mapping."""
    place, what = source[:200], "a value does not fit its !! tag"
    try:
        settings = _yaml().load(text) or {}
        _check(settings)
    except Exception as error:  # the library raises KeyError of `!!bool x`, AssertionError of `%YAML 1.3`, and others
        if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
            place += f", line {mark.line + 1}, column {mark.column + 1},"
            what = f"{error.context}, {error.problem}" if error.context else str(error.problem)
        elif isinstance(error, (YAMLError, ValueError, AssertionError)):
            what = str(error)
        reason = " ".join(what.partition(", if necessary")[0].encode("utf-8", "backslashreplace").decode().split())
        raise InputError(f"{place} is not valid YAML: {reason[:500]}.") from None
    if not isinstance(settings, dict):
        raise InputError(f"{source} must hold settings as YAML has them: `key: value`, or {{key: value}} on one line.")
    return settings


def _check(document: Any) -> None:
    """Refuse what settings cannot be, and more values than a file of settings has: aliases may multiply them."""
    left, count = [document], 0
    while left:
        value, count = left.pop(), count + 1
        if count > LARGEST:
            raise ValueError(f"it holds more than {LARGEST:,} values, its aliases written out")
        if type(value) is dict:
            left += [*value, *value.values()]
        elif type(value) is list:
            left += value
        elif isinstance(value, str):
            value.encode()  # half a surrogate pair cannot be written
        elif not isinstance(value, (int, float, type(None))):
            raise ValueError(f"a setting cannot hold a value of type {type(value).__name__}")


def read_yaml_file(path: Path | Traversable) -> dict[str, Any]:
    """The YAML mapping in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as text ({' '.join(str(error).split())}).") from None
    return read_yaml(text, str(path))


def yaml_text(value: Any, short_lists: bool = False) -> str:
    """Settings as YAML, one a line in their own order; with `short_lists`, plain lists on one line."""
    return _dumped(_yaml(flow=None if short_lists else False), value)


def yaml_line(value: Any) -> str:
    """A value as one line of YAML, with keys in order, as it is written on the command line."""
    return _dumped(_yaml(flow=True, sort=True), value).removesuffix("...\n").strip()


def _dumped(yaml: Any, value: Any) -> str:
    yaml.dump(value, text := io.StringIO())
    return text.getvalue()


CALLED = {
    "algorithm": "adv_estimator advantage_estimator loss_mode loss_type",
    "answer_column": "answer answer_key label_key",
    "beta": "init_kl_coef kl_coef kl_loss_coef reference_policy_kl_penalty use_kl_in_reward use_kl_loss",
    "chat": "apply_chat_template",
    "chat_template_args": "apply_chat_template_kwargs chat_template_kwargs enable_thinking",
    "data": "data_path dataset dataset_name prompt_data train_dataset train_file train_files",
    "data, such as owner/name[validation]": "split train_split",
    "dtype": "mixed_precision precision torch_dtype",
    "dynamic_sampling": "dynamic_filtering filter_groups",
    "environment, such as shop.py:Shop": "env_name environment_factory interaction_config_path",
    "epsilon": "clip_range clip_ratio clip_ratio_low cliprange eps_clip ratio_clip_min",
    "epsilon_high": "clip_ratio_high ratio_clip_max",
    "eval_data": "eval_dataset test_data test_files val_data val_files",
    "eval_samples": "eval_n_samples_per_prompt num_generations_eval val_kwargs.n",
    "eval_steps": "eval_interval eval_strategy test_freq val_period",
    "gradient_checkpointing": "activation_checkpointing enable_gradient_checkpointing",
    "learning_rate": "actor_learning_rate actor_lr lr",
    "limit": "max_samples num_examples",
    "lora, such as '{r: 16}'": "lora_alpha lora_r lora_rank lora_target_modules peft_config target_modules use_peft",
    "lr_scheduler_type": "lr_scheduler lr_warmup_style",
    "max_completion_length": "generate_max_len max_new_tokens max_response_length max_tokens response_length",
    "max_grad_norm": "clip_grad grad_clip max_norm",
    "max_prompt_length": "max_input_length prompt_max_len",
    "max_prompt_length, and max_completion_length for what is sampled": "max_len max_length max_seq_length",
    "max_tool_response_length, in characters": "max_obs_length",
    "max_turns": "max_assistant_turns max_tool_calling_iterations max_user_turns",
    "model": "base_model model.path model_name model_name_or_path model_path pretrain pretrained",
    "normalisation": "norm_adv_by_std_in_grpo normalize_rewards scale_rewards",
    "num_generations|samples": "group_size n n_samples n_samples_per_prompt num_generations_per_prompt num_samples",
    "num_iterations": "max_epochs ppo_epochs",
    "optimizer": "optim",
    "optimizer_args, such as '{weight_decay: 0.1}'": "adam_beta1 adam_beta2 adam_betas betas weight_decay",
    "output": "ckpt_path default_local_dir experiment_name logging_dir output_dir run_name save_path",
    "project": "project_name wandb_project",
    "prompt_column": "input_key prompt prompt_key",
    "prompt_template": "input_template",
    "prompts_per_micro_batch, which counts prompts": "gradient_accumulation_steps micro_rollout_batch_size "
    "micro_train_batch_size per_device_train_batch_size ppo_micro_batch_size_per_gpu",
    "prompts_per_step|problems_per_batch, which counts prompts": "batch_size generation_batch_size "
    "num_prompts_per_step per_device_eval_batch_size rollout_batch_size train_batch_size",
    "report_to, such as wandb": "logger use_wandb wandb",
    "resume, with the folder of the run as output": "load_checkpoint resume_from_checkpoint resume_mode",
    "rewards, such as length@0.1, where the number is a weight": "reward_weights",
    "rewards, such as 'length:{unit: tokens, most: 256, soft: 64}'": "overlong_buffer soft_punish_cache",
    "rewards, such as my.py:function": "custom_reward_function remote_rm_url reward reward_fn reward_funcs",
    "sampler, such as vllm": "rollout.name use_vllm",
    "sampler_correction": "rollout_is vllm_importance_sampling_correction",
    "save_steps": "save_freq save_interval save_strategy",
    "seed": "data_seed",
    "steps": "max_steps num_steps total_steps total_training_steps",
    "steps, of prompts_per_step rows each; there are no epochs": "epochs num_episodes num_epochs num_train_epochs "
    "total_epochs",
    "tokens_per_micro_batch": "max_token_len_per_gpu ppo_max_token_len_per_gpu use_dynamic_bsz",
    "tools, such as tools.py:search": "function_tool_path tool_config_path",
    "vllm_args, such as '{gpu_memory_utilization: 0.4}'": "gpu_memory_utilization max_model_len "
    "vllm_gpu_memory_utilization",
    "warmup_steps, a number of steps": "lr_warmup_ratio lr_warmup_steps_ratio warmup_ratio",
    "weighting": "loss_agg_mode",
}  # fmt: skip
"""A setting of ours (train|evaluate), with a remark -> what TRL, verl, OpenRLHF and NeMo RL call it."""

NOT_HERE = {
    "a batch gets one update, or several with num_iterations": "num_mini_batches ppo_mini_batch_size "
    "steps_per_generation",
    "a reward is a function, which may call a model; use `rewards` my.py:function": "reward_model",
    "a run uses one device; for several, use our adapter for TRL or verl (docs/trl.md, docs/verl.md)":
    "deepspeed fsdp fsdp_config n_gpus_per_node nnodes num_gpus tensor_model_parallel_size "
    "vllm_tensor_parallel_size zero_stage",
    "a run's folder is never overwritten; give another `output`": "overwrite overwrite_output_dir",
    "the YAML file of a run's settings is the first argument, as in `oblrpo train my.yaml`": "config config_file",
    "truncated completions are scored as they are": "mask_truncated_completions",
    "all rows are read; select some with `where`": "max_samples max_train_samples",
    "every step is logged": "log_freq log_interval logging_steps",
    "float16 is not supported; use `bf16`": "fp16",
    "the gradient requires samples of the policy itself": "do_sample min_p repetition_penalty top_k top_p",
    "a baseline takes the place of a critic": "critic gae_lambda gamma lam vf_coef",
    "entropy is measured, not rewarded": "entropy_coef entropy_coeff",
}  # fmt: skip
"""Why there is no such setting, or what to use instead -> its names in other trainers."""

_OURS = {name: setting for setting, names in CALLED.items() for name in names.split()}
_WHY = {name: why for why, names in NOT_HERE.items() for name in names.split()}


def hint(name: str, known: Iterable[str], sign: str = "") -> str:
    """What an unknown setting may have meant, as the end of a sentence, or nothing.

    The setting may be in the sections of another trainer, as actor.optim.lr. `sign` is `--` for flags, which have
    dashes for the underscores of `name` and of all settings that are `known`.
    """
    known, parts = set(known), name.lower().split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]

    def written(setting: str) -> str:
        return sign + (setting.replace("_", "-") if sign else setting)

    def ours(word: str) -> str:
        settings, comma, mind = _OURS.get(word, "").partition(",")
        here = [setting for setting in settings.split("|") if setting in known]
        return f" Use {written(here[0])}{comma}{mind}." if here else ""

    answers = [
        ours(ends[0]),
        # before parts of it: critic.optim.lr is not the rate of the policy
        *[f" There is no such setting: {_WHY[word]}." for word in [*ends, *parts] if word in _WHY],
        f" Use {written(parts[-1])}." if parts[-1] in known else "",
        *map(ours, [*ends, *reversed(parts)]),
        *[f" Did you mean '{written(close)}'?" for close in get_close_matches(parts[-1][:100], known, 1, cutoff=0.75)],
    ]
    return next(filter(None, answers), "")
