"""Every number of a probe against the whole Hessian and gradient of its samples, in float64."""

import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.probe.console import in_words, print_place
from lab.probe.probe import Along, Curvature, Place, look
from oblrpo.intervals import Mean, student_t
from tests.lab.probe.conftest import P, drawn

pytestmark = pytest.mark.usefixtures("stay_double")


def flat(direction):
    return torch.cat([part.detach().flatten() for part in direction])


def gradient_of(policy, samples):
    """(1/G) sum_j A_j grad log pi_j of every prompt, where the policy was sampled: (P, D)."""
    logps_PG = policy.logps(samples.sequences).logps_S.view(samples.advantages_PG.shape)
    terms_P = (logps_PG * samples.advantages_PG).mean(1)
    return torch.stack([flat(torch.autograd.grad(each, policy.parameters, retain_graph=True)) for each in terms_P])


def whole_hessian(policy, samples):
    """Of mean_pj A_pj pi_pj / pi_old_pj: row by row, each a gradient of one entry of its gradient."""
    with sdpa_kernel(SDPBackend.MATH):
        logps_PG = policy.logps(samples.sequences).logps_S.view(samples.logps_PG.shape)
        value = ((logps_PG - samples.logps_PG).exp() * samples.advantages_PG).mean()
        grads = torch.autograd.grad(value, policy.parameters, create_graph=True)
        entries = torch.cat([part.flatten() for part in grads])
        return torch.stack([flat(torch.autograd.grad(e, policy.parameters, retain_graph=True)) for e in entries])


def improvement_of(policy, samples):
    logps_PG = policy.logps(samples.sequences).logps_S.view(samples.advantages_PG.shape).detach()
    return ((logps_PG - samples.logps_PG).exp() * samples.advantages_PG).mean(1)


@pytest.fixture
def seen(policy):
    """(place, first batch, second batch, the update made, whole Hessians and gradients)."""
    one, two = drawn(policy, 1), drawn(policy, 2)
    generator = torch.Generator().manual_seed(4)
    step = [0.02 * torch.randn(p.shape, generator=generator).double() for p in policy.parameters]
    before = flat(policy.parameters).clone()

    def update():
        with torch.no_grad():
            for p, move in zip(policy.parameters, step, strict=True):
                p += move
        return 0.125

    place = look(policy, (one, two), 25, torch.Generator().manual_seed(0), 7, update)
    assert torch.equal(flat(policy.parameters), before)  # weights come back
    return place, one, two, step, update


def test_the_place(policy, seen):
    place, one, two, _, _ = seen
    assert (place.step, place.prompts) == (7, P)
    assert place.informative == (one.informative, two.informative)
    assert place.reward == pytest.approx(float(two.rewards_PG.mean()))
    gradient_PD = gradient_of(policy, two)
    assert place.gradient_norm2 == pytest.approx(float(gradient_PD[::2].mean(0) @ gradient_PD[1::2].mean(0)))


def test_the_curvature_is_looked_for_in_one_batch_and_measured_in_the_other(policy, seen):
    place, one, two, _, _ = seen
    first, second = (whole_hessian(policy, each) for each in (one, two))
    values, vectors = torch.linalg.eigh((first + first.T) / 2)
    steepest = vectors[:, int(values.abs().argmax())]
    found = place.curvature
    assert (found.lowest, found.highest) == pytest.approx((float(values[0]), float(values[-1])), rel=1e-3)
    assert found.residual < 1e-2 * float(values.abs().max())
    elsewhere = float(steepest @ second @ steepest)
    assert found.elsewhere.value == pytest.approx(elsewhere, rel=2e-2)
    assert elsewhere != pytest.approx(float(values.abs().max()), rel=0.2)  # the batches differ
    assert found.lower == pytest.approx(abs(elsewhere), rel=2e-2)
    assert found.upper == pytest.approx(float(values.abs().max()), rel=1e-2)
    assert found.elsewhere.n == P


