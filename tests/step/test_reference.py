"""The KL penalty to the policy before the first step."""

import pytest
import torch

from oblrpo.policy import make_policy
from oblrpo.rollout import sample
from oblrpo.settings import PolicyConfig
from oblrpo.tasks import Problem
from tests.trainer import learners

P, G, LONGEST, BETA = 4, 3, 6, 0.5
PROBLEMS = [Problem(text, text) for text in ("a", "bcd", "ef", "ghij")]


def learner_of(policy, algorithm="rloo", beta=BETA, **settings):
    """A learner whose reward goes by the bytes of a completion, so that there is signal from the first step."""

    def rewards(problems, completions, ids):
        return [[sum(completions[p * G + j].encode()) % 5 / 4 for j in range(G)] for p in range(P)], [[True] * G] * P

    settings |= {"num_generations": G, "max_completion_length": LONGEST, "beta": beta}
    return learners.learner_of(policy, algorithm, rewards=rewards, **settings)


def weights(policy):
    return [p.detach().clone() for p in policy.parameters]


def logps_PG(policy, sequences):
    with torch.no_grad():
        return policy.logps(sequences).logps_S.view(P, G)


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}, {"prompts_per_micro_batch": 1}, {"temperature": 0.7}])
def test_the_baseline_sees_the_reward_less_the_penalty(tiny_policy, settings):
    learner = learner_of(tiny_policy, "rloo", lr=0.3, **settings)
    before = weights(tiny_policy)
    torch.manual_seed(3)
    first = learner.step(PROBLEMS, 1)
    assert not first.kl_PG.any()  # bit for bit: it is the reference itself
    assert torch.equal(first.updates[0].gradient.batch.rewards_PG, first.samples.rewards_PG)
    now = weights(tiny_policy)
    second = learner.step(PROBLEMS, 2)
    sequences, temperature = second.samples.rollouts.sequences, settings.get("temperature", 1.0)
    for parameter, value in zip(tiny_policy.parameters, now, strict=True):
        parameter.data = value
    with torch.no_grad():
        log_ratio_PG = tiny_policy.logps(sequences, temperature).logps_S.view(P, G)
        for parameter, value in zip(tiny_policy.parameters, before, strict=True):
            parameter.data = value
        log_ratio_PG -= tiny_policy.logps(sequences, temperature).logps_S.view(P, G)
    assert log_ratio_PG.abs().max() > 0.01
    torch.testing.assert_close(second.kl_PG, log_ratio_PG, rtol=1e-4, atol=1e-5)
    wanted_PG = second.samples.rewards_PG - BETA * log_ratio_PG
    seen = second.updates[-1].gradient
    torch.testing.assert_close(seen.batch.rewards_PG, wanted_PG, rtol=1e-4, atol=1e-5)
    others_PG = (wanted_PG.sum(1, keepdim=True) - wanted_PG) / (G - 1)
    torch.testing.assert_close(second.baseline_PG, others_PG, rtol=1e-4, atol=1e-5)


def test_a_penalty_alone_leads_back_to_the_reference(tiny_policy):
    learner = learner_of(tiny_policy, beta=1.0, lr=0.02, optimizer=torch.optim.AdamW)
    learner.rewards = lambda problems, completions, ids: ([[0.0] * G] * P, [[True] * G] * P)
    torch.manual_seed(0)
    learner.step(PROBLEMS, 1)  # makes the reference; there is no signal
    with torch.no_grad():
        for parameter in tiny_policy.parameters:
            parameter += 0.15 * torch.randn_like(parameter)
    distances = [learner.step(PROBLEMS, step).kl_PG.mean().item() for step in range(2, 42)]
    assert sum(distances[-5:]) < 0.5 * sum(distances[:5])


def test_without_a_penalty_there_is_no_reference(tiny_policy):
    learner = learner_of(tiny_policy, beta=0.0)
    assert learner.reference is None
    assert "reference" not in learner.state_dict()
    assert learner.step(PROBLEMS, 1).kl_PG is None


def test_the_reference_is_kept_with_the_state_and_is_no_other_models(tiny_policy):
    learner = learner_of(tiny_policy, lr=0.3)
    assert learner.state_dict()["reference"]["weights"] == []  # the policy itself
    before = weights(tiny_policy)
    learner.step(PROBLEMS, 1)
    state = learner.state_dict()
    assert all(map(torch.equal, state["reference"]["weights"], before))
    assert not all(map(torch.equal, weights(tiny_policy), before))
    other = make_policy(
        PolicyConfig(model_args={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}, device="cpu")
    )
    with pytest.raises(ValueError, match="other weights than the policy"):
        learner_of(other).reference.load_state_dict(state["reference"])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers for it
def test_new_adapters_refer_to_the_model_without_them(tiny_policy):
    peft = pytest.importorskip("peft")
    from dataclasses import replace

    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = replace(tiny_policy, model=peft.get_peft_model(tiny_policy.model, lora).eval())
    learner = learner_of(policy, lr=3.0)
    learner.step(PROBLEMS, 1)
    torch.manual_seed(0)
    rollouts = sample(policy, [each.prompt for each in PROBLEMS], G, LONGEST, 1.0)
    _, kl_PG = learner.reference.penalised(rollouts.sequences, torch.zeros(P, G))
    own_PG = logps_PG(policy, rollouts.sequences)
    with policy.model.disable_adapter():
        switched_off_PG = logps_PG(policy, rollouts.sequences)
    assert (own_PG - switched_off_PG).abs().max() > 1e-3
    torch.testing.assert_close(kl_PG, own_PG - switched_off_PG, rtol=1e-4, atol=1e-5)
