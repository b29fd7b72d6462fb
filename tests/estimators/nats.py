"""Changes of log-probabilities whose KL is known."""

import torch


def change_of(kl):
    """The c >= 0 with exp(c) - 1 - c = kl, by Newton's method from above; NaN and infinity stay what they are."""
    kl = torch.as_tensor(kl, dtype=torch.float64)
    c = torch.minimum((2 * kl).sqrt(), (kl + 2 * kl.sqrt() + 1).log() + 1)
    for _ in range(60):
        c = torch.where((kl > 1e-12) & kl.isfinite(), c - (c.expm1() - c - kl) / c.expm1().clamp(min=1e-300), c)
    return torch.where(kl.isfinite(), c, kl)


def quadratic(change):
    """A change that is felt as half its square, as if KL were exactly quadratic in the update."""
    return change_of(change.double().square() / 2)
