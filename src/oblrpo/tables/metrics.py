"""The metrics of a run, a row each, and the charts that a run's page draws from them. This imports nothing.

Whatever reads, draws or explains a metric reads these rows: a new one is one row. `docs/metrics.md` is written from it.
"""

from dataclasses import dataclass

TRL, ADDED, LEDGER = "yes", "added", "ledger"
"""In TRL: TRL logs it by the same name; `OBLRPOTrainer` adds it; `VarianceLedgerCallback` adds it, as it does the rows
for signal and noise."""

AVERAGED_STEPS = 9  # steps in the moving average of charts


@dataclass(frozen=True)
class Chart:
    """A chart of a run's page."""

    section: str  # the heading that it stands under
    title: str
    keys: str = ""  # metrics that it draws, separated by spaces; none where it is drawn from completions
    ylabel: str = ""
    note: str = ""  # how to read it, beside the title
    advice: str = ""  # what to do about it, in Markdown with links relative to docs/; not on the page
    kind: str = "course"
    """What draws it, a name of `report.curves.DRAWN`: the course of its only metric, or what one chart alone needs."""
    averaged: bool = False  # whether the course is a moving average, with the steps as dots
    logarithmic: bool = False  # whether the axis is logarithmic where values are far apart
    blank: float | None = None  # it is left out where every step has this value
    levels: tuple[tuple[float, str], ...] = ()  # dotted lines across it, and their names


@dataclass(frozen=True)
class Metric:
    """What is known of a metric, or of several with one meaning; NAME in a key stands for any name."""

    keys: str  # keys of `metrics.jsonl`, separated by spaces
    meaning: str  # what it is, in Markdown with links relative to docs/
    unit: str = ""
    when: str = ""  # when a step has it; empty where every step of RL does
    trl: str = ""  # `TRL`, `ADDED`, `LEDGER`, or TRL's own name for it; empty where there is none
    verl: str = ""  # its name in verl, of verl's own or of our adapter; empty where there is none
    others: str = ""
    """What further trainers call it, the best first, as `runs.log_rows.plain` writes names, separated by spaces."""
    ours: bool = True
    """Whether our own runs log it; the diagnosis reads the others from logs of other trainers."""


