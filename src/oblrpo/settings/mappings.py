"""What the settings that are mappings may hold: names, types and defaults of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from oblrpo.settings.annotations import FROM_ROWS, MAY_CHANGE, Range


@dataclass(frozen=True)
class Sizes:
    """What `model_args` may hold, by transformers' names: the sizes of a small Qwen3."""

    hidden_size: Annotated[int, Range(1)] = 64
    """Width of the model."""
    num_hidden_layers: Annotated[int, Range(1)] = 3
    """Number of layers."""
    num_attention_heads: int = 4
    """Number of attention heads; there are half as many key-value heads."""
    initializer_range: Annotated[float, Range(0)] = 0.05
    """Standard deviation of the random weights; transformers' 0.02 is meant for wider models."""
    max_position_embeddings: Annotated[int, Range(2)] = 2048
    """Longest prompt + completion, in tokens."""


@dataclass(frozen=True)
class LoRA:
    """What `lora` may hold."""

    r: Annotated[int, Range(0)] = 0
    """Rank of the adapters."""
    alpha: Annotated[int, Range(1)] = 16
    """Scale of the adapters, which is divided by their rank."""
    target_modules: tuple[str, ...] = ()
    """Layers to adapt, by the end of their names, such as [q_proj, v_proj]. None: all linear layers but the head."""


@dataclass(frozen=True)
class VLLM:
    """What `vllm_args` may hold, by vLLM's names."""

    gpu_memory_utilization: Annotated[float | None, Range(0.001, 1), MAY_CHANGE] = None
    """Share of the device's memory that the engine may take, including its weights. None: 0.3 of a GPU; on a CPU 2 GiB
    of keys and values, or VLLM_CPU_KVCACHE_SPACE."""
    max_model_len: Annotated[int | None, Range(1), MAY_CHANGE] = None
    """Longest prompt + completion that the engine can hold, in tokens, such as 4096. None: the model's own limit, or
    what memory allows."""
    enforce_eager: Annotated[bool | None, MAY_CHANGE] = None
    """Skip compiling and CUDA graphs, which take a minute to build and then sample faster. None: only on a CPU."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type that the engine computes in; one close to the trainer's gives less mismatch. auto: the trainer's."""


@dataclass(frozen=True)
class WarmStart:
    """What `warm_start_args` may hold."""

    batch: Annotated[int, Range(1)] = 128
    """Demonstrations per step."""
    learning_rate: Annotated[float | None, Range(0)] = None
    """AdamW's peak rate, such as 1e-4; it falls to 0 along a cosine. None: 2e-5 for a loaded model, 2e-4 for
    adapters, 3e-3 for a newly built policy."""
    noise: Annotated[float, Range(0, 1), FROM_ROWS] = 0.15
    """Probability that a step of a demonstration by the task is wrong."""
