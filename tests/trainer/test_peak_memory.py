import dataclasses
import gc
import sys

import pytest
import torch

from oblrpo.memory import peak_bytes
from oblrpo.policy import Sequences, make_policy
from oblrpo.settings import AlgorithmConfig, OptimConfig, PolicyConfig, RolloutConfig, ScoresConfig, TrainConfig
from oblrpo.step import Batch
from oblrpo.step.flow import ImportanceWeights
from oblrpo.trainer.peak_memory import peak_memory
from oblrpo.trainer.setup import make_learner

PROMPT, LONGEST, P, G = 20, 44, 6, 4
SIZES = PolicyConfig(model_args={"hidden_size": 128, "num_hidden_layers": 4})


@pytest.fixture(autouse=True)
def few_objects_to_collect():
    """`peak_bytes` collects garbage first, which takes a second over all that the libraries have made."""
    gc.freeze()
    yield
    gc.unfreeze()


def learner_of(tokens=0, beta=0.0, look_steps=0, prompts=P, **optim):
    rollout = RolloutConfig(
        prompts_per_step=prompts, num_generations=G, max_completion_length=LONGEST, tokens_per_micro_batch=tokens
    )
    scores = ScoresConfig(ledger_steps=0, look_steps=look_steps)
    config = TrainConfig(
        policy=SIZES, rollout=rollout, scores=scores, optim=OptimConfig(**optim), algorithm=AlgorithmConfig(beta=beta)
    )
    torch.manual_seed(0)
    return make_learner(make_policy(config.policy), None, config), config


@pytest.mark.parametrize("tokens", [0, 600])  # a half of 1,536 tokens at once; 512
def test_activations_are_predicted(tokens):
    learner, config = learner_of(tokens)
    parameters = learner.policy.parameters
    before = [p.detach().clone() for p in parameters]
    predicted = peak_memory(learner, config, PROMPT, libraries=1)
    together = P // 2 if not tokens else tokens // (G * (PROMPT + LONGEST))  # a half of the prompts at a time
    assert predicted.tokens == together * G * (PROMPT + LONGEST)
    assert all(map(torch.equal, before, parameters))
    assert all(p.grad is None for p in parameters)
    ids_ST = torch.randint(250, (P * G, PROMPT + LONGEST))
    mask_ST = torch.ones_like(ids_ST)
    own_ST = mask_ST.clone()
    own_ST[:, :PROMPT] = 0
    batch = Batch.of(Sequences(ids_ST, mask_ST, own_ST, PROMPT), torch.rand(P, G), None, learner.algorithm)
    weights, below_PG = ImportanceWeights(learner.ratio), torch.full((P, G), -1.0)
    peak = peak_bytes(lambda: learner.gradient(batch, below_PG, weights), "cpu")
    assert predicted.activations + predicted.gradient == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    ("prompts", "look_steps", "together"),
    [(6, 10, 6), (12, 0, 6), (12, 10, 8), (40, 10, 20), (40, 30, 28), (40, 100, 40), (40, 1, 40)],
)
def test_looks_are_at_as_many_prompts_as_they_may_be(prompts, look_steps, together):
    """Gradients at a half, first looks at eight, later ones at what 2 % of the steps between pays for, or all."""
    learner, config = learner_of(look_steps=look_steps, prompts=prompts)
    assert peak_memory(learner, config, PROMPT, libraries=0).tokens == together * G * (PROMPT + LONGEST)


def test_what_is_there_all_the_time():
    learner, config = learner_of(600)
    found = peak_memory(learner, config, PROMPT, libraries=10**6)
    weights = 4 * sum(p.numel() for p in learner.policy.parameters)
    assert (found.weights, found.gradient, found.optimizer, found.copy) == (
        weights,
        1.5 * weights,
        2 * weights,
        weights,
    )
    assert found.update == weights // 2
    assert found.total == 10**6 + 5 * weights + found.activations + found.slack
    assert found.slack == pytest.approx(1.2 * found.activations, rel=1e-3)
    assert "activations of 512 tokens" in str(found)
    learner, config = learner_of(600, optimizer="SGD", schedule="off", learning_rate=0.1)
    plain = peak_memory(learner, config, PROMPT, libraries=0)
    assert (plain.optimizer, plain.copy, plain.update) == (0, 0, 0)
    momentum = dataclasses.replace(config, optim=OptimConfig(optimizer="SGD", optimizer_args={"momentum": 0.9}))
    assert peak_memory(learner, momentum, PROMPT, libraries=0).optimizer == weights


def test_the_reference_of_a_penalty_is_there_all_the_time():
    learner, config = learner_of(600, beta=0.1)
    found = peak_memory(learner, config, PROMPT, libraries=0)
    assert found.reference == found.gradient / 1.5
    assert found.total == 6 * found.reference + found.activations + found.slack
    assert "1.00 reference of the KL penalty" in str(dataclasses.replace(found, reference=10**9))


def test_more_than_there_is_comes_with_a_bound_that_fits():
    learner, config = learner_of()
    found = peak_memory(learner, config, PROMPT, libraries=0)
    assert "more than" not in str(found)
    little = dataclasses.replace(found, here=int(0.8 * found.total))
    said, bound = str(little).split("more than the 0 GB here; bound it with --tokens-per-micro-batch ")
    assert said.endswith(": ")
    bounded = peak_memory(*learner_of(int(bound)), PROMPT, libraries=0)
    assert bounded.tokens == int(bound) < found.tokens
    assert bounded.total < little.here
    assert "lower --num-generations" in str(dataclasses.replace(found, here=found.weights))


def test_the_trials_have_no_padding_whose_gradient_of_zeros_is_endless(monkeypatch):
    monkeypatch.setattr(
        sys.modules[__name__], "SIZES", PolicyConfig(model_args={"hidden_size": 128, "num_hidden_layers": 8})
    )
    learner, config = learner_of()
    ids = torch.arange(48) % 7
    ids[0] = learner.policy.pad_token
    monkeypatch.setattr(torch, "randint", lambda most, shape, **_: ids[: shape[1]].expand(shape).clone())
    assert peak_memory(learner, config, PROMPT, libraries=0).activations > 0


def test_prompts_may_be_much_shorter_than_completions():
    learner, config = learner_of()
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_completion_length=512))
    assert peak_memory(learner, config, 1, libraries=0).activations > 0
