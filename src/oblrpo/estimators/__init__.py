"""The statistics of OBLR-PO, for anybody's training loop: baselines, advantages, gradient moments, ledger, schedule."""

from oblrpo.estimators.advantages import NORMALISATIONS, WEIGHTINGS
from oblrpo.estimators.assumption import depends_on_own_output
from oblrpo.estimators.baselines import BASELINES, Baseline, baseline, fold_basis, kl_in_reward
from oblrpo.estimators.ledger import Ledger, LedgerEntry, ledger
from oblrpo.estimators.moments import Moments, group_norm2, inverse_preconditioner, kappa, moments, squared_norm
from oblrpo.estimators.prior import Prior
from oblrpo.estimators.schedule import SCHEDULE_MODES, SNRSchedule

__all__ = [
    "BASELINES",
    "NORMALISATIONS",
    "SCHEDULE_MODES",
    "WEIGHTINGS",
    "Baseline",
    "Ledger",
    "LedgerEntry",
    "Moments",
    "Prior",
    "SNRSchedule",
    "baseline",
    "depends_on_own_output",
    "fold_basis",
    "group_norm2",
    "inverse_preconditioner",
    "kappa",
    "kl_in_reward",
    "ledger",
    "moments",
    "squared_norm",
]
