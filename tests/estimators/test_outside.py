"""The noise scale and the score norms against other people's code and formulas.

Our own tests compare with loop autograd and with enumeration, by formulas that we wrote down ourselves. An outsider's
answer to the same question would show a wrong question.
"""

import math
import random

import pytest
import torch

from oblrpo import estimators
from oblrpo.scores import ScoreTape
from tests.scores import models
from tests.scores.stay_double import StayDouble
from tests.scores.zoo import build_family

PROMPTS, OUTPUTS = 24, 3


def drawn(name="llama-tied-biased"):
    """A small policy in float64, completions, and their share of low tokens as rewards, so that there is a signal."""
    torch.manual_seed(5)
    model, data = build_family(name), models.batch(PROMPTS * OUTPUTS)
    low_S = (data[0][:, data[2] :] < models.VOCABULARY // 2).double().mean(1)
    return model, data, low_S.view(PROMPTS, OUTPUTS)


def ours(model, data, rewards_PG):
    """The moments as a run takes them, and the advantages behind them."""
    with ScoreTape(model) as tape:
        tape.record(models.logps(model, *data))
    norm2_PG = tape.norm2().view(PROMPTS, OUTPUTS)
    advantages_PG = rewards_PG - estimators.baseline("oblr", rewards_PG, norm2_PG=norm2_PG)
    group_norm2_P = tape.accumulate(-advantages_PG.flatten() / rewards_PG.numel(), group_size=OUTPUTS) * PROMPTS**2
    found = estimators.moments(group_norm2_P, estimators.squared_norm(list(model.parameters())))
    model.zero_grad()
    return found, advantages_PG


def losses_P(model, data, advantages_PG):
    """The loss of every prompt, whose mean is that of the batch: what gns-pytorch calls the loss of an example."""
    return -(advantages_PG * models.logps(model, *data).view(PROMPTS, OUTPUTS)).mean(1)


@pytest.fixture
def compute_gns():
    return pytest.importorskip("gns_pytorch", reason="gns-pytorch is of the extra `dev`").compute_gns


@pytest.fixture
def default_type():
    """Set torch's default type, until the test ends."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize(("sums_in", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_noise_scale_is_that_of_gns_pytorch_over_all_parameters_and_the_whole_batch(
    compute_gns, sums_in, rtol, default_type
):
    """Their gradients of prompts come from autograd, ours from the tape: nothing is shared but the model.

    They add squares up in torch's default type, whatever the model's, and lose digits with it.
    """
    with StayDouble():
        model, data, rewards_PG = drawn()
        found, advantages_PG = ours(model, data, rewards_PG)
        loss_P = losses_P(model, data, advantages_PG)
        default_type(sums_in)
        theirs = compute_gns(loss_P, model, param_percentage=1.0, batch_percentage=1.0)
    assert 0 < found.critical_batch_size < math.inf
    assert found.critical_batch_size == pytest.approx(theirs, rel=rtol)


def test_gns_pytorch_at_its_defaults_answers_for_a_quarter_of_the_batch_and_ten_parameters(compute_gns):
    """docs/noise.md says so: whoever compares with the defaults compares another quantity, and a random one."""
    with StayDouble():
        model, data, rewards_PG = drawn()
        _, advantages_PG = ours(model, data, rewards_PG)
        loss_P = losses_P(model, data, advantages_PG)
        assert len(list(model.parameters())) > 10
        found = []
        for seed in range(3):
            random.seed(seed)
            found.append(compute_gns(loss_P, model))
            random.seed(seed)
            quarter_P = loss_P[: PROMPTS // 4]
            chosen = torch.nn.ParameterList(random.sample(list(model.parameters()), 10))
            assert found[-1] == pytest.approx(compute_gns(quarter_P, chosen, 1.0, 1.0), rel=1e-4)
    assert len(set(found)) > 1


def test_where_noise_drowns_the_signal_gns_pytorch_says_0_and_we_say_infinite(compute_gns):
    """Two prompts that pull in opposite directions: no batch is large enough, as far as these two can tell."""
    model = torch.nn.Linear(2, 1, bias=False)
    gradients_PD = torch.tensor([[1.0, 2.0], [-1.0, -1.0]])
    found = estimators.moments(gradients_PD.square().sum(1), gradients_PD.mean(0).square().sum())
    assert found.signal2 < 0
    assert found.critical_batch_size == math.inf
    assert compute_gns(model(gradients_PD)[:, 0], model, param_percentage=1.0, batch_percentage=1.0) == 0


@pytest.mark.parametrize("method", ["auto", "gram", "instantiate", "streamed"])
def test_score_norms_of_linear_layers_are_those_of_the_formula_in_nanogns(method):
    """|| sum_t g_t x_t' ||^2 = sum_tu (g_t'g_u) (x_t'x_u), from inputs and output gradients that plain hooks see.

    As in `add_exact_hooks` of CerebrasResearch/nanoGNS (approx/hook.py at b3b0c9c), which takes it in float32. Only the
    weights of linear layers are trained here, so that the tape's norms hold nothing else.
    """
    with StayDouble():
        model, data, _ = drawn("llama-untied")
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        model.requires_grad_(False)
        for module in linear:
            module.weight.requires_grad_()
        with ScoreTape(model, method) as tape:
            tape.record(models.logps(model, *data))
        seen = []
        hooks = [module.register_forward_hook(lambda _, args, out: seen.append((args[0], out))) for module in linear]
        logps_S = models.logps(model, *data)
        for hook in hooks:
            hook.remove()
    outputs = torch.autograd.grad(logps_S.sum(), [output for _, output in seen])
    expected_S = torch.zeros_like(logps_S)
    for (x_STC, _), g_STR in zip(seen, outputs, strict=True):
        expected_S += ((g_STR @ g_STR.mT) * (x_STC @ x_STC.mT)).sum((1, 2)).detach()
    assert len(seen) == len(linear) > 10
    torch.testing.assert_close(tape.norm2(), expected_S, rtol=1e-13, atol=0)
