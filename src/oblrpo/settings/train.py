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
    """LoRA adapters, through PEFT, which alone are trained, such as '{r: 16, alpha: 32, target_modules: [q_proj,
    v_proj]}'. None: all weights are trained."""
    load_in_4bit: bool = False
    """Keep the model under the adapters in 4 bits (NF4), through bitsandbytes: QLoRA."""
    model_args: Annotated[Mapping, Holds(Sizes), LOADED] = field(default_factory=dict)
    """Sizes of a policy that is built, such as '{hidden_size: 128, num_hidden_layers: 4}'."""

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
    """Files or a data set of the hub, as `data`, to learn from before RL, such as shown.jsonl: the columns are
    `prompt_column` and `completion`, which is text, or one message of the assistant. None: demonstrations of the
    built-in task, if warm_start_steps is set."""
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
    """Task to learn where there is no `data`. A built-in one: path (routes in a graph) or arithmetic;
    reasoning_gym/NAME, any task of reasoning-gym; file.py:Class, one of your own; or a benchmark as published: gsm8k,
    math500, aime24, aime25, amc23, olympiadbench, minerva_math."""
    task_args: Annotated[Mapping, OWN_DATA] = field(default_factory=dict)
    """Parameters of the task, such as '{max_nodes: 5}', or the configuration of a task of reasoning-gym."""
    data: tuple[str, ...] = ()
    """Problems to train on: files (JSONL, CSV, TSV, Parquet, Arrow), or one data set of the hub, such as `owner/name`,
    `owner/name:configuration` or `owner/name[split]`; the default split is train. None: those of the task."""
    eval_data: tuple[str, ...] = ()
    """Problems that held-out accuracy is measured on: files or a data set, as `data`, such as test.jsonl; the default
    split is test. None: a share of `data`; for gsm8k from the hub, its test split."""
    prompt_template: str = ""
    """Template of the prompt, in which {prompt} stands for the prompt column, such as 'Q: {prompt} A:'. Empty: {prompt}
    alone; of a benchmark, the question and a request to reason and to put the answer in \\boxed{}."""
    max_prompt_length: Annotated[int, Range(0)] = 0
    """Longest prompt, in tokens; problems with longer ones are left out. 0: no limit."""
    heldout_fraction: Annotated[float, GENERATED, OWN_TEST, ADJUSTABLE] = 0.1
    """Share of `data` that is held out where there is no `eval_data`, chosen by a hash of the prompt. Not set: more if
    fewer than two prompts, or than eval_prompts, would be held out; less if too few were left for prompts_per_step."""


@dataclass(frozen=True)
class RolloutConfig(SamplerConfig):
    """Sampling. The policy itself is sampled, without top-k or top-p: trainer and sampler agree on probabilities."""

    prompts_per_step: Annotated[int, Range(2), ADJUSTABLE] = 64
    """Prompts per step (P); a step has P x G completions. Not set: at most as many as there are."""
    num_generations: Annotated[int, Range(1)] = 4
    """Completions per prompt (G)."""
    dynamic_sampling: Annotated[int, Range(0)] = 0
    """Most rounds of DAPO's dynamic sampling in a step: prompts whose completions all got the same reward are dropped,
    and others are sampled until there are prompts_per_step. It changes the objective. 0: off."""
    max_completion_length: Annotated[int, Range(1), ADJUSTABLE] = 512
    """Longest completion, in tokens; longer ones are truncated and scored as they are. Not set: 64 for a policy that is
    built, without a warm start; at most what prompts leave of the model's context."""
    temperature: Annotated[float, Range(0.001)] = 1.0
    """Sampling temperature; the policy is trained at this temperature."""
    prompts_per_micro_batch: Annotated[int, Range(0), MAY_CHANGE] = 0
    """Most completions of a micro-batch, counted in prompts. 0: all. It changes the memory needed."""
    tokens_per_micro_batch: Annotated[int, Range(0), MAY_CHANGE, ADJUSTABLE] = 0
    """Tokens per micro-batch, padding included, in completions sorted by length; a look takes complete groups. 0: no
    limit."""
    sampler_correction: str = "auto"
    """Correction for a sampler whose probabilities are not the trainer's. truncated: each completion is weighted by
    min(C, pi / sampler) with C = 3; truncated:2, another C; untruncated: by pi / sampler; measured: the difference
    is only measured, as it is with all of these. auto: truncated with vllm, and nothing with transformers."""

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
    leave-one-out), oblr_shrunk (the same, shrunk towards other prompts), oblr_lazy (the same, but the others' reward
    where they agree), oblr_thrifty (so where it costs less), opo, eob, vcpo, or a function of yours as
    file.py:function. Empty: the algorithm's."""
    normalisation: str = ""
    """Divisor of advantages: none, group_std, batch_std. Empty: the algorithm's, or that of `baseline`."""
    weighting: str = ""
    """Weights of tokens in the loss: sequence, sequence_mean, token_mean, constant. Empty: the algorithm's."""
    reward_clip: Annotated[float, Range(0)] = 0.0
    """Largest size of a reward that is learned from, such as 1.0; what lies further from 0 is taken for it. Metrics
    show rewards as they were. 0: no limit."""
    beta: Annotated[float, Range(0)] = 0.0
    """KL penalty: price in reward per nat of log(pi / pi_ref) of a completion, pi_ref being the policy before the first
    step. 0: none, and no reference is kept."""
    num_iterations: Annotated[int, Range(1)] = 1
    """Updates on each batch of completions; the `ratio` weighs those after the first."""
    ratio: Annotated[str, ONE_UPDATE] = ""
    """Weight of scores in updates after the first: sequence (importance weight of the completion), ppo (by token,
    clipped), gspo (by completion, clipped), cispo (by token, truncated), dppo (by token, masked), none. Empty:
    algorithm's."""
    epsilon: Annotated[float | None, Range(0), ONE_UPDATE] = None
    """Bound below 1 at which ppo, gspo and dppo clip a ratio, as a distance, such as 0.2. None: as published 0.2,
    0.0003, 0.15."""
    epsilon_high: Annotated[float | None, Range(0), ONE_UPDATE] = None
    """Bound above 1 at which they clip it, and at which cispo truncates it, such as 0.28. None: epsilon, or as
    published 0.2, 0.0004, 0.15, cispo 5."""