METRICS = (
    Metric("step", "optimizer steps on fresh completions so far", trl=TRL, verl="step",
           others="global_step _step global_step/max_steps current_steps iteration iter rollout perf metrics_step bar"),
    Metric("reward", "mean over the completions of the step that have a reward, without the penalty of `--beta`",
           "reward", trl=TRL, verl="critic/score/mean",
           others="critic/rewards/mean objective/scores mean_reward raw_reward avg_reward average_reward "
           "reward/avg_raw_reward loss/avg_raw_rewards task_reward final_reward total_rewards train_reward "
           "reward/overall env/all/reward/total env/reward mean_scores reward/evaluate_response/avg_total_reward rm "
           "rewards"),
    Metric("reward_stderr", "its standard error over prompts (completions of one prompt are not independent); `null` "
           "with rewards of fewer than two prompts", "reward"),
    Metric("reward_std", "standard deviation (G - 1) within a prompt's completions, mean over prompts with two rewards "
           "or more", "reward", trl=TRL, others="reward/std"),
    Metric("reward_min", "lowest reward", "reward", verl="critic/score/min", others="critic/rewards/min reward/min"),
    Metric("reward_max", "highest reward", "reward", verl="critic/score/max", others="critic/rewards/max reward/max"),
    Metric("reward_iqr", "interquartile range of all rewards: third minus first quartile", "reward"),
    Metric("rewards/NAME/mean rewards/NAME/std", "for each [reward](rewards.md), without its weight: mean and "
           "standard deviation (n - 1) over all completions of the step that it applies to. NAME is the function's "
           "name, with its path or options if two have the same name", "reward", trl=TRL),
    Metric("frac_reward_zero_std", "share of prompts with two rewards or more whose completions all earned the same; "
           "`null` with one completion a prompt", trl=TRL, others="zero_std_ratio frac_zero_std"),
    Metric("completions/mean_length", "the policy's own tokens, the end token included", "tokens", trl=TRL,
           verl="response_length/mean",
           others="response_length completion_length mean_length mean_completion_length response_lengths response_len "
           "generate/avg_num_tokens mean_generation_length mean_gen_tokens_per_sample seq_len seq_length "
           "val/sequence_lengths token/response_length mean_response_length avg_response_length completion_len gen_len "
           "glen tokens/responses_len episode/avg_response_tokens"),
    Metric("completions/clipped_ratio", "share of completions cut at `max_completion_length`", trl=TRL,
           verl="response_length/clip_ratio",
           others="clipped_ratio clipped_completions_ratio response_clip_ratio truncated_ratio is_truncated "
           "no_eos_ratios"),
    Metric("turns/mean", "turns of the policy in an episode", "turns", when="with an environment or tools"),
    Metric("tools/call_frequency", "calls of tools in an episode, mean over episodes", when="in the same runs",
           trl=TRL),
    Metric("tools/failure_frequency", "share of calls that returned an error, which the policy has read",
           when="in the same runs", trl=TRL),
    Metric("completions/masked_ratio", "share of completions whose reward is missing; they are left out wherever "
           "rewards are used", trl=ADDED),
    Metric("completions/distinct_ratio", "share of completions left if each text counts once", trl=ADDED),
    Metric("completions/commonest_ratio", "share of completions that are the commonest text", trl=ADDED),
    Metric("completions/commonest_token_ratio", "share of the commonest token among the policy's own tokens, without "
           "those that end completions", trl=ADDED),
    Metric("completions/same_ratio", "of the pairs of completions to prompts with different answers, the share that is "
           "the same text. Where no prompt has an answer, other columns stand for it, or the prompt; `null` where all "
           "answers are the same", trl=ADDED),
    Metric("completions/trained_ratio", "share of completions that went through the model a second time, for the "
           "gradient, because their advantage is not 0 ([which completions are trained on](selection.md))"),
    Metric("num_gen_batches", "batches of prompts that were sampled for the step. `reward`, metrics that begin "
           "with `reward_`, `frac_reward_zero_std` and `completions/masked_ratio` then describe all that was sampled, "
           "the others what was trained on", when="with [`--dynamic-sampling`](selection.md#dynamic-sampling)"),
    Metric("frac_prompts_masked", "share of prompts that took no part in the update, because too few of their "
           "completions have a reward; 1: no update was made, and its metrics are `null`"),
    Metric("entropy", "entropy of the distributions that completion tokens were drawn from, mean over tokens, as the "
           "sampler reports it", "nats", trl=TRL, verl="actor/entropy",
           others="entropy_loss policy_entropy approx_entropy objective/entropy"),
    Metric("kl", "mean of log(pi / pi_ref) over the completions' tokens, before the step's first update; [the penalty]"
           "(staying_near.md#a-kl-penalty) is `beta` times its sum over a completion. May be negative by chance",
           "nats a token", when="with `--beta`", trl=TRL, verl="actor/kl_loss",
           others="policy_kl kl_penalty kl_div kl_divergence mean_kl critic/kl reward_kl_penalty objective/kl"),
    Metric("loss", "the loss", trl=TRL, verl="actor/pg_loss",
           others="training_loss policy_loss act_loss actor_loss loss/policy total_loss pg",
           ours=False),
    Metric("clip_ratio/low_mean clip_ratio/high_mean", "share of tokens (`gspo`: of completions) that it leaves out "
           "because their probability fell under a negative advantage (low), or rose under a positive one (high). It "
           "is the mean over the step's updates; the first leaves out none",
           when="with several updates a batch and a ratio that [clips or masks]"
           "(staying_near.md#several-updates-a-batch)", trl=TRL),
    Metric("clip_ratio/region_mean", "low plus high", when="in the same runs", trl=TRL, verl="actor/pg_clipfrac",
           others="clip_ratio clipfrac clip_fraction ppo_clip_ratio ppo_ratio_clipfrac"),
    Metric("clip_ratio/low_min clip_ratio/high_max", "the smallest and the largest such share among completions",
           when="in the same runs", trl=TRL),
    Metric("cispo_clip_ratio", "share of tokens with a positive advantage and a truncated ratio",
           when="with the ratio `cispo`", trl=TRL),
    Metric("eval/accuracy", "mean reward over held-out prompts and `eval_samples` completions of each, sampled as in "
           "training", "reward", when="every `eval_steps` steps", trl="eval_reward",
           others="eval_reward eval/reward eval_accuracy"),
    Metric("eval/accuracy_stderr", "its standard error over prompts (completions of one prompt are not independent)",
           "reward", when="every `eval_steps` steps"),
    Metric("eval/swap_loss", "what the same completions lose when they are graded as answers to other prompts, with "
           "another answer: 0 if the reward is earned without reading the prompt", "reward",
           when="every `eval_steps` steps"),
    Metric("eval/swap_loss_stderr", "its standard error over prompts", "reward", when="every `eval_steps` steps"),
    Metric("eval/accuracy_before_warm_start eval/accuracy_stderr_before_warm_start", "the same before "
           "supervised learning", "reward", when="in step 0 of a loaded model that begins with [supervised learning]"
           "(data.md#supervised-learning-first)"),
    Metric("warm_start_loss", "loss of the last step of supervised learning, over the tokens of its completions",
           "nats a token", when="in step 0"),
    Metric("grad_norm", "norm of the batch gradient, before clipping", trl=TRL, verl="actor/grad_norm",
           others="gradient_norm raw_grad_norm total_grad_norm"),
    Metric("learning_rate", "the rate that the step used (of the first parameter group)", trl=TRL,
           verl="actor/lr_used", others="lr actor_lr act_lr policy_lr lr-pg_0"),
    Metric("lr_factor", "`learning_rate` over the optimizer's own rate eta_0: warm-up and schedule",
           trl=ADDED, verl="actor/lr_factor"),
    Metric("signal2", "this batch's estimate of the squared norm of the true gradient, [from its two halves]"
           "(noise.md#what-we-print): unbiased, but a little too high where prompts share a baseline; may be negative "
           "by chance", "grad²", trl=ADDED, verl="actor/signal2"),
    Metric("trace_cov", "this batch's estimate of N times the variance of its gradient. It is tr H, the variance "
           "of one prompt's gradient, except where [prompts can be counted](noise.md#where-prompts-can-be-counted)",
           "grad²", trl=ADDED, verl="actor/trace_cov"),
    Metric("snr", "signal over noise of one prompt, [averaged over the policies of the last steps]"
           "(noise.md#what-is-averaged); 0 in a step without a gradient", trl=ADDED, verl="actor/snr"),
    Metric("snr_low snr_high", "95 % interval of `snr`, for [the current policy](noise.md#what-is-averaged)",
           trl=ADDED),
    Metric("n_snr", "N SNR, the same for the whole batch: `snr` times its number of prompts "
           "([of which policy](noise.md#whose-noise-scale))", trl=ADDED, verl="actor/n_snr"),
    Metric("critical_batch_size", "1 / SNR, averaged like `snr`: the batch size at which half of the gradient's "
           "squared length is noise", "prompts", trl=ADDED, verl="actor/critical_batch_size"),
    Metric("score_norm2/mean", r"mean of w, the squared norm of grad log pi(o\|q) over all trained parameters, over "
           "the completions that were looked at", when="in steps that look", trl=ADDED,
           verl="critic/score_norm2/mean"),
    Metric("score_norm2/kappa", "mean w of the better-rewarded completions over that of the others",
           when="in steps that look", trl=ADDED, verl="critic/score_norm2/kappa"),
    Metric("score_norm2/agreement_length score_norm2/agreement_logit", "correlation of log proxy and log w within "
           "prompts", when="in steps that look", trl=ADDED),
    Metric("score_norm2/agreement_calibrated", "the same correlation for the calibrated proxy, before it has seen the "
           "batch", when="in steps that look", trl=ADDED, verl="critic/score_norm2/agreement_calibrated"),
    Metric("variance/NAME", "tr Cov of this batch's gradient, had its baseline been NAME (with the normalisation that "
           "goes with it)", "grad²", when="in steps of the [ledger](baselines.md#the-ledger)", trl=LEDGER,
           verl="critic/variance/NAME"),
    Metric("signal2/NAME", "estimate of the squared norm of the mean gradient with that baseline, [unbiased]"
           "(baselines.md#the-ledger) where the baseline uses its own prompt alone; may be negative by chance", "grad²",
           when="in steps of the ledger", trl=LEDGER, verl="critic/signal2/NAME"),
    Metric("variance_between_prompts", "the part of an unbiased baseline's variance that comes from drawing prompts, "
           "which no baseline can lower; the rest of `variance/NAME` comes from sampling completions. May be negative "
           "by chance; `null` where the loss weights tokens (`weighting` other than `sequence`), which has another "
           "mean gradient", "grad²", when="in steps of the ledger", trl=LEDGER, verl="critic/variance_between_prompts"),
    Metric("step_kl", "how far the step moved the policy with all its updates, KL(before, after) of a completion. It "
           "is the mean over every fourth completion of the sum over its tokens of exp(c) - 1 - c, with c the change of"
           " the token's log pi; in bfloat16 [without the effect of rounding](reference/bfloat16.md)", "nats",
           when="with `--schedule auto` or `kl`", trl=ADDED, verl="actor/step_kl"),
    Metric("step_kl_target", "how far the step was meant to move the policy; `auto` finds this from [the slope at the "
           "end of a step](learning_rate.md#the-slope-at-the-end-of-a-step)", "nats",
           when="with `--schedule auto` or `kl`", trl=ADDED, verl="actor/step_kl_target"),
    Metric("sampling/sampling_logp_difference/mean", r"\|log pi - log sampler\| of a token, before the first update, "
           "over the completions that were trained on", "nats",
           when="where the sampler reports log-probabilities ([sampling](sampling.md))", trl=TRL,
           others="mismatch_kl rollout_corr/log_ppl_abs_diff train_rollout_logprob_abs_diff gen_kl_error "
           "generation_kl_error"),
    Metric("sampling/sampling_logp_difference/max", "the largest such difference", "nats", when="with it", trl=TRL),
    Metric("sampling/sequence_logp_difference/mean", r"the same for whole completions: \|log pi(o\|q) - log "
           r"sampler(o\|q)\|", "nats", when="with it"),
    Metric("sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/mean "
           "sampling/importance_sampling_ratio/max", "min(C, pi / sampler) of the completions; with `sampler_correction"
           " measured`, pi / sampler, which is then only logged", when="with it", trl=TRL),
    Metric("sampling/truncated_ratio", "share of completions with pi / sampler above C, which cause the "
           "truncation's bias", when="with it"),
    Metric("skipped", "1 where an update of the step was [skipped](#when-an-update-is-skipped): its gradient was NaN "
           "or infinite, or no reward differed from another (`grad_norm` is then 0)", trl=ADDED, verl="actor/skipped"),
    Metric("warnings", "what is wrong after this step, in sentences; [each finding](failures.md) comes once a run",
           when="where there are any"),
    Metric("baseline/mean", "mean over prompts of the prompt's mean baseline", "reward", trl=ADDED,
           verl="critic/baseline/mean"),
    Metric("baseline/spread", "standard deviation over prompts of the prompt's mean baseline", "reward", trl=ADDED,
           verl="critic/baseline/spread", others="critic/baseline/spread"),
    Metric("num_tokens", "prompt and own completion tokens trained on so far", "tokens", trl=TRL),
    Metric("step_time", "sampling, gradient, update, and evaluation where there was one; not the checkpoint", "s",
           trl=TRL),
    Metric("time/sampling time/rewards time/training time/looks time/evaluation time/files time/warm_start",
           "what the time was spent on; `looks` take exact scores, also for the ledger; `files` is the time to write "
           "completions, and the metrics and checkpoint of the step before. The summary at a run's end shows the "
           "shares of the total", "s"),
)  # fmt: skip

