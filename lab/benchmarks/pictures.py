"""The pictures of docs/idea.md, computed, and that of docs/environments.md, of an episode that is written by hand.

    python -m lab.benchmarks.pictures

writes docs/pictures/*.svg.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lab.theory import worlds
from lab.theory.worlds import World

matplotlib.use("svg")
FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
RIGHT, WRONG, INK, FAINT = "#2a7f62", "#c8553d", "#333333", "#9a9a9a"
ARROW = {"arrowstyle": "-|>", "color": RIGHT, "lw": 2.5, "shrinkA": 0, "shrinkB": 0}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "oblrpo", "font.size": 10, "text.color": INK}


def one_prompt() -> World:
    """A prompt that the policy mostly answers right: outputs of chance .6 (right), .2, .1, .06 (wrong), .04 (right)."""
    theta_D = torch.tensor([0.6, 0.2, 0.1, 0.06, 0.04], dtype=torch.float64).log()
    rewards_QO = torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    return World("one prompt", lambda theta: theta.log_softmax(0)[None], theta_D, rewards_QO)


def variance(world: World, b: Tensor) -> Tensor:
    """Variance (tr Cov) of (F - b) s for one output at every b, E[w (F - b)^2] - ||grad J||^2."""
    second_K = (world.pi_QO * world.norm2_QO * (world.rewards_QO - b[:, None]).square()).sum(1)
    return second_K - world.gradient_D.square().sum()


def best(world: World) -> float:
    """The best baseline, b* = E[w F] / E[w]."""
    weight_QO = world.pi_QO * world.norm2_QO
    return float((weight_QO * world.rewards_QO).sum() / weight_QO.sum())


def figure(panels: int = 1, height: float = 2.7) -> tuple[Figure, list[Axes]]:
    page = Figure(figsize=(7.2, height), layout="constrained")
    axes = [page.add_subplot(1, panels, k + 1) for k in range(panels)]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return page, axes


def norms() -> Figure:
    world = one_prompt()
    page, axes = figure(2)
    colours = [RIGHT if paid else WRONG for paid in world.rewards_QO[0]]
    for each, values_O, title in (
        (axes[0], world.pi_QO[0], "how likely the output is"),
        (axes[1], world.norm2_QO[0], "squared norm of its score"),
    ):
        bars = each.bar(list("ABCDE"), values_O.numpy(), color=colours)
        each.bar_label(bars, fmt="%.2f", padding=2, fontsize=9)
        each.set_title(title, fontsize=10)
        each.margins(y=0.15)
    handles = [matplotlib.patches.Patch(color=colour) for colour in (RIGHT, WRONG)]
    axes[0].legend(handles, ["reward 1", "reward 0"], frameon=False, loc="upper right")
    return page


def baseline() -> Figure:
    world = one_prompt()
    page, (axis,) = figure()
    b_K = torch.linspace(-0.15, 1.0, 200, dtype=torch.float64)
    axis.plot(b_K.numpy(), variance(world, b_K).numpy(), color=INK)
    mean = float(world.mean(world.rewards_QO)[0])
    for b, name, colour in (
        (0.0, "none", FAINT),
        (best(world), "b* = E[wF] / E[w]", RIGHT),
        (mean, "mean reward", WRONG),
    ):
        at = float(variance(world, torch.tensor([b], dtype=torch.float64))[0])
        axis.plot(b, at, "o", color=colour, ms=8)
        axis.annotate(f"{name}\n{at:.3f}", (b, at), (0, 10), textcoords="offset points", color=colour, ha="center")
    axis.set(xlabel="baseline b", ylabel="variance of the gradient", ylim=(0, 0.35))
    return page


def noise() -> Figure:
    """Batch gradients of 250 batches, along grad J and across it, in units of its length."""
    world = worlds.linear_bandit(seed=1, Q=6, O=5, D=4)
    generator = torch.Generator().manual_seed(0)
    along_D = world.gradient_D / world.gradient_D.norm()
    across_D = torch.eye(len(along_D), dtype=torch.float64)[0]
    across_D = across_D - (across_D @ along_D) * along_D
    across_D = across_D / across_D.norm()
    centred_QO = world.rewards_QO - world.mean(world.rewards_QO)[:, None]
    each_QOD = centred_QO[..., None] * world.score_QOD  # one output a prompt
    chance_K = (world.pi_QO / len(world.pi_QO)).flatten()
    value_KD = each_QOD.flatten(0, 1)
    trace = float((chance_K * value_KD.square().sum(1)).sum() - world.gradient_D.square().sum())
    snr = float(world.gradient_D.square().sum()) / trace
    page, axes = figure(3, 2.9)
    for axis, prompts in zip(axes, (8, 32, 256), strict=True):
        drawn_BN = torch.multinomial(chance_K, 250 * prompts, replacement=True, generator=generator).view(250, prompts)
        batch_BD = value_KD[drawn_BN].mean(1) / world.gradient_D.norm()
        axis.scatter(batch_BD @ across_D, batch_BD @ along_D, s=5, color=FAINT)
        axis.annotate("", (0, 1), (0, 0), arrowprops=ARROW)
        share = prompts * snr / (1 + prompts * snr)
        axis.set_title(f"{prompts} prompts\nN SNR {prompts * snr:.1f}, rate x {share:.2f}", fontsize=10)
        axis.set(xlim=(-3, 3), ylim=(-2, 4), aspect="equal")
        axis.set_axis_off()
    return page


def rate() -> Figure:
    """The bound of theorem 4, eta ||g||^2 - c/2 eta^2 (||g||^2 + tr H / N), with ||g|| = c = 1."""
    page, (axis,) = figure()
    eta_K = torch.linspace(0, 2, 200, dtype=torch.float64)
    for n_snr, colour in ((float("inf"), INK), (4.0, RIGHT), (1.0, FAINT), (0.25, WRONG)):
        curve_K = eta_K - eta_K.square() / 2 * (1 + 1 / n_snr)
        top = 1 / (1 + 1 / n_snr)
        label = "no noise" if n_snr == float("inf") else f"N SNR = {n_snr:g}"
        axis.plot(eta_K.numpy(), curve_K.numpy(), color=colour, label=label)
        axis.plot(top, top / 2, "o", color=colour, ms=7)
    axis.axhline(0, color=INK, lw=0.7)
    axis.set(xlabel="learning rate, in units of 1 / c", ylabel="improvement promised", ylim=(-0.4, 0.6), xlim=(0, 2))
    page.legend(frameon=False, loc="outside right upper")
    return page


SPOKEN = {
    "prompt": ("#d9d9d9", INK, "read"),
    "turn": (RIGHT, "white", "drawn by the policy: score, gradient, KL"),
    "result": ("#5b7db1", "white", "results of tools: read, without a gradient"),
}
EPISODE = (
    ("prompt", "<user> Game 7 : 1 to 31 <end> <assistant>"),
    ("turn 1", "<call> guess number= 16 </call> <end>"),
    ("result", "<tool> lower <end> <assistant>"),
    ("turn 2", "<call> guess number= 8 </call> <end>"),
    ("result", "<tool> found <end> <assistant>"),
    ("turn 3", "It is 8 . <end>"),
)
"""Who has written what: a turn is the policy's; the words of the template are part of what is read."""


