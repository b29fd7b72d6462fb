"""The baselines, a row each. `estimators/baselines.py` has their functions; a new one is a row here and a function."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Baseline:
    """What is known of a baseline b, which is subtracted from each output's reward F."""

    meaning: str  # what b is of output j of a group; w is the squared score norm, T the length
    unbiased: bool  # whether the policy gradient's mean is exactly grad J with it
    source: str = ""
    function: str = ""  # its function in `estimators.baselines`; that of its own name if empty
    needs: tuple[str, ...] = ()  # the function's arguments beyond rewards and mask
    smallest_group: int = 1  # the fewest outputs of a prompt that it is meant for
    off_policy: bool = False  # whether importance weights enter: norm2_PG is multiplied by rho^2
    normalisation: str = "none"
    """What its authors divide the advantages by, a name of `estimators.NORMALISATIONS`."""
    trainable: bool = True
    """Whether a run may train with it; the others are measured in the variance ledger only."""
    learns_from_ties: bool = False
    """Whether a prompt whose outputs all earn the same still has advantages other than 0."""

    @property
    def by_token(self) -> bool:
        """Whether there is one baseline a token, (P, G, T)."""
        return "token_mask_PGT" in self.needs


MEAN = "The mean reward of the group, the output itself included: b_j = mean_i F_i."
WEIGHTED = "The mean reward of the group, weighted by exact w, in-sample: b_j = sum w F / sum w."

BASELINES: dict[str, Baseline] = {
    "none": Baseline("No baseline: b_j = 0.", True, "Williams 1992 (REINFORCE)", learns_from_ties=True),
    "mean": Baseline(MEAN, False, function="mean", smallest_group=2),
    "rloo": Baseline(
        "The mean reward of the group's other outputs: b_j = mean_{i != j} F_i, and 0 for a lone output.",
        True, "Ahmadian et al. 2024, arXiv 2402.14740", smallest_group=2,
    ),
    "grpo": Baseline(
        MEAN, False, "Shao et al. 2024, arXiv 2402.03300", "mean", smallest_group=2, normalisation="group_std"
    ),
    "dr_grpo": Baseline(MEAN, False, "Liu et al. 2025, arXiv 2503.20783", "mean", smallest_group=2),
    "reinforce_pp": Baseline(
        "The mean of all rewards of the batch, which biases the scale of the gradient.",
        False, "Hu et al. 2025 (REINFORCE++), arXiv 2501.03262", "batch_mean", normalisation="batch_std",
        learns_from_ties=True,
    ),
    "js": Baseline(
        "RLOO's baseline, shrunk towards the mean of the other prompts as James and Stein do.",
        True, "arXiv 2511.03710", learns_from_ties=True,
    ),
    "oblr": Baseline(
        "The variance-optimal baseline, leave-one-out: b_j = sum_{i != j} w_i F_i / sum_{i != j} w_i.",
        True, "OBLR-PO, theorem 7, arXiv 2511.23310", needs=("norm2_PG",), smallest_group=2, off_policy=True,
    ),
    "oblr_shrunk": Baseline(
        "The baseline `oblr`, shrunk towards that of other prompts and earlier steps (`Prior`).",
        True, "derived here", needs=("norm2_PG", "prior"), off_policy=True, learns_from_ties=True,
    ),
    "oblr_lazy": Baseline(
        "The reward of the group's other outputs if all of them earned the same; otherwise as `oblr_shrunk`.",
        True, "derived here", needs=("norm2_PG", "prior"), off_policy=True,
    ),
    "oblr_thrifty": Baseline(
        "`oblr_lazy` for low, high or all rewards if earlier steps show that this costs less; otherwise `oblr_shrunk`.",
        True, "derived here", needs=("norm2_PG", "prior"), off_policy=True,
    ),
    "opo": Baseline(
        "The mean reward of the group, weighted by lengths T, in-sample: b_j = sum T F / sum T.",
        False, "Hao et al. 2025, arXiv 2505.23585", needs=("length_PG",), smallest_group=2,
    ),
    "otb": Baseline(
        "One baseline per token, (P, G, T): b_t = sum_i W_it F_i / sum_i W_it with W_it = sum_{u<=t} l_iu.",
        False, "Li et al. 2026, arXiv 2602.07078", needs=("logit_norm2_PGT", "token_mask_PGT"), smallest_group=2,
        trainable=False,
    ),
    "eob": Baseline(WEIGHTED, False, "a fork of verl", "weighted_mean", ("norm2_PG",), smallest_group=2),
    "vcpo": Baseline(
        WEIGHTED, False, "arXiv 2602.17616", "weighted_mean", ("norm2_PG",), smallest_group=2, off_policy=True
    ),
}  # fmt: skip
"""Every baseline by name; the command line, the adapters, the ledger, the report and the pages read this table."""

UNBIASED = tuple(name for name, row in BASELINES.items() if row.unbiased)
LEARNS_FROM_TIES = tuple(name for name, row in BASELINES.items() if row.learns_from_ties)
COMPARED = tuple(name for name in UNBIASED if name != "rloo")
"""Those whose variance is compared with RLOO's. Biased ones have less because they shrink the gradient."""
