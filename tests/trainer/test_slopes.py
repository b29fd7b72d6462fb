"""The slope that sets the measured rate is g'd / y, of the whole gradient g and of the update d as it was made."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from oblrpo.estimators.measured_rate import SCALE_MEMORY, Slope
from oblrpo.policy import make_policy
from oblrpo.policy.adapters import add_adapter
from oblrpo.rollout import sample
from oblrpo.scores import ScoreTape
from oblrpo.settings import PolicyConfig
from tests.trainer.learners import learn, learner_of, samples_of

P, G = 4, 3
CLIPPED = {"max_grad_norm": 1e-2}  # some hundredths of the gradients here
DECAY = {"optimizer": torch.optim.AdamW, "optimizer_args": {"weight_decay": 0.1}}
SETTINGS = {
    "SGD": {},
    "SGD, momentum": {"optimizer_args": {"momentum": 0.9}},
    "AdamW": {"optimizer": torch.optim.AdamW},
    "AdamW, decay": DECAY,
    "two updates": {"num_iterations": 2},
    "LoRA": {"optimizer": torch.optim.AdamW, "lora": True},
    "two groups": {"optimizer": torch.optim.AdamW, "groups": True},
    "skipped": {"skip": True},
    "resumed": DECAY | {"resume": True},
}


def policy_of(lora):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    policy = make_policy(PolicyConfig(model_args=sizes, device="cpu"))
    adapters = PolicyConfig(model="a model", lora={"r": 2})
    return replace(policy, model=add_adapter(policy.model, adapters).eval()) if lora else policy


def in_two_groups(learner):
    """Every second parameter in a group of its own, whose rate is three times as high."""
    optimizer = learner.optimizer
    first = optimizer.param_groups[0]
    second, first["params"] = first["params"][1::2], first["params"][::2]
    optimizer.add_param_group({"params": second, "lr": 3 * first["lr"]})
    learner.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers for it
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_slope_is_of_the_whole_gradient_and_the_update(monkeypatch, name, clipped):
    more = SETTINGS[name] | (CLIPPED if clipped else {})
    lora, groups, skip, resume = (more.pop(key, False) for key in ("lora", "groups", "skip", "resume"))
    policy = policy_of(lora)
    learner = learner_of(policy, "oblrpo_shrunk", lr=1e-2, **more)
    if groups:
        in_two_groups(learner)
    weights = [p.detach().clone() for p in policy.parameters]
    seen, expected, gradient_of = [], [], learner.gradient
    observe = Slope.observe

    def observed(slope, value, length, prompts):
        schedule = learner.schedule  # what it predicts is the batch's scale with a part of its own
        own = (1 - SCALE_MEMORY) * schedule.average.scale
        seen.append(value * length * math.sqrt((schedule.rule.state.scale - own) / SCALE_MEMORY))
        observe(slope, value, length, prompts)

    def taken(batch, baseline_PG, importance):
        gradient = gradient_of(batch, baseline_PG, importance)
        if importance.old_token_logps_SC is None:  # the first of a batch: what the update before it has gained or lost
            moved = zip(policy.parameters, weights, strict=True)
            expected.append(-sum(float((p.grad.double() * (p.detach() - before)).sum()) for p, before in moved))
            weights[:] = [p.detach().clone() for p in policy.parameters]
        return gradient

    monkeypatch.setattr(Slope, "observe", observed)
    learner.gradient = taken
    for step in range(1, 5):
        torch.manual_seed(step)
        samples = samples_of(sample(policy, ["a", "bc", "d", "ef"], G, 5, 1.0), torch.rand(P, G))
        if skip and step == 3:
            with monkeypatch.context() as broken:
                broken.setattr(ScoreTape, "gram", lambda *_: torch.full((P, G, G), math.inf))  # of a look
                assert not learn(learner, samples, step).updates
        if resume and step == 3:
            state, learner = copy.deepcopy(learner.state_dict()), learner_of(policy, "oblrpo_shrunk", lr=1e-2, **more)
            learner.load_state_dict(state, "a run")
            gradient_of, learner.gradient = learner.gradient, taken
        assert learn(learner, samples, step).updates
    assert len(seen) == 3
    assert seen == pytest.approx(expected[1:], rel=0.02)  # the update is kept in bfloat16
