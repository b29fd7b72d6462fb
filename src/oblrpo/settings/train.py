"""Every setting of `oblrpo train` with its default. Names of fields are the flags and the YAML keys."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from oblrpo.errors import InputError
from oblrpo.settings.annotations import MAY_CHANGE, Holds, Mapping, Range
from oblrpo.settings.elsewhere import lost
from oblrpo.settings.idle import (
    BENCHMARK,
    BENCHMARK_PROMPT,
    BUILT,
    FROM_ROWS,
    GENERATED,
    GENERATED_PROMPT,
    LOADED,
    NO_PROJECTS,
    NO_VLLM,
    NO_WARM_START,
    ONE_UPDATE,
    OWN_DATA,
    OWN_TEST,
)
from oblrpo.settings.typed import of_mapping

CORRECTIONS = {"auto": 3.0, "truncated": 3.0, "untruncated": math.inf, "measured": None}
"""What `sampler_correction` may be -> the C of min(C, pi / sampler); None: no weights are taken."""


@dataclass(frozen=True)
class Sizes:
    """What `model_args` may hold, by transformers' names: the sizes of a small Qwen3."""

    hidden_size: Annotated[int, Range(1)] = 64
    """Width."""
    num_hidden_layers: Annotated[int, Range(1)] = 3
    """Layers."""
    num_attention_heads: int = 4
    """Attention heads; there are half as many key-value heads."""
    initializer_range: Annotated[float, Range(0)] = 0.05
    """Standard deviation of the random weights; transformers' 0.02 is meant for wider models."""
    max_position_embeddings: Annotated[int, Range(2)] = 2048
    """Longest prompt + completion, in tokens."""


@dataclass(frozen=True)
class LoRA:
    """What `lora` may hold."""

    r: Annotated[int, Range(0)] = 0
    """Rank."""
    alpha: Annotated[int, Range(1)] = 16
    """Scale of the adapters, over their rank."""
    target_modules: tuple[str, ...] = ()
    """Layers to adapt, by the end of their names. None: all linear ones but the head."""


@dataclass(frozen=True)
class VLLM:
    """What `vllm_args` may hold, by vLLM's names."""

    gpu_memory_utilization: Annotated[float, Range(0, 1), MAY_CHANGE] = 0.3
    """Share of the GPU's memory that the engine may take, its weights included."""
    max_model_len: Annotated[int | None, Range(1)] = None
    """Longest prompt + completion that the engine can hold, in tokens. None: as long as the model can read."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type that the engine computes in; the closer to the trainer's, the smaller the mismatch."""


