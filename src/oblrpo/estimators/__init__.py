"""The statistics of OBLR-PO, for anybody's training loop: baselines, advantages, gradient moments, ledger, schedule."""

from oblrpo.estimators.advantages import NORMALISATIONS, WEIGHTINGS, advantages, differ, headroom
from oblrpo.estimators.baselines import (
    Prior,
    baseline,
    baseline_inputs,
    depends_on_own_output,
    kl_in_reward,
    register_baseline,
)
from oblrpo.estimators.ledger import Ledger, LedgerEntry, ledger, under_every_baseline
from oblrpo.estimators.measuring import ONE_IN
from oblrpo.estimators.moments import Moments, group_norm2, kappa, moments, moments_of_halves, own_norm2, squared_norm
from oblrpo.estimators.ratios import ratio_weights
from oblrpo.estimators.schedule import SNRSchedule
from oblrpo.tables.algorithms import RATIOS, SCHEDULES, Bounds, Ratio
from oblrpo.tables.baselines import BASELINES, Baseline

__all__ = [
    "BASELINES", "NORMALISATIONS", "ONE_IN", "RATIOS", "SCHEDULES", "WEIGHTINGS", "Baseline", "Bounds", "Ledger",
    "LedgerEntry", "Moments", "Prior", "Ratio", "SNRSchedule", "advantages", "baseline", "baseline_inputs",
    "depends_on_own_output", "differ", "group_norm2", "headroom", "kappa", "kl_in_reward", "ledger", "moments",
    "moments_of_halves", "own_norm2", "ratio_weights", "register_baseline", "squared_norm", "under_every_baseline",
]  # fmt: skip
