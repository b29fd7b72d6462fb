"""Every setting of `oblrpo train` with its default. Names of fields are the flags and the YAML keys."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from oblrpo.errors import InputError
from oblrpo.settings.annotations import (
    ADJUSTABLE,
    GENERATED,
    LOADED,
    MAY_CHANGE,
    NO_PROJECTS,
    NO_TOOLS,
    NO_WARM_START,
    ONE_UPDATE,
    OWN_DATA,
    OWN_TEST,
    Holds,
    Mapping,
    Positional,
    Range,
)
from oblrpo.settings.mappings import LoRA, Sizes, WarmStart
from oblrpo.settings.shared import GradingConfig, ModelConfig, RowsConfig, SamplerConfig
from oblrpo.settings.typed import of_mapping

CORRECTIONS = {"auto": 3.0, "truncated": 3.0, "untruncated": math.inf, "measured": None}
"""What `sampler_correction` may be -> the C of min(C, pi / sampler); None: no weights are taken."""


@dataclass(frozen=True)
class PolicyConfig(ModelConfig):
    """The policy: a causal LM with its tokenizer, loaded, or built with random weights and a tokenizer of bytes."""

    model: str = ""
    """Model to train: a folder, a GGUF file or a name on the hub, such as Qwen/Qwen3-0.6B. Empty: a small Qwen3
    policy is built."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward instead of keeping them."""
    lora: Annotated[Mapping, Holds(LoRA)] = field(default_factory=dict)
    """LoRA adapters (by PEFT) to train instead of the weights, such as '{r: 16, alpha: 32, target_modules: [q_proj,
    v_proj]}'. None: all weights are trained."""
    load_in_4bit: bool = False
    """Load the model under the adapters in 4 bits (NF4, by bitsandbytes): QLoRA."""
    model_args: Annotated[Mapping, Holds(Sizes), LOADED] = field(default_factory=dict)
    """Sizes of a newly built policy, such as '{hidden_size: 128, num_hidden_layers: 4}'."""

    @property
    def sizes(self) -> Sizes:
        """The sizes of a policy that is built."""
        return of_mapping(Sizes, self.model_args, "model_args")

    @property
    def adapters(self) -> LoRA:
        """The adapters that are made; of rank 0 where there are none."""
        return of_mapping(LoRA, self.lora, "lora")


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised learning before RL: on rows of prompt and completion, or on the task's own noisy demonstrations."""

    sft_data: tuple[str, ...] = ()
    """Files or a data set of the hub, as in `data`, to learn from before RL, such as shown.jsonl. Its columns are
    `prompt_column` and `completion`, which is text or messages, such as calls of tools with their results. None:
    demonstrations of the built-in task, if warm_start_steps is set."""
    warm_start_steps: Annotated[int, Range(0), ADJUSTABLE] = 0
    """Gradient steps of supervised learning. 0: one epoch of sft_data, or none without it."""
    warm_start_args: Annotated[Mapping, Holds(WarmStart), NO_WARM_START] = field(default_factory=dict)
    """Settings of the supervised learning, such as '{batch: 16, learning_rate: 1e-4, noise: 0.05}'."""

    @property
    def begins(self) -> bool:
        """Whether the run begins with supervised learning."""
        return bool(self.sft_data or self.warm_start_steps)

    @property
    def learning(self) -> WarmStart:
        """How it learns."""
        return of_mapping(WarmStart, self.warm_start_args, "warm_start_args")