@dataclass(frozen=True)
class PolicyConfig:
    """The policy: a causal LM with its tokenizer, loaded, or built with random weights and a tokenizer of bytes."""

    model: str = ""
    """Folder or hub name for transformers. Empty: build a small Qwen3 policy."""
    chat: bool = False
    """Show text prompts to the model as a user's message in its chat template. Prompts of messages always use it."""
    system_prompt: str = ""
    """First message of every conversation that has no system message."""
    chat_template_args: Mapping = field(default_factory=dict)
    """Further arguments of the chat template, such as '{enable_thinking: false}'."""
    bf16: bool = False
    """Compute in bfloat16, with weights that keep the type `dtype`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the loaded weights; bfloat16 only under adapters, which are float32."""
    attn_implementation: Annotated[str, BUILT] = ""
    """Attention that transformers uses: sdpa, eager, flash_attention_2 ... Empty: its own choice."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward instead of keeping them."""
    lora: Annotated[Mapping, Holds(LoRA)] = field(default_factory=dict)
    """LoRA adapters, through PEFT, with their rank r, such as '{r: 16, alpha: 32, target_modules: [q_proj, v_proj]}'.
    None: the whole model is trained."""
    load_in_4bit: bool = False
    """QLoRA: keep the model under the adapters in 4 bits (NF4), through bitsandbytes."""
    merge: bool = False
    """After the last step write the model with its adapters merged to `OUTPUT/merged`."""
    model_args: Annotated[Mapping, Holds(Sizes), LOADED] = field(default_factory=dict)
    """Sizes of a policy that is built, such as '{hidden_size: 128, num_hidden_layers: 4}'."""
    device: Annotated[str, MAY_CHANGE] = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: the first GPU if there is one."""
    trust_remote_code: Annotated[bool, BUILT] = False
    """Let transformers run Python code that comes with the model."""

    @property
    def sizes(self) -> Sizes:
        """The sizes of a policy that is built.

        Raises:
            InputError: an unknown key or a value of the wrong type.
        """
        return of_mapping(Sizes, self.model_args, "model_args")

    @property
    def adapters(self) -> LoRA:
        """The adapters that are made; of rank 0 where there are none.

        Raises:
            InputError: an unknown key or a value of the wrong type.
        """
        return of_mapping(LoRA, self.lora, "lora")


@dataclass(frozen=True)
class WarmStart:
    """What `warm_start_args` may hold."""

    batch: Annotated[int, Range(1)] = 128
    """Demonstrations a step."""
    learning_rate: Annotated[float | None, Range(0)] = None
    """AdamW's peak rate; it falls to 0 along a cosine. None: 2e-5 for a loaded model, 2e-4 for adapters, 3e-3 for a
    policy built from nothing."""
    noise: Annotated[float, Range(0, 1), FROM_ROWS] = 0.15
    """Probability that a step of the task's demonstration is wrong."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised learning before RL: on rows of prompt and completion, or on the task's own noisy demonstrations."""

    sft_data: tuple[str, ...] = ()
    """Files or a data set of the hub (split train), as `data`, with the columns `prompt_column` and `completion`: text,
    or one message of the assistant. None: the built-in task demonstrates, if warm_start_steps says so."""
    warm_start_steps: Annotated[int, Range(0)] = 0
    """Gradient steps of supervised learning; 0: one epoch of sft_data, or none without it."""
    warm_start_args: Annotated[Mapping, Holds(WarmStart), NO_WARM_START] = field(default_factory=dict)
    """How it learns, such as '{batch: 16, learning_rate: 1e-4, noise: 0.05}'."""

    @property
    def begins(self) -> bool:
        """Whether the run begins with supervised learning."""
        return bool(self.sft_data or self.warm_start_steps)

    @property
    def learning(self) -> WarmStart:
        """How it learns.

        Raises:
            InputError: an unknown key or a value of the wrong type.
        """
        return of_mapping(WarmStart, self.warm_start_args, "warm_start_args")


@dataclass(frozen=True)
class TaskConfig:
    """The problems and what verifies them."""

    task: Annotated[str, OWN_DATA] = "path"
    """A built-in task: path (routes in a graph), addition, arithmetic, countdown, instructions; reasoning_gym/NAME, any
    task of reasoning-gym; or a benchmark as published: gsm8k, math500, aime24, aime25, amc23, olympiadbench,
    minerva_math. Not used with `data` of your own."""
    task_args: Annotated[Mapping, OWN_DATA] = field(default_factory=dict)
    """Parameters of the built-in task, such as '{max_terms: 4}'; the configuration of a task of reasoning-gym."""
    data: tuple[str, ...] = ()
    """Files (JSONL, CSV, Parquet), or one data set of the hub, such as `owner/name`, `owner/name:configuration` or
    `owner/name[split]`; without a split it is train. None: a benchmark's."""
    eval_data: tuple[str, ...] = ()
    """Files or a data set, as `data` (its split test), that held-out accuracy is measured on. None: a share of `data`;
    of gsm8k from the hub, its test split."""
    where: Mapping = field(default_factory=dict)
    """Rows to keep, by the values of columns, such as '{level: [4, 5]}'; in `data` only."""
    prompt_column: Annotated[str, BENCHMARK_PROMPT, GENERATED_PROMPT] = "prompt"
    """Column that holds the prompt, of sft_data too: text, or messages for the chat template."""
    answer_column: Annotated[str, BENCHMARK, GENERATED] = "answer"
    """Column that holds the reference answer."""
    prompt_template: str = ""
    """What is asked; {prompt} stands for the prompt column. Empty: {prompt} alone; of a benchmark, the question and a
    request to reason and to put the answer in \\boxed{}."""
    max_prompt_length: Annotated[int, Range(0)] = 0
    """Leave out problems with longer prompts, in tokens; 0: none."""
    heldout_fraction: Annotated[float, GENERATED, OWN_TEST] = 0.1
    """Share of `data` that is held out where there is no `eval_data`, chosen by a hash of the prompt."""
    rewards: tuple[str, ...] = ()
    """Summed: task (a built-in task's own), math, exact (same text), numeric (same last number), format (a closed
    \\boxed{}), length (words), package.module.function or file.py:function; `@0.5` after one is its weight. None: task;
    of a benchmark, math; of `data`, numeric."""
    on_reward_error: Literal["raise", "mask"] = "raise"
    """What a reward that fails, hangs or returns no number does: end the run, or leave its completions out."""
    reward_seconds: Annotated[float, Range(0.001)] = 60.0
    """Longest time for one call of your own reward on one batch."""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling. The policy is sampled as it is: no top-k, no top-p, so that log-probabilities are the sampler's."""

    prompts_per_step: Annotated[int, Range(2)] = 64
    """Prompts a step (P). Completions a step are P x G."""
    num_generations: Annotated[int, Range(1)] = 4
    """Completions a prompt (G)."""
    dynamic_sampling: Annotated[int, Range(0)] = 0
    """DAPO's: drop prompts whose completions have all earned the same, and sample others until prompts_per_step are
    full, in at most so many rounds a step. Changes the objective; 0: off."""
    max_completion_length: Annotated[int, Range(1)] = 512
    """Longest completion, in tokens; longer ones are cut and judged as they stand."""
    temperature: Annotated[float, Range(0.001)] = 1.0
    """Sampling temperature; the policy that is trained is the one at this temperature."""
    prompts_per_micro_batch: Annotated[int, Range(0), MAY_CHANGE] = 0
    """Prompts whose completions are trained on at a time; 0: all. Changes memory; and what `oblr_shrunk` knows of other
    prompts: those of earlier micro-batches only."""
    tokens_per_micro_batch: Annotated[int, Range(0), MAY_CHANGE] = 0
    """Tokens (padding included) that are trained on at a time, in whole groups sorted by length; 0: no bound. What
    `oblr_shrunk` knows of other prompts is then from earlier steps only."""
    sampler: Literal["transformers", "vllm"] = "transformers"
    """What samples: the policy itself, or a vLLM engine beside it on its GPU (extra vllm)."""
    sampler_correction: str = "auto"
    """What is done about a sampler whose probabilities are not the trainer's. truncated: each completion is weighed by
    min(C, pi / sampler) with C = 3; truncated:2, another C; untruncated: by pi / sampler; measured: nothing, but the
    difference is measured, as it is with all of these. auto: truncated with vllm, and nothing with transformers."""
    vllm_args: Annotated[Mapping, Holds(VLLM), NO_VLLM] = field(default_factory=dict)
    """Settings of the vLLM engine, such as '{gpu_memory_utilization: 0.3, max_model_len: 4096, dtype: bfloat16}'."""

    @property
    def clip_max(self) -> float | None:
        """The C of the weights min(C, pi / sampler), infinite where none is truncated; None: no weights are taken.

        Raises:
            InputError: `sampler_correction` is none of those that there are.
        """
        name, colon, number = self.sampler_correction.partition(":")
        if name not in CORRECTIONS or (colon and name != "truncated"):
            raise InputError(
                f"unknown sampler_correction {self.sampler_correction!r}; choose one of: {', '.join(CORRECTIONS)}, or "
                f"truncated:C with a number C.{lost('sampler_correction', self.sampler_correction)}"
            )
        if not colon:
            return CORRECTIONS[name]
        clip_max = float(number) if re.fullmatch(r"\d+(\.\d+)?", number) else math.nan
        if not clip_max >= 1:
            raise InputError(
                f"sampler_correction is {self.sampler_correction}; its C must be a number of at least 1: below, it "
                "would cut weights that need no correction."
            )
        return clip_max

    @property
    def vllm(self) -> VLLM:
        """Settings of the vLLM engine.

        Raises:
            InputError: an unknown key or a value of the wrong type.
        """
        return of_mapping(VLLM, self.vllm_args, "vllm_args")


