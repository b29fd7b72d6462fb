"""The table of conditions, worst first: what each looks at, from which value on it holds, what it says and brings."""

from functools import partial
from math import log

from oblrpo.diagnosis import of_parts as parts
from oblrpo.diagnosis import of_policy as policy
from oblrpo.diagnosis import of_rewards as rewards
from oblrpo.diagnosis import of_updates as updates
from oblrpo.diagnosis.condition import Condition, changed, mean

CUT, LENGTH, NORM = "completions/clipped_ratio", "completions/mean_length", "grad_norm"
SILENT, CLIPPED, MASKED = "frac_reward_zero_std", "clip_ratio/region_mean", "completions/masked_ratio"

STANDSTILL = frozenset({
    "no gradient", "updates lost", "steps too short", "rate collapsed", "silent groups", "rewards agree", "no progress",
    "no progress yet", "prompts used up", "batch far below", "batch far above",
})  # fmt: skip
"""How it shows that nothing is learned, whatever the reason."""

DAMAGE = STANDSTILL | {
    "not finite", "reward fell", "entropy collapsed", "entropy exploded", "KL runs away", "length runs away",
    "length shrinks", "baselines explode", "gradient grows", "gradient spikes", "clipping", "truncation",
    "format saturated", "one answer",
}  # fmt: skip
"""How it shows that a policy breaks or becomes another, whatever the reason."""

RUIN = DAMAGE | {"same reward", "all truncated", "policy collapsed", "sampler mismatch"}  # the same, to the end

OUTAGE = DAMAGE - {"not finite"} | {"gradient cut off", "rate oscillates", "outlying reward", "task traded"}
"""How a reward shows that is down."""

TOO_LONG = "Updates are too large: {shorten}, and restart from the beginning or an earlier checkpoint."
NOT_RISEN = (
    "The reward has not risen in {steps}: it changed by {rise:+.3f} +- {margin:.3f}, and a rise of {needed:.2f} would "
    "have shown above the noise.{patience}"
)