@dataclass(frozen=True)
class ScoresConfig:
    """How often exact scores are looked at, and what weighs rewards in the baseline where they are not."""

    look_steps: Annotated[int | None, Range(0)] = None
    """Steps between looks, which take exact scores and their norms; the first five steps have one each. 1: every step
    looks at all prompts, as in the paper; else at as many as 2 % of the run's work pays for. 0: none does. None: 10, or
    1 with a schedule that needs it (debiased, plugin)."""
    score_norms: Literal["calibrated", "length", "logit"] = "calibrated"
    """Weights of rewards in oblr baselines: calibrated (exact norms if all prompts were looked at, else a regression on
    those of earlier looks), or always a proxy: length, logit."""
    ledger_steps: Annotated[int | None, Range(0)] = None
    """Steps between ledgers, besides that of step 1: the variance of the gradient under every baseline, at the cost of
    about two steps. 0: none. None: whenever 2 % of the run's work pays for one."""


@dataclass(frozen=True)
class OptimConfig:
    """The update and its learning rate."""

    optimizer: str = "AdamW"
    """Optimizer, a class of torch.optim, such as SGD or AdamW; or (extra optimizers) Prodigy, AdamWScheduleFree and
    its kin."""
    learning_rate: Annotated[float, Range(0, 1e30)] = 1e-6
    """Learning rate; with the measured rate only that of the first update, whose length is then measured and set."""
    optimizer_args: Mapping = field(default_factory=dict)
    """Further arguments of the optimizer, such as '{momentum: 0.9}'. There is no weight decay unless weight_decay is
    given here."""
    schedule: str = ""
    """Factor on the rate: debiased (signal-to-noise ratio), plugin (the same, biased), auto, kl (measured from
    learning_rate on), ess (effective sample size), off. Empty: algorithm's."""
    schedule_kl: float | None = None
    """How far a step may move the policy with all its updates, in nats per completion. Schedule auto goes no further
    (None: 0.5); kl aims at it with every update (None: 0.02)."""
    warmup_steps: Annotated[int, Range(0)] = 0
    """Steps over which the rate grows linearly to its full value."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate over the run."""
    max_grad_norm: Annotated[float, Range(0)] = 0.0
    """Largest norm of the gradient, which is clipped after it was measured, such as 1.0. 0: no limit."""


@dataclass(frozen=True)
class RunConfig:
    """The run."""

    output: Annotated[str, MAY_CHANGE] = "runs/latest"
    """Folder that the run writes to, such as runs/mine; it must be new, or contain the run to `--resume`."""
    steps: Annotated[int, Range(0), MAY_CHANGE] = 100
    """Number of RL steps (0: held-out accuracy alone). With 0 a run is its warm start, if it has one, held-out accuracy
    and a checkpoint."""
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] = 0
    """Seed of the weights, the prompts and the sampling."""
    eval_steps: Annotated[int, Range(0)] = 10
    """Steps between measurements of held-out accuracy, which is also measured before and after the run. 0: only
    then."""
    eval_prompts: Annotated[int, Range(2), ADJUSTABLE] = 128
    """Number of held-out prompts; they are never trained on. Not set: at most as many as there are."""
    eval_samples: Annotated[int, Range(1)] = 4
    """Completions of each held-out prompt, sampled as in training."""
    save_steps: Annotated[int | None, Range(0), MAY_CHANGE] = None
    """Steps between checkpoints. A killed run loses what came after the last one. 0: only before the first step and
    after the last. None: these, one at each new best held-out accuracy, and as many others as take 2 % of the run's
    time."""
    save_total_limit: Annotated[int, Range(1), MAY_CHANGE] = 2
    """Number of newest checkpoints that are kept, besides the one with the highest held-out accuracy."""
    stop_on_collapse: Annotated[bool, MAY_CHANGE] = False
    """Stop when the reward falls, every completion of five steps gets the same reward without the task being solved, or
    entropy or length collapses, as `oblrpo diagnose` finds them."""
    threads: Annotated[int, Range(0, 1024), MAY_CHANGE] = 0
    """CPU threads for torch. 0: one for models under 5 M parameters, which is faster, else one per core."""
    report_to: Annotated[tuple[str, ...], MAY_CHANGE] = ()
    """Trackers to send metrics to, such as tensorboard; or wandb, trackio (an extra each). Nothing leaves the
    machine unless the environment says so: WANDB_MODE=online, TRACKIO_SPACE_ID."""
    log_completions: Annotated[bool, MAY_CHANGE, NO_PROJECTS] = False
    """Send every step's completions to wandb and trackio, as a table with rewards and advantages."""
    project: Annotated[str, MAY_CHANGE, NO_PROJECTS] = "oblrpo"
    """Project of the run in wandb and trackio, such as sums."""


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
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    scores: ScoresConfig = field(default_factory=ScoresConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