@dataclass(frozen=True)
class AlgorithmConfig:
    """The gradient estimator. `algorithm` names a row of the table; the three below replace one of its entries."""

    algorithm: str = "oblrpo_shrunk"
    """oblrpo, oblrpo_shrunk, rloo, grpo, dr_grpo, reinforce, reinforce_pp, opo, vcpo or js."""
    baseline: str = ""
    """none, mean, rloo, grpo, dr_grpo, reinforce_pp, js, oblr (variance-optimal, leave-one-out), oblr_shrunk (the same,
    shrunk towards other prompts), opo, eob or vcpo."""
    normalisation: str = ""
    """What advantages are divided by: none, group_std, batch_std. Empty: the algorithm's, or that of `baseline`."""
    weighting: str = ""
    """How the loss weighs an output's tokens: sequence, sequence_mean, token_mean, constant. Empty: the algorithm's."""
    beta: Annotated[float, Range(0)] = 0.0
    """What a nat of log(pi / pi_ref) of a completion costs in reward, pi_ref being the policy before the first step; 0:
    nothing, and no reference is kept."""
    train_on: str = "exact"
    """Which completions the gradient is taken of: exact (all but those known to add 0), all; or compute-optimal (drawn
    by their pull and weighed, so that variance times work is least)."""
    num_iterations: Annotated[int, Range(1)] = 1
    """Updates on each batch of completions; what those after the first are weighed by is the `ratio`."""
    ratio: Annotated[str, ONE_UPDATE] = ""
    """Weight of scores in updates after the first: sequence (importance weight of the completion), ppo (by token,
    clipped), gspo (by completion, clipped), cispo (by token, truncated), dppo (by token, masked), none. Empty:
    algorithm's."""
    epsilon: Annotated[float | None, Range(0), ONE_UPDATE] = None
    """How far a ratio may fall before ppo, gspo and dppo clip it. None: 0.2, 0.0003 and 0.15, as published."""
    epsilon_high: Annotated[float | None, Range(0), ONE_UPDATE] = None
    """How far it may rise, and where cispo truncates it. None: epsilon, or as published 0.2, 0.0004, 0.15, cispo 5."""


