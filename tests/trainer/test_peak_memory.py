import dataclasses
import sys

import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.memory import keep_freed, peak_bytes
from oblrpo.policy import Sequences, make_policy
from oblrpo.rollout.room import USED_SHARE, sampling_memory
from oblrpo.settings import (
    AlgorithmConfig,
    OptimConfig,
    PolicyConfig,
    RolloutConfig,
    ScoresConfig,
    TrainConfig,
    adjustable,
    with_settings,
)
from oblrpo.step import Batch
from oblrpo.step.flow import ImportanceWeights
from oblrpo.trainer import peak_memory as module
from oblrpo.trainer.peak_memory import USABLE_SHARE, fit, peak_memory, remedy
from oblrpo.trainer.setup import make_learner

PROMPT, LONGEST, P, G = 20, 44, 6, 4
SIZES = PolicyConfig(model_args={"hidden_size": 128, "num_hidden_layers": 4})


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


@pytest.mark.parametrize(("tokens", "together"), [(0, 12), (600, 6)])  # rows of half of six prompts
def test_activations_are_predicted(tokens, together):
    learner, config = learner_of(tokens)
    parameters = learner.policy.parameters
    before = [p.detach().clone() for p in parameters]
    predicted = peak_memory(learner.policy, config, PROMPT)
    assert predicted.tokens == together * (PROMPT + LONGEST)
    assert all(map(torch.equal, before, parameters))
    assert all(p.grad is None for p in parameters)
    ids_ST = torch.randint(250, (P * G, PROMPT + LONGEST))
    mask_ST = torch.ones_like(ids_ST)
    own_ST = mask_ST.clone()
    own_ST[:, :PROMPT] = 0
    batch = Batch.of(Sequences(ids_ST, mask_ST, own_ST, PROMPT), torch.rand(P, G), None, learner.algorithm)
    weights, below_PG = ImportanceWeights(learner.ratio), torch.full((P, G), -1.0)
    peak = peak_bytes(lambda: learner.gradient(batch, below_PG, weights), "cpu")
    assert predicted.activations + predicted.gradient + predicted.half == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    ("prompts", "look_steps", "together"),
    [(6, 10, 6), (12, 0, 6), (12, 10, 8), (40, 10, 20), (40, 30, 28), (40, 100, 40), (40, 1, 40)],
)
def test_looks_are_at_as_many_prompts_as_they_may_be(prompts, look_steps, together):
    """Gradients at a half, first looks at eight, later ones at what 2 % of the steps between pays for, or all."""
    learner, config = learner_of(look_steps=look_steps, prompts=prompts)
    assert peak_memory(learner.policy, config, PROMPT).tokens == together * G * (PROMPT + LONGEST)