@dataclass(frozen=True)
class TaskConfig(RowsConfig, GradingConfig):
    """The problems and what verifies them."""

    task: Annotated[str, OWN_DATA] = "path"
    """Task to learn if there is no `data`. A built-in one: path (routes in a graph) or arithmetic;
    reasoning_gym/NAME, any task of reasoning-gym; file.py:Class, your own; or a published benchmark: gsm8k,
    math500, aime24, aime25, amc23, olympiadbench, minerva_math."""
    task_args: Annotated[Mapping, OWN_DATA] = field(default_factory=dict)
    """Parameters of the task, such as '{max_nodes: 5}', or the configuration of a task of reasoning-gym."""
    data: tuple[str, ...] = ()
    """Problems to train on: files (JSONL, CSV, TSV, Parquet, Arrow), or one data set of the hub, such as `owner/name`,
    `owner/name:configuration` or `owner/name[split]`; the default split is train. None: those of the task."""
    eval_data: tuple[str, ...] = ()
    """Problems for measuring held-out accuracy: files or a data set, as in `data`, such as test.jsonl; the default
    split is test. None: a share of `data`; for gsm8k from the hub, its test split."""
    prompt_template: str = ""
    """Template of the prompt, in which {prompt} stands for the prompt column, such as 'Q: {prompt} A:'. Empty: {prompt}
    alone; for a benchmark, the question and a request to reason and to put the answer in \\boxed{}."""
    max_prompt_length: Annotated[int, Range(0)] = 0
    """Longest prompt, in tokens; problems with longer prompts are left out. 0: no limit."""
    heldout_fraction: Annotated[float, GENERATED, OWN_TEST, ADJUSTABLE] = 0.1
    """Share of `data` that is held out if there is no `eval_data`, chosen by a hash of the prompt. Not set: more if
    fewer than two prompts, or eval_prompts, would be held out; less if too few would be left for prompts_per_step."""


@dataclass(frozen=True)
class TurnsConfig:
    """Environments and tools, which the policy acts in over several turns."""

    environment: str = ""
    """Class of the environment, as file.py:Class: its public methods are tools, reset(**row) begins an episode, and
    get_reward(), if there is one, rewards it, as in TRL (docs/environments.md). Empty: none."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call, as file.py:function, with type hints and a docstring."""
    max_turns: Annotated[int, Range(2), NO_TOOLS] = 8
    """Most turns of the policy in an episode; the calls of the last are not made."""
    tool_seconds: Annotated[float, Range(0.001), NO_TOOLS] = 10.0
    """Time limit for one call of a tool, in seconds; the policy reads that it was exceeded."""
    episode_seconds: Annotated[float, Range(0.001), NO_TOOLS] = 300.0
    """Time limit for all calls of an episode together, in seconds; it ends with the call that exceeds it."""
    max_tool_response_length: Annotated[int, Range(1), NO_TOOLS] = 2000
    """Most characters of a result that the policy reads; what is beyond is cut off, and the result says so."""

    @property
    def names(self) -> tuple[str, ...]:
        """The environment and all tools."""
        return tuple(filter(None, (self.environment, *self.tools)))


