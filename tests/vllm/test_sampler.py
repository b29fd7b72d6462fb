"""What a real vLLM engine draws: the policy's distribution, and the log-probabilities that go with it."""

import os
import random
import sys
from collections import Counter
from functools import partial

import numpy
import pytest
import torch
import vllm as library
from torch.nn.functional import softmax

from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.rollout import VLLMSampler, engine, make_sampler, sample
from oblrpo.rollout.transformers import TransformersSampler
from oblrpo.settings import VLLM, RolloutConfig
from tests.vllm.support import apart, policy_of, tiny_policy, update

PROMPTS, G, LONGEST = ["a", "bcdef", "gh and so on"], 4, 12
ENDS, ENGINES_OWN = [1, 50, 77], 90


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Three tokens end its completions, none of them the one of its config, which vLLM would take."""
    policy = tiny_policy(model_args={"initializer_range": 0.25, "max_position_embeddings": 256})
    policy.model.generation_config.eos_token_id = ENDS
    policy.model.config.eos_token_id = ENGINES_OWN
    return policy


@pytest.fixture(scope="module")
def sampler(policy) -> VLLMSampler:
    return make_sampler(policy, RolloutConfig(sampler="vllm"))


def drawn_by(sampler, seed=3, prompts=PROMPTS, count=G, longest=LONGEST, temperature=1.0, **settings):
    torch.manual_seed(seed)
    return sampler.sample(prompts, count, longest, temperature, **settings)


def assert_equal(ours, theirs):
    assert torch.equal(ours.sequences.ids_ST, theirs.sequences.ids_ST)
    assert torch.equal(ours.sequences.own_ST, theirs.sequences.own_ST)
    assert torch.equal(ours.sampler_logps_SC, theirs.sampler_logps_SC)


@torch.no_grad()
def deviations(policy, drawn, temperature):
    """By how many standard deviations chi-square is off for the first tokens, and for the second, given the first."""
    sequences, found = drawn.sequences, []
    logits_STV = policy.model(
        sequences.ids_ST, attention_mask=sequences.mask_ST, position_ids=(sequences.mask_ST.cumsum(1) - 1).clamp(min=0)
    ).logits.double()
    for place in (0, 1):
        column = sequences.start + place
        here_S = sequences.own_ST[:, column].bool()
        probabilities = softmax(logits_STV[here_S, column - 1] / temperature, -1).sum(0)
        counts = torch.bincount(sequences.ids_ST[here_S, column], minlength=len(probabilities)).double()
        rare = probabilities < 8
        expected = torch.cat([probabilities[~rare], probabilities[rare].sum()[None]])
        seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
        freedom = len(expected) - 1
        found.append(float(((seen - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_follow_the_policys_distribution_and_no_other(policy, sampler, temperature):
    drawn = drawn_by(sampler, prompts=["a", "bcdef"], count=4000, longest=2, temperature=temperature)
    assert max(map(abs, deviations(policy, drawn, temperature))) < 4
    before = [p.detach().clone() for p in policy.parameters]
    update(policy)
    wrong = deviations(policy, drawn, temperature)
    with torch.no_grad():
        for parameter, value in zip(policy.parameters, before, strict=True):
            parameter.copy_(value)
    assert min(wrong) > 10


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_log_probabilities_are_those_of_the_draws(policy, sampler, temperature):
    drawn = drawn_by(sampler, count=16, longest=40, temperature=temperature)
    off = apart(policy, drawn, temperature)
    assert off.mean() < 1e-5
    assert off.max() < 1e-4
    assert apart(policy, drawn, 1.1 * temperature).mean() > 0.05  # another temperature's


def test_completions_stand_in_the_order_of_prompts_and_outputs(policy, sampler, monkeypatch):
    drawn = drawn_by(sampler)
    width = drawn.sequences.start
    assert len(drawn.completions) == len(drawn.sequences.ids_ST) == len(PROMPTS) * G
    for p, row in enumerate(policy.encode(PROMPTS, LONGEST)):
        for s in range(G * p, G * p + G):
            assert drawn.sequences.ids_ST[s, width - len(row) : width].tolist() == row
            assert drawn.sequences.mask_ST[s, :width].sum() == len(row)
    for text, row in zip(drawn.completions, drawn.ids(), strict=True):
        assert text == policy.tokenizer.decode(row, skip_special_tokens=True)
    generate = sampler.engine.generate

    def reversed_outputs(*given, **settings):
        requests = generate(*given, **settings)
        for request in requests:
            request.outputs.reverse()
        return requests

    monkeypatch.setattr(sampler.engine, "generate", reversed_outputs)
    assert_equal(drawn_by(sampler), drawn)


def test_a_seed_of_torch_makes_the_same_completions_and_moves_by_the_prompts_alone(sampler):
    drawn = drawn_by(sampler)
    after = torch.random.get_rng_state()
    assert_equal(drawn_by(sampler), drawn)
    assert drawn_by(sampler, seed=4).ids() != drawn.ids()
    torch.manual_seed(3)
    torch.randint(2**48, (len(PROMPTS),))
    assert torch.equal(after, torch.random.get_rng_state())
    rows = [tuple(row) for row in drawn.ids()]
    assert len(set(rows)) == len(rows)  # the outputs of one prompt differ


def test_completions_end_at_the_policys_end_tokens_and_at_no_other(policy, sampler):
    drawn = drawn_by(sampler, count=100, longest=40)
    ends, inside = Counter(), Counter()
    for row, clipped in zip(drawn.ids(), drawn.clipped_S.tolist(), strict=True):
        assert len(row) == 40 if clipped else row[-1] in ENDS
        ends[row[-1]] += 1
        inside.update(row[:-1])
    assert not any(inside[token] for token in ENDS)
    assert all(ends[token] for token in ENDS)
    assert inside[ENGINES_OWN]
    last = drawn_by(sampler, count=400, longest=1)  # an end token that is the last of the longest is not clipped
    assert [row[-1] not in ENDS for row in last.ids()] == last.clipped_S.tolist()
    assert not last.clipped_S.all()


def test_log_probabilities_are_enough_for_the_entropy(policy, sampler):
    """Of each token -log p stands for it."""
    drawn = drawn_by(sampler, count=200, longest=1, temperature=0.7)
    with torch.no_grad():
        exact = policy.logps(drawn.sequences, 0.7).features
    of_one, of_all = drawn.features.entropy_S.double(), exact.entropy_S.double()
    error = float((of_one - of_all).std()) / len(of_one) ** 0.5
    assert float(of_one.mean()) == pytest.approx(float(of_all.mean()), abs=4 * error)


def test_top_p_draws_from_the_nucleus_alone(policy, sampler):
    drawn = drawn_by(sampler, prompts=["a"], count=300, longest=1, top_p=0.5)
    with torch.no_grad():
        p_V = softmax(policy.model(torch.tensor(policy.tokens(["a"]))).logits[0, -1], -1)
    sorted_V, order_V = p_V.sort(descending=True)
    nucleus = order_V[: int((sorted_V.cumsum(0) < 0.5).sum()) + 1]
    ids_S = drawn.sequences.completion_SC[:, 0]
    assert torch.isin(ids_S, nucleus).all()
    torch.testing.assert_close(drawn.sampler_logps_SC[:, 0], (p_V / p_V[nucleus].sum()).log()[ids_S])


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_tokens_are_those_of_our_own_loop(policy, sampler, count):
    drawn = drawn_by(sampler, count=count, longest=30, temperature=0)
    assert drawn.ids() == sample(policy, PROMPTS, count, 30, 0).ids()
    assert drawn.ids() == TransformersSampler(policy).sample(PROMPTS, count, 30, 0).ids()


def test_the_longest_sequence_fills_the_context(policy, sampler):
    drawn = drawn_by(sampler, prompts=["x" * 200], count=200, longest=56)
    assert int(drawn.sequences.lengths_S.max()) == 56
    assert apart(policy, drawn).mean() < 1e-5
    with pytest.raises(InputError, match="does not fit the model's 256"):
        drawn_by(sampler, prompts=["x" * 200], longest=57)


def test_more_prompt_tokens_than_a_batch_takes(policy, sampler):
    """The prompts of one call have more than vLLM's 4096 tokens of a batch, so that some wait; none is read in two."""
    prompts = [chr(33 + number) + "y" * 199 for number in range(30)]
    drawn = drawn_by(sampler, prompts=prompts, count=2, longest=8)
    assert apart(policy, drawn).max() < 1e-4


