"""The table of conditions, worst first, and what brings what along."""

from oblrpo.diagnosis import of_parts, of_policy, of_rewards, of_updates
from oblrpo.diagnosis.condition import Condition

CONDITIONS: tuple[Condition, ...] = (
    of_policy.all_truncated,
    of_policy.policy_collapsed,
    of_rewards.same_reward,
    of_rewards.outlying_reward,
    of_updates.not_finite,
    of_updates.gradient_cut_off,
    of_rewards.reward_fell,
    of_parts.reward_without_accuracy,
    of_parts.task_traded,
    of_updates.no_gradient,
    of_policy.entropy_collapsed,
    of_policy.entropy_exploded,
    of_policy.kl_runs_away,
    of_policy.length_runs_away,
    of_policy.length_shrinks,
    of_updates.rate_lost,
    of_updates.updates_lost,
    of_rewards.rewards_missing,
    of_policy.sampler_apart,
    of_updates.baselines_explode,
    of_updates.gradient_grows,
    of_updates.gradient_spikes,
    of_updates.rate_oscillates,
    of_policy.clip_share,
    of_policy.truncation,
    of_parts.format_saturated,
    of_rewards.silent_groups,
    of_rewards.rewards_agree,
    of_rewards.no_progress,
    of_rewards.no_progress_yet,
    of_rewards.solved,
    of_rewards.prompts_used_up,
    of_updates.batch_far_below,
    of_updates.batch_far_above,
)

STANDSTILL = frozenset(CONDITIONS[CONDITIONS.index(of_rewards.silent_groups) :]) - {of_rewards.solved} | {
    of_updates.no_gradient, of_updates.updates_lost, of_updates.rate_lost
}  # fmt: skip
"""How it shows that nothing is learned, whatever keeps it from being learned."""

DAMAGE = STANDSTILL | {
    of_updates.not_finite, of_rewards.reward_fell, of_policy.entropy_collapsed, of_policy.entropy_exploded,
    of_policy.kl_runs_away, of_policy.length_runs_away, of_policy.length_shrinks, of_updates.baselines_explode,
    of_updates.gradient_grows, of_updates.gradient_spikes, of_policy.clip_share, of_policy.truncation,
    of_parts.format_saturated,
}  # fmt: skip
"""How it shows that a policy breaks, whatever breaks it, or becomes another."""

NO_REWARD = {of_rewards.same_reward, of_policy.all_truncated, of_policy.policy_collapsed}
APART = {of_updates.not_finite, of_rewards.rewards_missing, of_policy.sampler_apart}
"""What no outage of the reward explains, beside what makes it one."""

RUIN = DAMAGE | NO_REWARD | {of_policy.sampler_apart}
"""The same, to the end."""

BRINGS: dict[Condition, frozenset[Condition]] = {
    **dict.fromkeys((each for each in CONDITIONS if each.wrong), DAMAGE),
    **dict.fromkeys((each for each in STANDSTILL if each.wrong), STANDSTILL),
    of_rewards.no_progress: frozenset(),  # which is no cause of anything
    **dict.fromkeys((of_updates.gradient_cut_off, of_parts.format_saturated, of_policy.truncation), STANDSTILL),
    **dict.fromkeys((of_rewards.reward_fell, of_policy.policy_collapsed, *APART), RUIN),
    of_rewards.rewards_missing: STANDSTILL,
    of_parts.reward_without_accuracy: DAMAGE | {of_parts.task_traded, of_rewards.same_reward, of_rewards.solved},
    of_parts.task_traded: DAMAGE | {of_rewards.same_reward, of_rewards.solved},
    of_policy.all_truncated: DAMAGE | {of_rewards.same_reward, of_updates.gradient_cut_off},
    of_rewards.same_reward: frozenset(CONDITIONS) - NO_REWARD - APART - {of_rewards.solved},
}
"""What each may bring along: the cause is told with its cure, and these beneath it without one."""