def test_what_is_there_in_every_phase():
    learner, config = learner_of(600)
    found = peak_memory(learner.policy, config, PROMPT, libraries=10**6)
    weights = 4 * sum(p.numel() for p in learner.policy.parameters)
    largest = 4 * max(p.numel() for p in learner.policy.parameters)
    assert (found.weights, found.gradient, found.half, found.optimizer, found.copy) == (
        weights,
        weights,
        weights // 2,
        2 * weights,
        weights,
    )
    assert (found.update, found.working) == (weights // 2, 2 * largest)
    sums = {name: sum(parts.values()) for name, parts in found.phases.items()}
    assert found.kept == 10**6 + 3 * weights
    assert sums["sampling"] == weights // 2 + found.keys_values
    assert sums["training"] == 2 * weights + found.activations + found.slack
    assert sums["the update"] == 2 * weights + found.working
    assert found.total == found.kept + max(sums.values()) == found.training
    assert found.slack == pytest.approx(1.2 * found.activations, rel=1e-3)
    assert "activations of 384 tokens" in str(dataclasses.replace(found, activations=10**9))
    learner, config = learner_of(600, optimizer="SGD", schedule="off", learning_rate=0.1)
    plain = peak_memory(learner.policy, config, PROMPT)
    assert (plain.optimizer, plain.copy, plain.update, plain.working) == (0, 0, 0, 0)
    momentum = dataclasses.replace(config, optim=OptimConfig(optimizer="SGD", optimizer_args={"momentum": 0.9}))
    assert peak_memory(learner.policy, momentum, PROMPT).optimizer == weights


def test_the_reference_of_a_penalty_is_there_all_the_time():
    learner, config = learner_of(600, beta=0.1)
    found = peak_memory(learner.policy, config, PROMPT)
    assert found.reference == found.gradient
    assert found.kept == 4 * found.reference
    assert "1.00 reference of the KL penalty" in str(dataclasses.replace(found, reference=10**9))


def test_where_log_probabilities_are_rounded_the_weights_are_held_twice():
    learner, config = learner_of(600)
    policy = dataclasses.replace(learner.policy, bf16=True)
    assert peak_memory(policy, config, PROMPT).copy == 2 * peak_memory(learner.policy, config, PROMPT).copy


def test_the_largest_phase_is_shown():
    learner, config = learner_of()
    found = peak_memory(learner.policy, config, PROMPT)
    assert "at the peak, in training (" in str(found)
    sampling = dataclasses.replace(found, keys_values=10**12)
    assert "about 1000.0 GB at the peak, in sampling (" in str(sampling)
    assert f"1000.00 keys and values of {P * G} completions" in str(sampling)
    assert str(sampling).endswith("in training, 0.0 in the update")


def test_more_than_there_is_comes_with_a_bound_that_fits(monkeypatch):
    learner, config = learner_of()
    case = (learner.policy, config, PROMPT)
    found = peak_memory(*case)
    assert not remedy(*case, found)
    for part in (0.8, 0.5):
        monkeypatch.setattr(module, "machine_bytes", lambda device, part=part: int(part * found.total))
        little = peak_memory(*case)
        said = remedy(*case, little)
        assert said.startswith(": more than the 0 GB here; about ")
        bound = int(said.split("--tokens-per-micro-batch ")[1].split()[0])
        settings = dataclasses.replace(config.rollout, tokens_per_micro_batch=bound)
        policy = dataclasses.replace(learner.policy, checkpointing="--gradient-checkpointing" in said)
        bounded = peak_memory(policy, dataclasses.replace(config, rollout=settings), PROMPT)
        assert bounded.tokens <= bound < found.tokens
        assert bounded.total < little.here
    nothing = dataclasses.replace(found, here=found.weights)
    assert "train adapters (--lora), or lower --num-generations" in remedy(*case, nothing)


def test_averages_that_do_not_fit_are_said_to_be_what_is_too_much(monkeypatch):
    """Weights, gradient, AdamW's averages and the measured rate take 20 bytes a weight, whatever the micro-batch."""
    learner, config = learner_of(G * (PROMPT + LONGEST))
    case = (learner.policy, config, PROMPT)
    policy = dataclasses.replace(learner.policy, checkpointing=True)
    least = peak_memory(policy, config, PROMPT)
    room = (least.total - least.optimizer) / USABLE_SHARE
    assert room < least.total
    monkeypatch.setattr(module, "machine_bytes", lambda device: int(room * 1.01))
    said = remedy(*case, peak_memory(*case))
    assert "with --gradient-checkpointing --optimizer SGD --tokens-per-micro-batch" in said
    assert said.endswith(", or train adapters (--lora)")


def test_the_trials_have_no_padding_whose_gradient_of_zeros_is_endless(monkeypatch):
    monkeypatch.setattr(
        sys.modules[__name__], "SIZES", PolicyConfig(model_args={"hidden_size": 128, "num_hidden_layers": 8})
    )
    learner, config = learner_of()
    ids = torch.arange(48) % 7
    ids[0] = learner.policy.pad_token
    monkeypatch.setattr(torch, "randint", lambda most, shape, **_: ids[: shape[1]].expand(shape).clone())
    assert peak_memory(learner.policy, config, PROMPT).activations > 0


def test_prompts_may_be_much_shorter_than_completions():
    learner, config = learner_of()
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_completion_length=512))
    assert peak_memory(learner.policy, config, 1).activations > 0