def test_the_path(policy, seen):
    place, _, two, step, update = seen
    path, change, hessian = place.path, flat(step), whole_hessian(policy, two)
    length2, bend = float(change @ change), float(change @ hessian @ change)
    first = float(gradient_of(policy, two).mean(0) @ change)
    assert path.learning_rate == 0.125
    assert path.length == pytest.approx(length2**0.5)
    assert path.curvature.value == pytest.approx(bend / length2, rel=1e-3)
    assert path.second_order == pytest.approx(first + bend / 2, rel=1e-4)
    assert path.promised == pytest.approx(first - place.curvature.upper / 2 * length2)
    home = gradient_of(policy, two)
    update()
    realised_P = improvement_of(policy, two)
    assert path.realised.value == pytest.approx(float(realised_P.mean()))
    assert path.realised.margin == pytest.approx(student_t(P - 1) * float(realised_P.std()) / P**0.5)
    weight_PG = (policy.logps(two.sequences).logps_S.view(two.logps_PG.shape) - two.logps_PG).exp()
    away = torch.stack([
        flat(torch.autograd.grad(each, policy.parameters, retain_graph=True))
        for each in (weight_PG * two.advantages_PG).mean(1)
    ])  # fmt: skip
    turn = away - home
    squared = float(turn[::2].mean(0) @ turn[1::2].mean(0))
    assert path.secant == pytest.approx(math.sqrt(max(squared, 0.0) / length2), rel=1e-6)
    assert squared > 0  # so that the line above says something


def test_an_update_that_fails_is_taken_back_too(policy, samples):
    before = flat(policy.parameters).clone()

    def update():
        with torch.no_grad():
            policy.parameters[0].add_(1.0)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        look(policy, (samples, samples), 1, torch.Generator().manual_seed(0), 0, update)
    assert torch.equal(flat(policy.parameters), before)


@pytest.mark.parametrize("which", [0, 1])
def test_where_no_reward_varies_nothing_is_known_and_the_rest_goes_on(policy, which, capsys):
    batches = [drawn(policy, 1), drawn(policy, 2)]
    batches[which] = dataclasses.replace(
        batches[which], rewards_PG=torch.ones_like(batches[which].rewards_PG),
        advantages_PG=torch.zeros_like(batches[which].advantages_PG),
    )  # fmt: skip
    place = look(policy, tuple(batches), 3, torch.Generator().manual_seed(0), 0, lambda: 0.0)
    assert place.curvature is None
    assert place.path.promised is None
    assert place.informative[which] == 0
    print_place(place)
    out = capsys.readouterr().out
    assert "curvature      unknown: no reward varies" in out
    assert "next update    rate 0: it moves nothing" in out


def test_what_is_printed(capsys):
    elsewhere = Mean(-0.17, 0.318, 4)
    curved = Curvature(lowest=-0.5, highest=0.25, residual=0.125, elsewhere=elsewhere)
    assert (curved.lower, curved.upper, curved.rate) == (0.17, 0.625, 1.6)
    path = Along(0.5, 0.25, Mean(1.0, 1.0657, 16), 2.0, None, 0.25, Mean(0.5, 0.5912, 8))
    print_place(Place(3, 0.5, (2, 3), 4, -0.25, curved, path))
    out = " ".join(capsys.readouterr().out.split())
    assert "varies on 2 and 3 of 4 prompts; ||grad J||^2 -0.25" in out
    assert "-0.5 to 0.25 where it was looked for (residual 0.12); |c| 0.17 +- 0.32 along that direction" in out
    assert "1.6 by the upper estimate, 0.625; along the direction found unknown (not distinguishable from 0)" in out
    assert "curvature along it 1 +- 1.1, secant 2" in out
    assert "bound unknown (upper estimate of c), second order +0.2500, realised +0.5000 +- 0.5912" in out
    assert "supports a rate of 1.6; the lower one cannot be distinguished from 0." in out
    assert "changes the mean reward by less than 0.59, too little to be measured" in out
    assert "safe" not in out


@pytest.mark.parametrize(
    ("made", "margin", "predicted", "said"),
    [
        (0.5, 0.1, 0.45, "improves the mean reward by 0.5 +- 0.1, as slope and curvature predict"),
        (-0.5, 0.1, 0.2, "worsens the mean reward by 0.5 +- 0.1, which is not what slope and curvature predict"),
    ],
)
def test_an_update_in_words(made, margin, predicted, said):
    path = Along(0.5, 0.25, Mean(1.0, 1.0, 16), 2.0, None, predicted, Mean(made, margin, 8))
    curved = Curvature(lowest=-0.5, highest=0.25, residual=0.125, elsewhere=Mean(-0.25, 0.1, 4))
    one, two = in_words(Place(3, 0.5, (2, 3), 4, -0.25, curved, path))
    assert one.endswith("supports a rate of 1.6; by the lower one 4.")
    assert said in two


def test_nothing_to_divide_by():
    assert Curvature(0.0, 0.0, 0.0, Mean(0.0, 0.0, 4)).rate == math.inf