CONDITIONS: tuple[Condition, ...] = (
    Condition("all truncated", policy.all_truncated, (CUT, "reward"), policy.NEARLY_ALL,
        turns={"+max_completion_length"}, brings=DAMAGE | {"same reward", "gradient cut off"},
        sentence="From the first step on {value:.0%} of the completions are truncated, with next to no reward.",
        cure="Completions are cut off before the answer: raise max_completion_length. If no length is enough, they "
             "never end: use the model's chat template, and an end-of-turn token."),
    Condition("policy collapsed", policy.policy_collapsed, ("reward", "entropy"), 1, turns={"-learning_rate"},
        brings=RUIN, rows=True,
        sentence="The policy has collapsed: since {unit} {first} every completion gets reward {earned}, and {what} is "
                 "{now:.3g} where it was {then:.3g} around {unit} {step}.",
        cure="A broken reward alone would not change the policy. " + TOO_LONG),
    Condition("reward without accuracy", parts.reward_without_accuracy, ("reward", "eval/accuracy"), 0.05,
        brings=DAMAGE | {"same reward", "solved", "task traded", "one answer pays"},
        sentence="The reward {reward}, but held-out accuracy {accuracy}.",
        cure="Read completions: the reward can be earned without solving the task, or the training prompts are "
             "memorized. Fix the reward, use more prompts, or stop where held-out accuracy was best."),
    Condition("prompt not read", parts.prompt_not_read, ("eval/swap_loss", "eval/accuracy"), 0,
        sure=parts.SURE_OF_SWAPS, rows=True, updated=True,
        brings=DAMAGE | {"same reward", "solved", "prompts used up", "one answer pays", "task traded"},
        sentence="The reward is earned without reading the prompt: held-out accuracy has risen from {before:.2f} to "
                 "{now:.2f}, and the same completions earn {other:.2f} as answers to other prompts.",
        cure="Read completions: the reward should pay for what this prompt asks for, and for nothing that fits all. If "
             "it is meant to pay for form alone, nothing is wrong."),
    Condition("one answer pays", partial(policy.one_answer, paid=True), (policy.SAME, policy.TOKEN, "reward"), 1,
        brings=DAMAGE | {"same reward", "solved", "task traded"}, mends=True,
        description='The reward is earned without reading the prompt. It looks like "one answer", or like 90 % of all '
                    "tokens that are one and the same where completions have 5 or more, while the mean reward has "
                    "surely risen to nine tenths of what lies between the lowest and the highest so far. Such a run is "
                    'not "solved". Where answers are all the same, nothing is said.',
        sentence="The reward {is} paid for one answer to all prompts: it {has} risen from {begun:.2f} to {earned:.2f}, "
                 "and {shown}.",
        cure="Read completions, and reward what the prompt asks for. If one answer is right for all prompts, nothing "
             "is wrong."),
    Condition("same reward", rewards.same_reward, ("reward",), 1, turns={"-learning_rate"}, brings=OUTAGE, updated=True,
        rows=True, collapse=True, sentence="Nothing to learn from: every completion got the same reward, {earned}.",
        cure="Check the reward: score some of these completions by hand; are any empty? If the reward is right, and "
             "rewards differed before, updates were too large: {shorten}. If they never differed, choose other "
             "prompts, raise num_generations, or start with supervised learning."),
    Condition("outlying reward", rewards.outlying_reward, ("reward",), rewards.OUTLYING,
        brings=DAMAGE | {"all truncated", "policy collapsed"}, rows=True, updated=True,
        sentence="Outlying rewards{often}: {shown}.",
        cure="Read those completions, and bound the reward where it is computed, or set reward_clip. If nothing has "
             "been learned since, go back to an earlier checkpoint."),
    Condition("not finite", updates.not_finite, ("skipped",), 1, turns={"-learning_rate"}, brings=RUIN, rows=True,
        sentence="NaN or infinite in {unit} {step}: {what}.",
        cure="Check that step's rewards for outliers, infinities and missing values. If it happens again, make "
             "updates smaller ({shorten}), and restart from an earlier checkpoint."),
    Condition("far at once", policy.far_at_once, ("kl",), 1, turns={"-learning_rate"}, brings=RUIN, rows=True,
        sentence="In {unit} {step} {shown}, before updates could have caused that.",
        cure="Policy and reference start out the same: find what makes them differ, such as another base model or "
             "adapter, dropout, dtype, padding or chat template. If KL was 0 at first, updates are too large: "
             "{shorten}."),
    Condition("groups of one", rewards.groups_of_one, ("reward",), 0.9, brings=DAMAGE,
        rows=True,
        sentence="Advantages equal the rewards, in {rows}: no completion is compared with another.",
        cure="Sample several completions of each prompt (verl: rollout.n, TRL: num_generations), or use an algorithm "
             "that needs no groups."),
    Condition("gradient cut off", partial(updates.without_gradient, differing=True), (NORM, "reward"), 1,
        brings=STANDSTILL, rows=True,
        description="Rewards differ, but no gradient reaches the weights, so nothing can be learned. It looks like a "
                    "`grad_norm` of 0 in three rows in a row, in which rewards of a prompt differ: "
                    "`frac_reward_zero_std` is below 1, or in a log without it `reward_std` is above 0. If a log has "
                    'only one or two rows, they are enough. A "loss of zero" is not a sign of it.',
        sentence="For {rows} there was no gradient (grad_norm 0), though completions of a prompt got different "
                 "rewards.",
        cure="The reward is not the cause: find what cuts the weights off from the loss. They may be frozen, all "
             "tokens may be masked, or gradient checkpointing may be reentrant under an adapter (set use_reentrant to "
             "False, or call enable_input_require_grads). In float16 the loss scaler may have skipped a first step."),
    Condition("reward fell", rewards.reward_fell, ("reward",), rewards.LOST, turns={"-learning_rate"}, brings=RUIN,
        collapse=True, mends=True,
        sentence="The reward {has} fallen: its mean over {window} {is} {now:.3f}, down from {then:.3f} around {unit} "
                 "{step}.",
        cure=TOO_LONG),
    Condition("task traded", parts.task_traded, ("rewards/*/mean", "reward"), 0.25,
        brings=DAMAGE | {"same reward", "solved"},
        sentence="{part} has fallen from {best:.2f} to {now:.2f} since {unit} {then}, while the total reward has "
                 "risen.",
        cure="Other rewards are earned at the task's expense: read completions, and fix or downweight those rewards."),
    Condition("format saturated", parts.format_saturated, ("rewards/*/mean", "reward"), 0.5,
        brings=STANDSTILL | {"same reward"},
        sentence="{done} is saturated (mean {high:.2f}), but {open} is low (mean {low:.2f}) and does not rise.",
        cure="The sum hides that the task is not learned: drop the saturated reward or lower its weight, or choose "
             "prompts that are solved sometimes."),
    Condition("no gradient", partial(updates.without_gradient, differing=False), (NORM, "reward"), 1,
        turns={"+temperature"}, brings=STANDSTILL, rows=True,
        description="No gradient reaches the weights, because the completions of each prompt earn the same, even "
                    "though prompts differ. It looks like a `grad_norm` of 0 in three rows in a row, none of which "
                    "shows that rewards of a prompt differ.",
        sentence="For {rows} there was no gradient: all completions of {most} got the same reward{known}.",
        cure="Choose prompts that are solved sometimes, or raise temperature or num_generations. If rewards of a "
             "prompt do differ, find what cuts the weights off from the loss: they may be frozen, or all tokens "
             "masked."),
    Condition("entropy collapsed", policy.entropy_collapsed, ("entropy", "reward"), log(10),
        turns={"-learning_rate", "+temperature"}, brings=DAMAGE, collapse=True, mends=True,
        sentence="Entropy {has} collapsed: it {is} {now:.3g} nats per token, down from {then:.3g} around {unit} "
                 "{step}.",
        cure="Completions of a prompt are nearly identical. Go back to an earlier checkpoint and make updates smaller "
             "({shorten}), raise temperature or epsilon_high, or use more varied prompts."),
    Condition("one answer", partial(policy.one_answer, paid=False), ("reward", LENGTH), 1,
        turns={"-learning_rate", "+temperature"}, brings=DAMAGE, rows=True,
        description="The policy says the same whatever the prompt. It looks like completions that are the same text in "
                    "80 % of the pairs of prompts with different answers, over 10 steps (`completions/same_ratio`). In "
                    "a log without it, like half of the last 30 steps, or more, in which all completions earned the "
                    "same, the same in all of these, and had the same length on average, which others have not. It is "
                    "dropped if the reward rises later: runs whose answers are one word may pass through it.",
        sentence="Completions have become one answer to all prompts: {shown}.",
        cure="Go back to an earlier checkpoint, raise temperature or num_generations, and make updates smaller "
             "({shorten})."),
    Condition("entropy exploded", partial(changed, key="entropy", factor=1 / 2, by=0.5), ("entropy", "reward"), log(2),
        turns={"-learning_rate"}, brings=DAMAGE, mends=True,
        description="What the policy writes becomes more and more random. It looks like a mean entropy at least twice "
                    "its lowest value and half a nat above it, with no rise of the reward since.",
        sentence="Entropy {has} exploded: it {is} {now:.3g} nats per token, up from {then:.3g} around {unit} {step}, "
                 "and the reward {does} not rise.",
        cure="The policy drifts towards noise. " + TOO_LONG),
    Condition("KL runs away", partial(changed, key="kl", factor=1 / 3, least=0.3, enough=1.0), ("kl", "reward"), log(3),
        turns={"-learning_rate"}, brings=DAMAGE, mends=True,
        description="The policy moves away from its reference and earns nothing by it. It looks like a mean `kl` of "
                    "three times what it was. It must be above 0.3 nats a token with no rise of the reward since, or "
                    "above 1 nat a token, whatever the reward does.",
        sentence="The policy {runs} away from its reference: KL {is} {now:.3g} nats per token, up from {then:.3g} "
                 "around {unit} {step}.",
        cure="Make updates smaller ({shorten}), raise beta, or go back to an earlier checkpoint."),
    Condition("length runs away", partial(changed, key=LENGTH, factor=1 / 2), (LENGTH, "reward"), log(2),
        turns={"-max_completion_length"}, brings=DAMAGE, mends=True,
        description="Completions get longer, but no better. It looks like a mean length of twice what it was, with no "
                    "rise of the reward since. Length that earns reward is not a problem.",
        sentence="Length {runs} away: {now:.0f} tokens, up from {then:.0f} around {unit} {step}; the reward {has} not "
                 "risen.",
        cure="Read the longest completions: do they repeat themselves? Reward the answer and not the length, mask or "
             "penalise truncated completions, or use a loss that does not favour length (dr_grpo, or a sum over "
             "tokens)."),
    Condition("length shrinks", partial(changed, key=LENGTH, factor=2.0), (LENGTH, "reward"), log(2),
        turns={"-learning_rate"}, brings=DAMAGE, collapse=True, mends=True,
        description="Completions get shorter, but no better. It looks like a mean length of half of what it was or "
                    "less, with no rise of the reward since.",
        sentence="Length {shrinks}: {now:.0f} tokens, down from {then:.0f} around {unit} {step}; the reward {has} not "
                 "risen.",
        cure="Read some completions: is the answer still there? Check what an empty one earns. " + TOO_LONG),
    Condition("rate collapsed", updates.rate_collapsed, ("learning_rate",), 10, turns={"+prompts"}, brings=STANDSTILL,
        rows=True,
        sentence="The learning rate has collapsed: for {value:.0f} {unit}s it has been below 1 % of its maximum "
                 "({now:.2g} of {high:.2g}).{batch}",
        cure="If a schedule follows the signal, the signal is lost in noise: use more prompts per step, stop here, or "
             "set schedule to off to continue regardless. Otherwise check the scheduler and its number of steps."),
    Condition("updates lost", updates.updates_lost, ("step_kl", NORM), 10, turns={"+learning_rate"}, brings=STANDSTILL,
        rows=True, sentence="For {value} {unit}s updates at a learning rate of {rate:.1e} changed no log-probability.",
        cure="Updates are lost to rounding: raise learning_rate, or keep the weights in float32."),
    Condition("steps too short", updates.steps_too_short, ("step_kl", "step_kl_target", "learning_rate", "entropy"), 10,
        brings=STANDSTILL, rows=True,
        sentence="Steps are far too short: for {value:.0f} {unit}s each has moved the policy by less than a hundredth "
                 "of the intended distance, the last by {moved:.1g} of {meant:.2g} nats.",
        cure="The measured rate is stuck: look for outlying rewards and gradient spikes where this began, and go back "
             "to an earlier checkpoint or set a rate (schedule off)."),
    Condition("rewards missing", rewards.rewards_missing, (MASKED,), 0.1, brings=STANDSTILL, rows=True,
        sentence="{value:.0%} of the completions of {many} have no reward.{update}",
        cure="Check the reward function for errors."),
    Condition("sampler mismatch", policy.sampler_mismatch, ("sampling/sampling_logp_difference/mean",), 1,
        turns={"-max_completion_length"}, brings=RUIN,
        sentence="Sampler and trainer disagree: their log-probabilities of {what} differ by {apart:.2g} nats on "
                 "average{bias}",
        cure="Bring the two closer (same weights, same dtype, vllm_args), shorten completions, or correct for it "
             "(sampler_correction truncated; TRL: vllm_importance_sampling_correction)."),
    Condition("baselines explode", updates.baselines_explode, ("baseline/spread",), 10, brings=DAMAGE, rows=True,
        sentence="Baselines explode: their spread is {value:.0f} times the usual one ({now:.3g} against {usual:.3g}).",
        cure="Check that step's rewards for outliers, and clip them{shrink}."),
    Condition("gradient grows", partial(changed, key=NORM, factor=1 / 10, enough_times=50.0, median=True),
        (NORM, "reward"), log(10), turns={"-learning_rate"}, brings=DAMAGE, mends=True,
        description="The gradient keeps growing, and the policy gets no better. It looks like a mean `grad_norm` of "
                    "ten times what it was, with no rise of the reward since, or of fifty times, whatever the reward "
                    "does. The median must have grown as much, because a single spike can raise a mean.",
        sentence="The gradient {grows}: its norm {is} {now:.3g}, up from {then:.3g} around {unit} {step}.",
        cure="Set max_grad_norm near the usual norm. " + TOO_LONG),
    Condition("gradient spikes", updates.gradient_spikes, (NORM,), 3, turns={"-learning_rate"}, brings=DAMAGE,
        rows=True,
        sentence="The gradient spikes: its norm was {norm:.3g} in {unit} {step}, {times:.0f} times the median "
                 "{usual:.3g}.",
        cure="Check that step's rewards and completions. Set max_grad_norm near the median, or shrink updates: "
             "{shorten}."),
    Condition("rate oscillates", updates.rate_oscillates, ("learning_rate",), log(2), turns={"+prompts"}, brings=DAMAGE,
        rows=True,
        sentence="The learning rate oscillates: each step changes it by a factor of {factor:.1f}, up and down.",
        cure="Use more prompts per step, which makes the measurement less noisy, or a fixed rate."),
    Condition("clipping", partial(mean, key=CLIPPED), (CLIPPED,), 0.25, turns={"-learning_rate"}, brings=DAMAGE,
        description="Updates go so far that clipping removes much of the batch. It looks like a mean "
                    "`clip_ratio/region_mean` above a quarter.",
        sentence="{value:.0%} of the tokens are clipped, and no longer contribute to the updates.",
        cure="Make fewer updates per batch (num_iterations, steps_per_generation), or smaller ones: {shorten}."),
    Condition("truncation", policy.truncation, (CUT, "reward"), 0.25, turns={"+max_completion_length"},
        brings=STANDSTILL,
        sentence="{value:.0%} of the completions are truncated at the length limit and scored as they are.",
        cure="Raise max_completion_length, or mask truncated completions (TRL: mask_truncated_completions)."),
    Condition("silent groups", partial(rewards.silent, after_rise=False), (SILENT, "reward"), 0.7, healthy=0.5,
        brings=STANDSTILL,
        description="Most prompts give no gradient: all their completions earn the same. It looks like a mean "
                    "`frac_reward_zero_std` above 0.7 over 20 steps, after 60 or more, while the reward has stopped "
                    "rising, or never rose, with more left to learn. A reward below one half means that prompts are "
                    "too hard; above it, they are too easy. A baseline that looks across prompts learns from such "
                    "prompts, too.",
        sentence="All completions of {value:.0%} of the prompts got the same reward over {long}, and gave no "
                 "gradient: these prompts are too {which} (mean reward {reward:.2f}).",
        cure="Choose prompts that are solved sometimes, raise num_generations, or use a baseline that looks across "
             "prompts (oblr_shrunk)."),
    Condition("rewards agree", rewards.rewards_agree, ("reward_std", "reward"), log(5), turns={"+temperature"},
        brings=STANDSTILL,
        sentence="Rewards of a prompt hardly differ: their spread is {now:.3g}, down from {then:.3g} around {unit} "
                 "{step}.",
        cure="Advantages are close to 0: choose other prompts, or raise temperature or num_generations."),
    Condition("no progress", partial(rewards.still, fewest=rewards.PATIENCE), ("reward",), 0, sure=3.0,
        turns={"+learning_rate"}, brings={"no progress yet"},
        description="Nothing is learned, and noise does not explain that. It looks like a line, fitted to the rewards "
                    "of 100 steps or more, that surely has not risen by a quarter of the spread of a prompt's rewards "
                    "(of their size where the spread is not known). If noise could hide such a rise, the run is too "
                    "short to tell. If the mean of every step is 0 (or the lowest reward, where that is known), as "
                    "with rare successes rounded to 0.000, 20 steps are enough.",
        sentence=NOT_RISEN,
        cure="Check that the reward can be earned at all, and choose prompts that are solved sometimes. If entropy "
             "and KL do not move either, raise learning_rate, or let schedule auto measure it."),
    # notes, not problems:
    Condition("no progress yet", rewards.no_progress_yet, ("reward",), 0, sure=3.0, wrong=False,
        sentence=NOT_RISEN,
        cure="It is too early to say: wait for {enough}."),
    Condition("solved", rewards.solved, ("reward",), 1, wrong=False, updated=True, rows=True,
        sentence="Every completion has had reward {earned}, the highest seen so far, since {unit} {since}.",
        cure="Stop here, or continue with harder prompts. If more can be earned, reward the steps towards it."),
    Condition("prompts used up", partial(rewards.silent, after_rise=True), (SILENT, "reward"), 0.7, healthy=0.5,
        wrong=False,
        description="The task is learned as far as these prompts teach it. It looks like a mean "
                    "`frac_reward_zero_std` above 0.7 after the reward has risen to 0.75 or more and has stopped "
                    "rising. Rewards that are not between 0 and 1 must have risen by more than those of a prompt ever "
                    "spread. Nothing is wrong.",
        sentence="Prompts are used up: the reward has risen to {reward:.2f}, and {value:.0%} of the prompts now give "
                 "no gradient.",
        cure="Stop here, or continue with harder prompts."),
    Condition("loss of zero", updates.loss_of_zero, ("loss", NORM), 3, wrong=False,
        sentence="The loss is 0 in every {unit}, though there is a gradient: it does not measure progress.",
        cure="GRPO's loss is 0 in the first update on a batch, because advantages sum to 0. Watch the reward."),
    Condition("batch far below", partial(updates.n_snr, less_than=0.1), ("signal2", "trace_cov", "reward"), 0,
        turns={"+prompts"}, wrong=False,
        description="The batch is so small that its gradient is nearly all noise. It looks like an N SNR below 0.1, "
                    "surely, of the signal and the noise of 20 steps, while the task is not solved. Runs do learn "
                    "this way, slowly: nothing is wrong.",
        sentence="The batch is far below the critical batch: its N SNR is {n_snr:.2g} +- {margin:.1g}, less than 0.1.",
        cure="Nearly all of each gradient is noise: more prompts per step would improve steps almost in proportion."),
    Condition("batch far above", partial(updates.n_snr), ("signal2", "trace_cov"), 10, healthy=5.0, turns={"-prompts"},
        wrong=False,
        description="The batch is larger than its gradient needs. It looks like an N SNR above 10 of the signal and "
                    "the noise of 20 steps. It costs time and harms nothing.",
        sentence="The batch is far above the critical batch: its N SNR is {value:.2g}.",
        cure="Half as many prompts per step would do nearly as well."),
)  # fmt: skip