def episode() -> Figure:
    """The tokens of one episode, a line for each who writes them."""
    page, (axis,) = figure(height=2.3)
    for line, (name, words) in enumerate(EPISODE):
        colour, ink, _ = SPOKEN[name.split()[0]]
        axis.text(0, -line, name, color=INK, va="center")
        across = 8.0
        for token in words.split():
            width = len(token) + 1.6
            axis.barh(-line, width, 0.76, left=across, color=colour)
            axis.text(across + width / 2, -line, token, family="monospace", fontsize=9, color=ink, ha="center",
                      va="center")  # fmt: skip
            across += width + 0.4
    axis.set(xlim=(0, 72), ylim=(0.5 - len(EPISODE), 0.5))
    axis.set_axis_off()
    handles = [matplotlib.patches.Patch(color=colour) for colour, *_ in SPOKEN.values()]
    page.legend(handles, [does for *_, does in SPOKEN.values()], frameon=False, loc="outside lower left", ncols=3)
    return page


PICTURES = {"norms": norms, "baseline": baseline, "noise": noise, "rate": rate, "episode": episode}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            draw().savefig(
                FOLDER / f"{name}.svg", facecolor="white", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.12
            )
    print(f"b* {best(one_prompt()):.3f}")


if __name__ == "__main__":
    main()