@dataclass(frozen=True)
class ScoresConfig:
    """How one backward gives squared score norms and the gradient, and what weighs rewards in the baseline."""

    score_method: str = "auto"
    """What is kept of a backward for norms and gradient, all exact: auto, gram, instantiate, or two_pass (nothing)."""
    score_norms: str = "exact"
    """Weights of rewards in oblr baselines: exact (norms by score_method) or a proxy without norms: length, length16,
    logit, calibrated (a regression on exact norms of earlier steps)."""
    calibration_steps: Annotated[int, Range(0)] = 10
    """Every so many steps exact norms and proxies are both taken: their agreement is logged, `calibrated` learns, and a
    baseline without weights shows its norms. 0: never."""
    ledger_steps: Annotated[int, Range(0)] = 50
    """Take the variance ledger, the gradient's variance under every baseline, in step 1 and every so many steps, at the
    cost of about four gradients. 0: never."""


@dataclass(frozen=True)
class OptimConfig:
    """The update and its learning rate."""

    optimizer: str = "AdamW"
    """A class of torch.optim, such as SGD or AdamW; or (extra optimizers) Prodigy, AdamWScheduleFree and its kin."""
    learning_rate: Annotated[float, Range(0, 1e30)] = 1e-6
    """eta_0, the rate before the schedule's factor; with schedule auto only where the rate starts."""
    optimizer_args: Mapping = field(default_factory=dict)
    """Further arguments of the optimizer, such as '{momentum: 0.9}'. Weights decay only if weight_decay is here."""
    schedule: str = ""
    """Factor on the rate: debiased (signal-to-noise ratio), plugin (the same, biased), auto, kl (measured from
    learning_rate on), ess (effective sample size), off. Empty: algorithm's."""
    schedule_kl: float | None = None
    """Nats: what all steps of schedule auto scale with (None: 1), or the target of schedule kl (None: 0.02)."""
    warmup_steps: Annotated[int, Range(0)] = 0
    """Steps over which the rate grows linearly to its full value."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How eta_0 itself changes over the run."""
    max_grad_norm: Annotated[float, Range(0)] = 0.0
    """Clip the gradient to this norm after it was measured; 0: never."""


@dataclass(frozen=True)
class RunConfig:
    """The run."""

    output: Annotated[str, MAY_CHANGE] = "runs/latest"
    """Folder for everything the run leaves behind; must be new, or hold the run to `--resume`."""
    steps: Annotated[int, Range(0), MAY_CHANGE] = 100
    """RL steps."""
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] = 0
    """Seeds the weights, the prompts and the sampling."""
    eval_steps: Annotated[int, Range(0)] = 10
    """Measure held-out accuracy every so many steps (and before and after); 0: only before and after."""
    eval_prompts: Annotated[int, Range(2)] = 128
    """Held-out prompts; they are never trained on."""
    eval_samples: Annotated[int, Range(1)] = 4
    """Completions for each of them, sampled as in training."""
    save_steps: Annotated[int, Range(0), MAY_CHANGE] = 1
    """Write a checkpoint every so many steps. A killed run loses what came after the last one."""
    save_total_limit: Annotated[int, Range(1), MAY_CHANGE] = 2
    """The newest checkpoints kept; beside them the one of the highest held-out accuracy is."""
    stop_on_collapse: Annotated[bool, MAY_CHANGE] = False
    """Stop when rewards fall, or entropy or length shrink, as the warnings of a collapse have it."""
    threads: Annotated[int, Range(0, 1024), MAY_CHANGE] = 0
    """CPU threads for torch. 0: one for models under 5 M parameters, which are faster so, else all cores."""
    report_to: Annotated[tuple[str, ...], MAY_CHANGE] = ()
    """Send metrics to tensorboard, wandb, trackio, too (an extra each). Nothing leaves the machine unless the
    environment says so: WANDB_MODE=online, TRACKIO_SPACE_ID."""
    project: Annotated[str, MAY_CHANGE, NO_PROJECTS] = "oblrpo"
    """Project of wandb and trackio that the run is in."""


@dataclass(frozen=True)
class TrainConfig:
    """Post-train a language model with reinforcement learning on verifiable rewards."""

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE|FILE]")] = ""
    """A built-in recipe (demo) or a YAML file of settings; flags override it. A resumed run keeps its own."""
    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    scores: ScoresConfig = field(default_factory=ScoresConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
