"""What a probe found, as figures and in words."""

from __future__ import annotations

import math

from lab.probe.probe import Along, Curvature, Place
from oblrpo.intervals import Mean


def print_place(place: Place) -> None:
    """Print what was found: the figures, and then what they mean."""
    one, two = place.informative
    print(
        f"step {place.step}: reward {place.reward:.3f}, which varies on {one} and {two} of {place.prompts} prompts; "
        f"||grad J||^2 {place.gradient_norm2:.3g}"
    )
    if place.curvature is None:
        print("  curvature      unknown: no reward varies in one of the batches; give more prompts or outputs")
    else:
        _print_curvature(place.curvature)
    if place.path is not None:
        _print_path(place.path)
    for sentence in in_words(place):
        print(f"  {sentence}")


def in_words(place: Place) -> list[str]:
    """What the figures of a place mean, a sentence each."""
    found, path = place.curvature, place.path
    said = []
    if found is None:
        said.append("Nothing is known of the curvature here.")
    else:
        known = found.lower > _margin(found.elsewhere)
        lower = f"by the lower one {1 / found.lower:.2g}" if known else "the lower one cannot be distinguished from 0"
        said.append(
            "For plain gradient steps (SGD) the upper estimate of the curvature supports a rate of "
            f"{found.rate:.2g}; {lower}."
        )
    if path is not None and path.length:
        said.append(_update_in_words(path))
    return said


def _update_in_words(path: Along) -> str:
    made, margin = path.realised.value, _margin(path.realised)
    if abs(made) <= margin:
        return f"The run's next update changes the mean reward by less than {margin:.2g}, too little to be measured."
    change = "improves" if made > 0 else "worsens"
    agrees = abs(made - path.second_order) <= margin
    as_predicted = "as" if agrees else "which is not what"
    return (
        f"The run's next update {change} the mean reward by {abs(made):.2g} +- {margin:.2g}, {as_predicted} slope and "
        "curvature predict."
    )


def _print_curvature(found: Curvature) -> None:
    other = found.elsewhere
    along_it = f"{1 / found.lower:.3g}" if found.lower > _margin(other) else "unknown (not distinguishable from 0)"
    print(
        f"  curvature      {found.lowest:.3g} to {found.highest:.3g} where it was looked for (residual "
        f"{found.residual:.2g}); |c| {found.lower:.3g} +- {_margin(other):.2g} along that direction on other samples "
        f"(95 %)\n"
        f"  1 / c          {found.rate:.3g} by the upper estimate, {found.upper:.3g}; along the direction found "
        f"{along_it}: for steps along the gradient itself (SGD)"
    )


def _print_path(path: Along) -> None:
    if not path.length:
        print(f"  next update    rate {path.learning_rate:.3g}: it moves nothing")
        return
    bound = "unknown" if path.promised is None else f"{path.promised:+.4f}"
    print(
        f"  next update    rate {path.learning_rate:.3g}, length {path.length:.3g}, curvature along it "
        f"{path.curvature.value:.3g} +- {_margin(path.curvature):.2g}, secant {path.secant:.3g}\n"
        f"  improvement    bound {bound} (upper estimate of c), second order {path.second_order:+.4f}, realised "
        f"{path.realised.value:+.4f} +- {_margin(path.realised):.4f}"
    )


def _margin(found: Mean) -> float:
    return math.inf if found.margin is None else found.margin