def fitted(monkeypatch, free, config, policy, **requested):
    """The config of a run for which so many bytes are free, and the prediction."""
    monkeypatch.setattr(module, "free_bytes", lambda device: free)
    config = with_settings(config, requested, "a test")
    return fit(policy, config, PROMPT, adjustable(config))


def test_completions_are_sampled_in_blocks_of_equal_size_that_fit(monkeypatch):
    learner, config = learner_of()
    policy, sampling = learner.policy, sampling_memory(learner.policy)
    kept = peak_memory(policy, config, PROMPT)
    ahead = kept.optimizer + kept.update
    for groups, rows in ((6, 24), (5, 12), (3, 12), (2, 8), (1, 4)):
        room = sampling.of(groups, G, PROMPT, LONGEST) / USED_SHARE + ahead
        found, peak = fitted(monkeypatch, int(room * 1.001), config, policy)
        assert found.rollout.max_num_seqs == max(rows, config.run.eval_samples)
        assert peak.rows == rows
        assert peak.keys_values == sampling.of(rows // G, G, PROMPT, LONGEST)
        assert fitted(monkeypatch, 0, found, policy)[0].rollout.max_num_seqs == rows  # a resumed run keeps it
    assert fitted(monkeypatch, 0, config, policy, max_num_seqs=8)[0].rollout.max_num_seqs == 8
    engine = with_settings(config, {"sampler": "vllm", "tokens_per_micro_batch": 256}, "a test")
    assert fitted(monkeypatch, 0, engine, policy) == (engine, None)


@pytest.mark.parametrize(("samples", "count", "name"), [(4, 4, "num_generations"), (9, 9, "eval_samples")])
def test_what_cannot_be_sampled_at_all_is_refused_before_the_run(samples, count, name, monkeypatch):
    learner, config = learner_of()
    kept = peak_memory(learner.policy, config, PROMPT)
    room = sampling_memory(learner.policy).of(1, G, PROMPT, LONGEST) + kept.optimizer + kept.update
    said = rf"a prompt's {count} completions \({name}\) of up to 44 tokens take .* are free for it: lower {name} or"
    with pytest.raises(InputError, match=said):
        fitted(monkeypatch, room - (samples == 4), config, learner.policy, eval_samples=samples)


def test_the_tokens_of_a_micro_batch_are_found_where_they_are_not_set(monkeypatch):
    learner, config = learner_of()
    policy, whole = learner.policy, peak_memory(learner.policy, config, PROMPT)
    group = G * (PROMPT + LONGEST)
    for share, groups, together in ((1.2, 0, 12), (0.8, 2, 6), (0.6, 1, 4)):
        room = int(share * (whole.training - whole.weights) / USABLE_SHARE)
        found, peak = fitted(monkeypatch, room, config, policy)
        assert found.rollout.tokens_per_micro_batch == groups * group
        assert peak.training - peak.weights <= USABLE_SHARE * room
        assert peak.tokens == together * (PROMPT + LONGEST)
    assert (
        fitted(monkeypatch, room, config, policy, tokens_per_micro_batch=512)[0].rollout.tokens_per_micro_batch == 512
    )
    assert not fitted(monkeypatch, room, config, policy, prompts_per_micro_batch=2)[0].rollout.tokens_per_micro_batch
    short = room // 4  # for one prompt's completions, too: still one prompt at a time, and not all
    found, _ = fitted(monkeypatch, short, config, policy, max_num_seqs=G)
    assert found.rollout.tokens_per_micro_batch == group


def test_whoever_has_large_tensors_from_the_system_pays_no_heap(monkeypatch):
    learner, config = learner_of()
    assert peak_memory(learner.policy, config, PROMPT).slack > 0
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4194304")
    monkeypatch.setattr("ctypes.CDLL", None)  # glibc is left as its variable has set it
    keep_freed()
    assert peak_memory(learner.policy, config, PROMPT).slack == 0