@dataclass(frozen=True)
class RolloutConfig(SamplerConfig):
    """Sampling. The policy itself is sampled, without top-k or top-p: trainer and sampler agree on probabilities."""

    prompts_per_step: Annotated[int, Range(2), ADJUSTABLE] = 64
    """Prompts per step (P); a step has P x G completions. Not set: at most as many as there are."""
    num_generations: Annotated[int, Range(1)] = 4
    """Completions per prompt (G)."""
    dynamic_sampling: Annotated[int, Range(0)] = 0
    """Most rounds of DAPO's dynamic sampling in a step: prompts whose completions all got the same reward are dropped,
    and others are sampled until there are prompts_per_step. This changes the objective. 0: off."""
    max_completion_length: Annotated[int, Range(1), ADJUSTABLE] = 512
    """Longest completion, in tokens; longer ones are truncated and scored as they are. Not set: 64 for a newly
    built policy without a warm start; at most what prompts leave of the model's context."""
    temperature: Annotated[float, Range(0.001)] = 1.0
    """Sampling temperature; the policy is trained at this temperature."""
    prompts_per_micro_batch: Annotated[int, Range(0), MAY_CHANGE] = 0
    """Largest micro-batch, counted in prompts with all their completions. 0: all. It changes the memory needed."""
    tokens_per_micro_batch: Annotated[int, Range(0), MAY_CHANGE, ADJUSTABLE] = 0
    """Most tokens per micro-batch, padding included; completions are sorted by length. A look takes complete groups.
    0: no limit."""
    sampler_correction: str = "auto"
    """Correction for a sampler whose probabilities differ from the trainer's. truncated: each completion is weighted by
    min(C, pi / sampler) with C = 3; truncated:2: another C; untruncated: by pi / sampler; measured: no weights. The
    difference is measured with all of these. auto: truncated with vllm, and nothing with transformers."""

    @property
    def clip_max(self) -> float | None:
        """The C of the weights min(C, pi / sampler), infinite where none is truncated; None: no weights are taken."""
        name, colon, number = self.sampler_correction.partition(":")
        if name not in CORRECTIONS or (colon and name != "truncated"):
            raise InputError(
                f"unknown sampler_correction {self.sampler_correction!r}; choose one of: {', '.join(CORRECTIONS)}, or "
                f"truncated:C with a number C."
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


@dataclass(frozen=True)
class AlgorithmConfig:
    """The gradient estimator. `algorithm` names a row of the table; the three below replace one of its entries."""

    algorithm: str = "oblrpo_thrifty"
    """Algorithm: oblrpo, oblrpo_shrunk, oblrpo_lazy, oblrpo_thrifty, rloo, grpo, dr_grpo, reinforce, reinforce_pp, opo,
    vcpo or js."""
    baseline: str = ""
    """Baseline subtracted from rewards: none, mean, rloo, grpo, dr_grpo, reinforce_pp, js, oblr (variance-optimal,
    leave-one-out), oblr_shrunk (oblr shrunk towards other prompts), oblr_lazy (oblr_shrunk, but the others' reward
    where they agree), oblr_thrifty (oblr_lazy where that costs less), opo, eob, vcpo, or your own function as
    file.py:function. Empty: the algorithm's."""
    normalisation: str = ""
    """Divisor of advantages: none, group_std, batch_std. Empty: the algorithm's, or that of `baseline`."""
    weighting: str = ""
    """Weights of tokens in the loss: sequence, sequence_mean, token_mean, constant. Empty: the algorithm's."""
    reward_clip: Annotated[float, Range(0)] = 0.0
    """Largest absolute reward that is learned from, such as 1.0; rewards further from 0 are clipped to it. Metrics
    show rewards unclipped. 0: no limit."""
    beta: Annotated[float, Range(0)] = 0.0
    """KL penalty: reward taken off per nat of a completion's log(pi / pi_ref), where pi_ref is the policy before the
    first step. 0: none, and no reference is kept."""
    num_iterations: Annotated[int, Range(1)] = 1
    """Updates on each batch of completions; `ratio` weights those after the first."""
    ratio: Annotated[str, ONE_UPDATE] = ""
    """Weight of scores in updates after the first: sequence (importance weight of the completion), ppo (by token,
    clipped), gspo (by completion, clipped), cispo (by token, truncated), dppo (by token, masked), none. Empty:
    algorithm's."""
    epsilon: Annotated[float | None, Range(0), ONE_UPDATE] = None
    """How far below 1 ppo, gspo and dppo clip a ratio, such as 0.2. None: as published: 0.2, 0.0003, 0.15."""
    epsilon_high: Annotated[float | None, Range(0), ONE_UPDATE] = None
    """How far above 1 ppo, gspo and dppo clip a ratio, such as 0.28; cispo truncates the ratio at it. None: epsilon, or
    as published: 0.2, 0.0004, 0.15, cispo 5."""


@dataclass(frozen=True)
class ScoresConfig:
    """How often exact scores are computed, and what weights rewards in the baseline in other steps."""

    look_steps: Annotated[int | None, Range(0)] = None
    """Steps between looks, which compute exact scores and their norms; each of the first five steps has one. 1: every
    step looks at all prompts, as in the paper; above 1: at as many prompts as 2 % of the run's work pays for. 0: no
    looks. None: 10, or 1 with a schedule that needs it (debiased, plugin)."""
    score_norms: Literal["calibrated", "length", "logit"] = "calibrated"
    """Weights of rewards in oblr baselines: calibrated (exact norms if all prompts were looked at, otherwise a
    regression on earlier looks), or always a proxy: length, logit."""
    ledger_steps: Annotated[int | None, Range(0)] = None
    """Steps between ledgers, after one in step 1: the variance of the gradient under every baseline, at the cost of
    about two steps. 0: none. None: whenever 2 % of the run's work pays for one."""


@dataclass(frozen=True)
class OptimConfig:
    """The update and its learning rate."""

    optimizer: str = "AdamW"
    """Optimizer: a class of torch.optim, such as SGD or AdamW; or (extra optimizers) Prodigy, AdamWScheduleFree,
    RAdamScheduleFree or SGDScheduleFree."""
    learning_rate: Annotated[float, Range(0, 1e30)] = 1e-6
    """Learning rate; with the measured rate only its starting point, which the first update replaces."""
    optimizer_args: Mapping = field(default_factory=dict)
    """Further arguments of the optimizer, such as '{momentum: 0.9}'. There is no weight decay unless weight_decay is
    set here."""
    schedule: str = ""
    """What sets the rate: debiased (signal-to-noise ratio), plugin (the same, biased), auto or kl (measured, starting
    from learning_rate), ess (effective sample size), off. Empty: the algorithm's."""
    schedule_kl: float | None = None
    """How far a step, with all its updates, may move the policy, in nats per completion. Schedule auto goes no further
    (None: 0.5); kl aims at this with every update (None: 0.02)."""
    warmup_steps: Annotated[int, Range(0)] = 0
    """Steps over which the rate grows linearly to its full value."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate over the run."""
    max_grad_norm: Annotated[float, Range(0)] = 0.0
    """Largest norm of the gradient, such as 1.0; it is clipped after it was measured. 0: no limit."""


@dataclass(frozen=True)
class RunConfig:
    """The run."""

    output: Annotated[str, MAY_CHANGE] = "runs/latest"
    """Folder that the run writes to, such as runs/mine; it must be new, or hold the run to `--resume`."""
    steps: Annotated[int, Range(0), MAY_CHANGE] = 100
    """Number of RL steps (0: held-out accuracy alone). With 0 a run is its warm start, if it has one, held-out accuracy
    and a checkpoint."""
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] = 0
    """Seed of the weights, the prompts and the sampling."""
    eval_steps: Annotated[int, Range(0)] = 10
    """Steps between measurements of held-out accuracy, which is also measured before and after the run. 0: only before
    and after."""
    eval_prompts: Annotated[int, Range(2), ADJUSTABLE] = 128
    """Number of held-out prompts; they are never trained on. Not set: at most as many as there are."""
    eval_samples: Annotated[int, Range(1)] = 4
    """Completions of each held-out prompt, sampled as in training."""
    save_steps: Annotated[int | None, Range(0), MAY_CHANGE] = None
    """Steps between checkpoints. A killed run loses what came after the last one. 0: only before the first step and
    after the last. None: these two, one at each new best held-out accuracy, and as many more as 2 % of the run's time
    allows."""
    save_total_limit: Annotated[int, Range(1), MAY_CHANGE] = 2
    """Number of newest checkpoints to keep, besides the one with the highest held-out accuracy."""
    stop_on_collapse: Annotated[bool, MAY_CHANGE] = False
    """Stop when `oblrpo diagnose` would find that the reward fell, that every completion of five steps got the same
    reward though the task is not solved, or that entropy or length collapsed."""
    threads: Annotated[int, Range(0, 1024), MAY_CHANGE] = 0
    """CPU threads for torch. 0: one for models under 5 M parameters, which is faster, otherwise one per core."""
    report_to: Annotated[tuple[str, ...], MAY_CHANGE] = ()
    """Trackers to send metrics to: tensorboard, wandb or trackio (each needs its extra). Nothing leaves the
    machine unless the environment says so: WANDB_MODE=online, TRACKIO_SPACE_ID."""
    log_completions: Annotated[bool, MAY_CHANGE, NO_PROJECTS] = False
    """Also send every step's completions to wandb and trackio, as a table with rewards and advantages."""
    project: Annotated[str, MAY_CHANGE, NO_PROJECTS] = "oblrpo"
    """Name of the project in wandb and trackio, such as sums."""


@dataclass(frozen=True)
class TrainConfig:
    """Post-train a language model with reinforcement learning on verifiable rewards."""

    recipe: Annotated[str, Positional("[RECIPE|FILE]")] = ""
    """A built-in recipe (demo) or a YAML file of settings, which flags override. A resumed run keeps its own
    settings."""
    given: tuple[str, ...] = field(default=(), compare=False)
    """Settings by flag, keyword or a YAML file of one's own; a recipe's and defaults are not, and may be adjusted."""
    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    scores: ScoresConfig = field(default_factory=ScoresConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
