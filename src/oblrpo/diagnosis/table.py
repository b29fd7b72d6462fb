"""The table of conditions, worst first."""

from oblrpo.diagnosis import of_parts, of_policy, of_rewards, of_updates
from oblrpo.diagnosis.condition import Condition

CONDITIONS: tuple[Condition, ...] = (
    of_rewards.same_reward,
    of_rewards.outlying_reward,
    of_updates.not_finite,
    of_rewards.reward_fell,
    of_updates.no_gradient,
    of_policy.entropy_collapsed,
    of_policy.entropy_exploded,
    of_rewards.reward_without_accuracy,
    of_parts.task_traded,
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
    of_rewards.silent_groups,
    of_rewards.rewards_agree,
    of_parts.format_saturated,
    of_rewards.no_progress,
    of_rewards.no_progress_yet,
    of_rewards.solved,
    of_rewards.prompts_used_up,
    of_updates.batch_far_below,
    of_updates.batch_far_above,
)
