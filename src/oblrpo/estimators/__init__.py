"""The statistics of OBLR-PO, for anybody's training loop: baselines, advantages, gradient moments, the schedule."""

from oblrpo.estimators.advantages import NORMALISATIONS, WEIGHTINGS
from oblrpo.estimators.baselines import BASELINES, Baseline, baseline, fold_basis
from oblrpo.estimators.moments import Moments, moments, squared_norm
from oblrpo.estimators.schedule import SCHEDULE_MODES, SNRSchedule

__all__ = [
    "BASELINES",
    "NORMALISATIONS",
    "SCHEDULE_MODES",
    "WEIGHTINGS",
    "Baseline",
    "Moments",
    "SNRSchedule",
    "baseline",
    "fold_basis",
    "moments",
    "squared_norm",
]
