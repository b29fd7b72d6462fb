"""The table of conditions, worst first, and what brings what along."""

from oblrpo.diagnosis import of_parts as parts
from oblrpo.diagnosis import of_policy as policy
from oblrpo.diagnosis import of_rewards as rewards
from oblrpo.diagnosis import of_updates as updates
from oblrpo.diagnosis.condition import Condition

CONDITIONS: tuple[Condition, ...] = (
    policy.all_truncated, policy.policy_collapsed, parts.reward_without_accuracy, rewards.same_reward,
    rewards.outlying_reward, updates.not_finite, updates.gradient_cut_off, rewards.reward_fell, parts.task_traded,
    parts.format_saturated, updates.no_gradient, policy.entropy_collapsed, policy.entropy_exploded,
    policy.kl_runs_away, policy.length_runs_away, policy.length_shrinks, updates.rate_collapsed, updates.updates_lost,
    rewards.rewards_missing, policy.sampler_mismatch, updates.baselines_explode, updates.gradient_grows,
    updates.gradient_spikes, updates.rate_oscillates, policy.clipping, policy.truncation, rewards.silent_groups,
    rewards.rewards_agree, rewards.no_progress,
    # notes, not problems:
    rewards.no_progress_yet, rewards.solved, rewards.prompts_used_up, updates.loss_of_zero, updates.batch_far_below,
    updates.batch_far_above,
)  # fmt: skip

STANDSTILL = frozenset({
    updates.no_gradient, updates.updates_lost, updates.rate_collapsed, rewards.silent_groups, rewards.rewards_agree,
    rewards.no_progress, rewards.no_progress_yet, rewards.prompts_used_up, updates.batch_far_below,
    updates.batch_far_above,
})  # fmt: skip
"""How it shows that nothing is learned, whatever the reason."""

DAMAGE = STANDSTILL | {
    updates.not_finite, rewards.reward_fell, policy.entropy_collapsed, policy.entropy_exploded, policy.kl_runs_away,
    policy.length_runs_away, policy.length_shrinks, updates.baselines_explode, updates.gradient_grows,
    updates.gradient_spikes, policy.clipping, policy.truncation, parts.format_saturated,
}  # fmt: skip
"""How it shows that a policy breaks or becomes another, whatever the reason."""

RUIN = DAMAGE | {rewards.same_reward, policy.all_truncated, policy.policy_collapsed, policy.sampler_mismatch}
"""The same, to the end."""

BRINGS: dict[Condition, frozenset[Condition]] = {
    **dict.fromkeys((
        updates.no_gradient, updates.gradient_cut_off, updates.rate_collapsed, updates.updates_lost,
        rewards.rewards_missing, policy.truncation, rewards.silent_groups, rewards.rewards_agree,
    ), STANDSTILL),
    parts.format_saturated: STANDSTILL | {rewards.same_reward},
    **dict.fromkeys((
        rewards.outlying_reward, policy.entropy_collapsed, policy.entropy_exploded, policy.kl_runs_away,
        policy.length_runs_away, policy.length_shrinks, updates.baselines_explode, updates.gradient_grows,
        updates.gradient_spikes, updates.rate_oscillates, policy.clipping,
    ), DAMAGE),
    **dict.fromkeys((policy.policy_collapsed, updates.not_finite, rewards.reward_fell, policy.sampler_mismatch), RUIN),
    policy.all_truncated: DAMAGE | {rewards.same_reward, updates.gradient_cut_off},
    parts.task_traded: DAMAGE | {rewards.same_reward, rewards.solved},
    parts.reward_without_accuracy: DAMAGE | {rewards.same_reward, rewards.solved, parts.task_traded},
    rewards.same_reward: DAMAGE - {updates.not_finite} | {
        updates.gradient_cut_off, updates.rate_oscillates, rewards.outlying_reward, parts.task_traded,
    },
    rewards.no_progress: frozenset({rewards.no_progress_yet}),
}  # fmt: skip
"""What each may bring along: a cause is reported with its cure, and these beneath it without one."""
