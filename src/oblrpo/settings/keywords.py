"""Keywords of `oblrpo.train` and `oblrpo.evaluate`, written by `python -m lab.keywords`."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class SharedKeywords(TypedDict, total=False):
    """Settings that both have."""

    output: str | PathLike[str]
    seed: int
    chat: bool | None
    system_prompt: str
    chat_template_args: dict[str, Any]
    bf16: bool
    dtype: Literal["float32", "bfloat16"]
    attn_implementation: str
    device: str
    trust_remote_code: bool
    rewards: str | Sequence[str]
    on_reward_error: Literal["raise", "mask"]
    reward_seconds: float
    where: dict[str, Any]
    prompt_column: str
    answer_column: str
    prompt_template: str
    sampler: Literal["transformers", "vllm"]
    vllm_args: dict[str, Any]
    max_num_seqs: int
    temperature: float


class TrainKeywords(SharedKeywords, total=False):
    """Every setting of `oblrpo train`."""

    steps: int
    eval_steps: int
    eval_prompts: int
    eval_samples: int
    save_steps: int | None
    save_total_limit: int
    stop_on_collapse: bool
    threads: int
    report_to: str | Sequence[str]
    log_completions: bool
    project: str
    gradient_checkpointing: bool
    lora: dict[str, Any]
    load_in_4bit: bool
    model_args: dict[str, Any]
    warm_start_steps: int
    warm_start_args: dict[str, Any]
    task: str
    task_args: dict[str, Any]
    max_prompt_length: int
    heldout_fraction: float
    max_turns: int
    tool_seconds: float
    episode_seconds: float
    max_tool_response_length: int
    prompts_per_step: int
    num_generations: int
    dynamic_sampling: int
    max_completion_length: int
    prompts_per_micro_batch: int
    tokens_per_micro_batch: int
    sampler_correction: str
    algorithm: str
    baseline: str
    normalisation: str
    weighting: str
    reward_clip: float
    beta: float
    num_iterations: int
    ratio: str
    epsilon: float | None
    epsilon_high: float | None
    look_steps: int | None
    score_norms: Literal["calibrated", "length", "logit"]
    ledger_steps: int | None
    optimizer: str
    learning_rate: float
    optimizer_args: dict[str, Any]
    schedule: str
    schedule_kl: float | None
    warmup_steps: int
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    max_grad_norm: float


class EvaluateKeywords(SharedKeywords, total=False):
    """Every setting of `oblrpo evaluate` without a benchmark."""

    samples: int
    top_p: float
    max_completion_length: int | None
    problems_per_batch: int
    limit: int
    threshold: float