def test_what_the_engine_returns_is_checked(sampler, monkeypatch):
    generate = sampler.engine.generate

    def broken(change):
        def generated(*given, **settings):
            requests = generate(*given, **settings)
            change(requests)
            return requests

        monkeypatch.setattr(sampler.engine, "generate", generated)
        drawn_by(sampler)

    def cut(requests):
        output = next(out for request in requests for out in request.outputs if len(out.token_ids) > 1)
        output.token_ids, output.logprobs, output.finish_reason = output.token_ids[:1], output.logprobs[:1], "abort"

    with pytest.raises(RuntimeError, match="gave 11 completions for 3 x 4"):
        broken(lambda requests: requests[1].outputs.pop())
    with pytest.raises(RuntimeError, match=r"after 1 tokens \(abort\) without an end token"):
        broken(cut)


def test_what_opening_changes_of_torch_is_put_back():
    """Random states, threads and precision, and the class of a policy that vLLM runs by transformers' code.

    The environment comes back once nobody needs the engine.
    """
    policy, setter = policy_of("olmo2"), torch.set_num_threads
    kind = type(policy.model.model)
    bases, threads = kind.__bases__, torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("high")
        before, hook = torch.random.get_rng_state(), sys.excepthook
        environment = {**os.environ, **engine.BEFORE}  # as it was before the engines of other tests, too
        others = random.getstate(), numpy.random.get_state()[1].tolist()
        sampler = VLLMSampler(policy, VLLM())
        sampler.sync(policy)
        assert torch.equal(before, torch.random.get_rng_state())
        assert (random.getstate(), numpy.random.get_state()[1].tolist()) == others
        assert sys.excepthook is hook
        engine.put_back()
        theirs = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
        assert not {name for name in theirs if "INDUCTOR" not in name}, "torch's own, at the first update"
        assert (torch.get_num_threads(), torch.set_num_threads) == (2, setter)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
    assert type(sampler.engine.apply_model(lambda model: model)[0]).__name__ == "TransformersForCausalLM"
    assert (kind.__bases__, kind.__call__) == (bases, torch.nn.Module.__call__)


