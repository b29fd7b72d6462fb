"""How far an update moves the policy, and the measured rates of one that computes in bfloat16."""

import dataclasses
import math

import pytest
import torch

from oblrpo.policy import Policy
from oblrpo.policy.sequences import MicroBatches
from oblrpo.rollout import sample
from oblrpo.step import Movement
from oblrpo.tables.algorithms import ALGORITHMS
from tests.trainer.learners import learn, learner_of, one_pass, samples_of


@pytest.fixture
def samples(tiny_policy):
    torch.manual_seed(0)
    return samples_of(sample(tiny_policy, ["1+2=", "3+4=", "5+6="], 4, 12, 1.0), torch.rand(3, 4))


@pytest.mark.parametrize("schedule", ["auto", "kl"])
def test_under_bf16_the_rate_gets_up_from_1e_9_as_it_does_in_float32(tiny_policy, samples, schedule):
    first = torch.nn.utils.parameters_to_vector(tiny_policy.parameters).detach().clone()
    last, kls = {}, {}
    for bf16 in (False, True):
        torch.nn.utils.vector_to_parameters(first.clone(), tiny_policy.parameters)
        policy = dataclasses.replace(tiny_policy, bf16=bf16)
        algorithm = dataclasses.replace(ALGORITHMS["rloo"], schedule=schedule)
        start = {"auto": 1e-9, "kl": 1e-5}[schedule]
        learner = learner_of(policy, algorithm, optimizer=torch.optim.AdamW, lr=start, measured_one_in=1)
        updates = [learn(learner, samples).updates[0] for _ in range(15)]
        last[bf16] = [update.learning_rate for update in updates[-3:]]
        kls[bf16] = [update.kl for update in updates[:4]]
        assert all(update.kl > 0 for update in updates[-3:])
    # Their policies part, and with them what an update may be; single steps of `kl` are 1.5 times.
    assert all(0.4 < short / exact < 2.5 for short, exact in zip(last[True], last[False], strict=True))
    if schedule == "kl":  # the first rates are the same; rounding taken for movement made it 8, 4, 2.5 and 1.5 times
        assert all(0.4 < short / exact < 1.4 for short, exact in zip(kls[True], kls[False], strict=True))


def test_where_the_policy_rounds_the_movement_is_log_pi_itself(tiny_policy, samples):
    """And costs no forward before the update: the schedule takes the one at the old weights."""
    policy = dataclasses.replace(tiny_policy, bf16=True)
    learner = learner_of(policy, "rloo", lr=0.0, measured_one_in=1)
    gradient = one_pass(learner, samples).gradient
    own_SC = gradient.batch.sequences.own_SC
    torch.testing.assert_close(
        learner.movement.watch(gradient)(),
        torch.where(own_SC.bool(), gradient.token_logps_SC, 0.0),
        atol=0.05,
        rtol=0.05,
    )


@pytest.mark.parametrize("unknown", [[], [7], [2, 3, 11], [*range(12)]])
def test_only_rows_whose_log_pi_nothing_has_taken_are_scored_before_the_update(
    tiny_policy, samples, monkeypatch, unknown
):
    """The change is that of all rows scored before and after, whatever their lengths."""
    sequences, logps, rows = samples.rollouts.sequences, Policy.logps, []
    sequences.mask_ST[unknown, sequences.start + 3 :] = sequences.own_ST[unknown, sequences.start + 3 :] = 0
    own_SC = sequences.own_SC.bool()
    before_SC = torch.where(own_SC, tiny_policy.logps(sequences).token_logps_SC.detach(), 0.0)
    known_SC = before_SC.clone()
    known_SC[unknown] = torch.where(own_SC[unknown], math.nan, 0.0)

    def counted(self, part, *more):
        rows.append(part.count)
        return logps(self, part, *more)

    with monkeypatch.context() as patched:
        patched.setattr(Policy, "logps", counted)
        change = Movement(tiny_policy, 1.0, MicroBatches(2)).of(sequences, known_SC)
    assert sum(rows) == len(unknown)
    for parameter in tiny_policy.parameters:
        parameter.data += 0.1 * torch.randn_like(parameter)
    after_SC = torch.where(own_SC, tiny_policy.logps(sequences).token_logps_SC.detach(), 0.0)
    assert float((after_SC - before_SC).abs().max()) > 0.1
    torch.testing.assert_close(change(), after_SC - before_SC, rtol=1e-4, atol=1e-5)