ROW_OF = {key: metric for metric in METRICS for key in metric.keys.split()}
"""The row of every key; keys with NAME are patterns."""

DOTS_AND_LINE = f"Mean over the completions of a step (dots) and over {AVERAGED_STEPS} steps (line)"

CHARTS = (
    Chart("Before and after", "Before and after", kind="before_and_after",
          note="The first held-out prompts, and the first completion of each at the first and at the last measurement. "
          "These are single samples; held-out accuracy counts all.",
          advice="Read them: what the policy says now is what you get. A reward that can be earned without solving the "
          "task shows here first."),
    Chart("Learning", "Reward and held-out accuracy", "reward eval/accuracy", "mean reward", kind="reward",
          note=f"Dots: each batch. Line: mean over {AVERAGED_STEPS} steps. Bands: 95 % intervals over prompts. "
          "Held-out prompts are never trained on: what the reward gains over held-out accuracy is memorized.",
          advice="If reward rises and accuracy does not, prompts are memorized: use more prompts. If both fall, the "
          "rate is too high: `--schedule auto` measures one."),
    Chart("Learning", "Silent groups", "frac_reward_zero_std", "share of prompts", averaged=True,
          note="Prompts whose completions all got the same reward. Near 1: prompts are too easy or too hard, or the "
          "reward cannot tell completions apart.",
          advice="If near 1: take easier or harder prompts, more `num_generations`, or a finer reward."),
    Chart("Noise and learning rate", "Signal to noise of the batch gradient", "n_snr", "N SNR", kind="n_snr",
          note="N SNR with its 95 % interval. At 1, signal and noise are equal; at 0, the gradient is all noise.",
          levels=((1, "signal = noise"),),
          advice="If at 0 for long: take a larger batch (`prompts_per_step`), or a baseline with less variance (see "
          "the ledger). If far above 1: a smaller batch is enough."),
    Chart("Noise and learning rate", "Learning rate", "learning_rate", "learning rate", kind="rate", logarithmic=True,
          note="The rate of each step. Dotted: the rate set, before the schedule, or where a measured rate started.",
          advice="If it is at the schedule's ceiling from the first step, set a higher rate. If it falls towards 0, "
          "see signal to noise."),
    Chart("Noise and learning rate", "Critical batch size, and the batch used", "critical_batch_size", "prompts",
          kind="critical_batch",
          note="The number of prompts at which noise equals signal (1 / SNR), averaged over the policies of recent "
          "steps, with its 95 % interval. Dashed: the lower end of intervals that have no upper end. A batch far below "
          "this number is mostly noise; one far above it wastes prompts.",
          advice="\"What next\" says what fewer or more prompts would give, where that is known. "
          "`oblrpo diagnose RUN --look` measures [the newest policy alone](noise.md#whose-noise-scale)."),
    Chart("Variance under each baseline", "Gradient variance under each baseline", "variance/NAME",
          "variance / RLOO's", kind="variances",
          note="Points left of the line have less variance than RLOO on the same batches: the geometric mean over "
          "steps, with its 95 % interval. Filled points are unbiased baselines. Hollow points are biased ones: they "
          "also rescale the gradient, so less variance alone is no gain. This run's baseline is bold.",
          advice="Take the lowest unbiased baseline, if its interval excludes 1. Do not choose a biased baseline by "
          "this chart."),
    Chart("Variance under each baseline", "Variance of unbiased baselines over the run", "variance/NAME",
          "variance / RLOO's", kind="variance_course",
          note="Each step compares baselines on one batch. A single step is a noisy estimate.", levels=((1, "RLOO"),),
          advice="A baseline that is good at the start need not be good at the end."),
    Chart("What was trained on", "Completions trained on", "completions/trained_ratio", "share of completions",
          averaged=True, blank=1,
          note="The other completions were only sampled, which saves a forward and a backward pass for each.",
          advice="See [which completions are trained on](selection.md)."),
    Chart("Score norms", "Squared score norm", "score_norm2/mean", "‖∇ log π‖²", averaged=True, logarithmic=True,
          note=f"{DOTS_AND_LINE}.",
          advice="If it grows by orders of magnitude, the policy is nearly certain of what it writes, and rare "
          "completions move it far."),
    Chart("Score norms", "Score norm, high over low reward", "score_norm2/kappa", "kappa", averaged=True,
          logarithmic=True, levels=((1, "equal norms"),),
          note="Ratio of mean squared norms. Far from 1, the optimal baseline differs from the mean reward.",
          advice="If it is near 1 and norms are alike, weighting gains nothing over RLOO."),
    Chart("Completions", "Completion length", "completions/mean_length", "tokens", kind="length", averaged=True,
          note=f"{DOTS_AND_LINE}, end token included.",
          advice="If it approaches `max_completion_length`, see the truncated completions."),
    Chart("Completions", "Distinct completions", "completions/distinct_ratio", "share of completions", averaged=True,
          blank=1, note="Each text counted once. Near 0, all prompts get few answers, or one.",
          advice="If it falls to 0 where prompts have different answers: read the samples; one text may be paid."),
    Chart("Completions", "Truncated completions", "completions/clipped_ratio", "share of completions", averaged=True,
          blank=0, note="Cut off at max_completion_length and scored as they are. Raise it if the share grows.",
          advice="If the share grows: raise the limit, or reward brevity."),
    Chart("Completions", "Turns of an episode", "turns/mean", "turns", averaged=True,
          note=f"{DOTS_AND_LINE}. At 1, no tool is called.",
          advice="If it approaches `max_turns`, episodes are cut off: see how they end in the samples."),
    Chart("Completions", "Calls of tools", "tools/call_frequency", "calls an episode", averaged=True,
          note=f"{DOTS_AND_LINE}. Calls of tools that fail count, too.",
          advice="If it falls to 0, answers without a tool are paid as well, or the policy cannot write calls: see "
          "[what it needs](environments.md)."),
    Chart("Completions", "Calls that fail", "tools/failure_frequency", "share of calls", averaged=True, blank=0,
          note="Calls of which the policy has read an error: no such tool, wrong arguments, an exception, too slow.",
          advice="Read the errors in the samples: an unclear description of an argument shows here."),
    Chart("Samples", "Samples", kind="samples",
          note="Training prompts of the last step, those first whose completions differ in reward, and what each "
          "completion taught.",
          advice="If no completions of a prompt differ in reward, or advantages are next to 0: see the silent groups."),
    Chart("More", "Entropy", "entropy", "nats per token", logarithmic=True, blank=0,
          note="Entropy of the sampling distribution. At 0, nothing is explored any more.",
          advice="If it falls to 0 early, the policy no longer explores: take a lower rate, or more varied prompts."),
    Chart("More", "Change of the policy", "step_kl", "nats per step", logarithmic=True, blank=0,
          note="KL(before || after) of a completion, measured on its own tokens.",
          advice="With `auto` it should be near the intended change. If it is 0, updates are lost to rounding."),
    Chart("More", "Intended change", "step_kl_target", "nats per step", logarithmic=True, blank=0,
          note="How far the schedule meant the policy to move.",
          advice="It falls when little signal is left ([the slope at the end of a step]"
          "(learning_rate.md#the-slope-at-the-end-of-a-step))."),
    Chart("More", "Gradient norm", "grad_norm", "‖g‖", logarithmic=True, blank=0,
          note="Norm of the batch gradient, before clipping."),
    Chart("More", "Sampler mismatch", "sampling/sequence_logp_difference/mean", "nats per completion",
          logarithmic=True, blank=0, note="|log π - log sampler|, averaged over completions.",
          advice="See [sampling](sampling.md)."),
    Chart("More", "Completions without a reward", "completions/masked_ratio", "share", logarithmic=True, blank=0,
          note="Excluded wherever rewards are used.", advice="See [without a reward](sampling.md)."),
    Chart("More", "Time", "step_time", "seconds per step", logarithmic=True, blank=0,
          note="Sampling, gradient, update, and evaluation where there was one."),
)  # fmt: skip
"""The charts of a run's page, in its order."""