def test_what_vllm_cannot_run_is_refused_before_it_opens(monkeypatch):
    policy = tiny_policy()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(type(library.platforms.current_platform), "device_type", "cuda")
        with pytest.raises(InputError, match="this vLLM runs on cuda, but the policy is on cpu; set device"):
            VLLMSampler(policy, VLLM())
    policy.model.__class__ = type("UnheardOfForCausalLM", (type(policy.model),), {})
    with pytest.raises(InputError, match=r"vLLM could not open: Model architectures \['UnheardOfForCausalLM'\]"):
        VLLMSampler(policy, VLLM())


def test_too_small_a_share_of_memory_is_to_be_raised(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    with pytest.raises(
        InputError, match=r"requested memory for kv \(-.*; give a higher gpu_memory_utilization of vllm"
    ):
        VLLMSampler(tiny_policy(), VLLM(gpu_memory_utilization=0.001))


@pytest.mark.parametrize("longest", [3, 10])
def test_a_very_short_engine_is_compared_with_the_policy_too(longest):
    policy = tiny_policy()
    drawn = drawn_by(VLLMSampler(policy, VLLM(max_model_len=longest)), prompts=["x"], longest=1)
    assert apart(policy, drawn).max() < 1e-4


def test_a_shorter_engine_refuses_longer_sequences():
    policy = tiny_policy()
    sampler = VLLMSampler(policy, VLLM(max_model_len=20))
    drawn = drawn_by(sampler, prompts=["x" * 15], longest=5)
    assert int(drawn.sequences.lengths_S.max()) == 5
    assert apart(policy, drawn).max() < 1e-4
    with pytest.raises(InputError, match="may take 21 tokens, more than the 20 that the vLLM engine can hold"):
        drawn_by(sampler, prompts=["x" * 15], longest=6)


def test_sequences_that_the_cache_cannot_hold_at_once_wait(monkeypatch):
    """vLLM then drops some in the middle, reads them again later, and samples as if nothing had been."""
    policy = tiny_policy(model_args={"initializer_range": 0.15, "max_position_embeddings": 512})
    drawn = drawn_by(VLLMSampler(policy, VLLM()), count=16, longest=300)
    monkeypatch.setattr(library, "LLM", partial(library.LLM, num_gpu_blocks_override=12))
    small = VLLMSampler(policy, VLLM())
    scheduler, dropped = small.engine.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *given, **more: dropped.append(preempt(*given, **more)))
    again = drawn_by(small, count=16, longest=300)
    assert len(dropped) > 3
    assert again.ids() == drawn.ids()
    assert apart(policy, again).max() < 1e-4


def test_samplers_take_turns():
    """A process has one engine: another sampler closes it, and it is opened again where it is asked for more."""
    first, second = tiny_policy(), policy_of("llama")
    of_first = VLLMSampler(first, VLLM(max_model_len=64))
    drawn = drawn_by(of_first)
    of_second = VLLMSampler(second, VLLM(max_model_len=64))
    assert apart(second, drawn_by(of_second)).max() < 1e-4
    assert_equal(drawn_by(of_first), drawn)
