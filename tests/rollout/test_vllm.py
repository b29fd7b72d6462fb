"""The adapter against a fake engine; what vLLM itself does with these calls is not tested here."""

import copy
import sys
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.rollout import make_sampler, vllm
from oblrpo.settings import RolloutConfig
from tests.rollout.fakes import FakeLLM, FakeSamplingParams

PROMPTS, LONGEST = ["a", "bcdef", "gh"], 7


def sampler_of(policy, **settings):
    engine = FakeLLM(policy, **settings)
    return vllm.VLLMSampler(policy, engine, FakeSamplingParams, 64), engine


def test_completions_and_their_log_probabilities_line_up(tiny_policy):
    sampler, _ = sampler_of(tiny_policy)
    torch.manual_seed(3)
    drawn = sampler.sample(PROMPTS, 4, LONGEST, 0.7)
    mask_SC = drawn.sequences.own_SC.bool()
    assert len(drawn.completions) == 12
    assert drawn.sampler_logps_SC.shape == mask_SC.shape
    logps = tiny_policy.logps(drawn.sequences, 0.7)
    torch.testing.assert_close(drawn.sampler_logps_SC[mask_SC], logps.logp_SC.detach()[mask_SC], rtol=1e-4, atol=1e-4)
    ends = torch.isin(drawn.sequences.completion_SC, torch.tensor(tiny_policy.end_tokens)) & mask_SC
    assert torch.equal(drawn.clipped_S, ~ends.any(1))
    assert (drawn.sequences.lengths_S[drawn.clipped_S] == LONGEST).all()
    width = drawn.sequences.prompt_SQ.shape[1]
    for p, row in enumerate(tiny_policy.encode(PROMPTS, LONGEST)):
        for s in range(4 * p, 4 * p + 4):
            assert drawn.sequences.prompt_SQ[s, width - len(row) :].tolist() == row


def test_log_probabilities_are_enough_for_the_proxies(tiny_policy):
    """Of each token 1 - p stands for the norm of its score for the logits, and -log p for the entropy."""
    sampler, _ = sampler_of(tiny_policy)
    torch.manual_seed(3)
    drawn = sampler.sample(PROMPTS, 200, 1, 0.7)
    exact = tiny_policy.logps(drawn.sequences, 0.7).features
    assert torch.equal(drawn.features.length_S.long(), drawn.sequences.lengths_S)
    torch.testing.assert_close(drawn.features.logps_S, exact.logps_S.detach(), atol=1e-4, rtol=1e-4)
    for name in ("logit_norm2_S", "entropy_S"):
        of_one, of_all = (getattr(each, name).detach().double() for each in (drawn.features, exact))
        error = float((of_one - of_all).std()) / len(of_one) ** 0.5
        assert float(of_one.mean()) == pytest.approx(float(of_all.mean()), abs=4 * error)


def test_what_is_asked_of_the_engine(tiny_policy):
    sampler, engine = sampler_of(tiny_policy)
    torch.manual_seed(3)
    sampler.sample(PROMPTS, 4, LONGEST, 0.7)
    _, prompts, parameters = engine.calls[-1]
    assert prompts == [{"prompt_token_ids": row} for row in tiny_policy.encode(PROMPTS, LONGEST)]
    for given in parameters:
        assert (given.n, given.temperature, given.max_tokens, given.logprobs) == (4, 0.7, LONGEST, 0)
        assert (given.stop_token_ids, given.ignore_eos) == (tiny_policy.end_tokens, True)
    seeds = [given.seed for given in parameters]
    assert len(seeds) == len(PROMPTS)
    assert all(abs(a - b) > 4 for a, b in combinations(seeds, 2))  # vLLM adds 0 .. G - 1 to each
    torch.manual_seed(3)
    sampler.sample(PROMPTS, 4, LONGEST, 0.7)
    assert [given.seed for given in engine.calls[-1][2]] == seeds


def test_output_j_is_the_engines_output_j_whatever_its_order(tiny_policy):
    sampler, engine = sampler_of(tiny_policy)
    given, seen = engine.generate, []

    def generate(*arguments, **settings):
        seen.extend(given(*arguments, **settings))
        return seen

    engine.generate = generate
    drawn = sampler.sample(PROMPTS, 4, LONGEST, 1.0)
    for s, row in enumerate(drawn.sequences.completion_SC.tolist()):
        (output,) = [each for each in seen[s // 4].outputs if each.index == s % 4]
        assert row[: len(output.token_ids)] == output.token_ids


def test_an_update_reaches_the_engine_and_empties_its_cache(tiny_policy):
    sampler, engine = sampler_of(tiny_policy)
    assert engine.calls == ["apply_model", "reset_prefix_cache"]
    with torch.no_grad():
        for p in tiny_policy.parameters:
            p.add_(0.1 * torch.randn_like(p))
    stale = engine.policy.model.state_dict()["model.norm.weight"].clone()
    sampler.sync(tiny_policy)
    assert engine.calls[2:] == ["apply_model", "reset_prefix_cache"]
    for (name, ours), theirs in zip(
        tiny_policy.model.named_parameters(), engine.policy.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert not torch.equal(stale, engine.policy.model.state_dict()["model.norm.weight"])


def test_a_weight_that_is_not_taken_over_is_refused(tiny_policy):
    engine = FakeLLM(tiny_policy)
    engine.policy.model.register_parameter("more", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(InputError, match="weights that this policy does not set, such as more"):
        vllm.VLLMSampler(tiny_policy, engine, FakeSamplingParams, 64)


def test_a_cache_that_cannot_be_emptied_is_refused(tiny_policy):
    engine = FakeLLM(tiny_policy)
    engine.reset_prefix_cache = lambda: False
    with pytest.raises(RuntimeError, match="could not empty its prefix cache"):
        vllm.VLLMSampler(tiny_policy, engine, FakeSamplingParams, 64)


def test_what_the_engine_returns_is_checked(tiny_policy):
    sampler, engine = sampler_of(tiny_policy)
    given = engine.generate

    def broken(change):
        def generate(*arguments, **settings):
            requests = given(*arguments, **settings)
            change(requests)
            return requests

        engine.generate = generate
        torch.manual_seed(0)
        sampler.sample(PROMPTS, 2, LONGEST, 1.0)

    def cut(requests):
        output = next(o for r in requests for o in r.outputs if len(o.token_ids) > 1)
        output.token_ids, output.logprobs, output.finish_reason = output.token_ids[:1], output.logprobs[:1], "abort"

    with pytest.raises(RuntimeError, match="gave no log-probabilities"):
        broken(lambda requests: setattr(requests[0].outputs[0], "logprobs", None))
    with pytest.raises(RuntimeError, match="gave 5 completions for 3 x 2"):
        broken(lambda requests: requests[1].outputs.pop())
    with pytest.raises(RuntimeError, match=r"after 1 tokens \(abort\) without an end token"):
        broken(cut)


def test_sequences_longer_than_the_engine_takes_are_refused(tiny_policy):
    sampler, _ = sampler_of(tiny_policy)
    with pytest.raises(InputError, match=r"take 67 tokens, more than max_model_len of vllm_args, 64"):
        sampler.sample(["abcdefg"], 1, 60, 1.0)


def test_without_vllm_the_sampler_is_refused_by_name(tiny_policy):
    with pytest.raises(
        InputError, match=r"written for vLLM 0.17 to below 0.34, which is not installed; on a .* pip install"
    ):
        make_sampler(tiny_policy, RolloutConfig(sampler="vllm"))


@pytest.mark.parametrize("version", ["0.16.2", "0.34.0", "1.0"])
def test_other_versions_are_refused(tiny_policy, monkeypatch, version):
    monkeypatch.setattr(vllm.importlib.metadata, "version", lambda name: version)
    with pytest.raises(InputError, match=f"here is {version}"):
        make_sampler(tiny_policy, RolloutConfig(sampler="vllm"))


@pytest.mark.parametrize("version", ["0.17.0", "0.25.1", "0.33.0+cu129"])
def test_a_policy_on_the_cpu_is_refused(tiny_policy, monkeypatch, version):
    monkeypatch.setattr(vllm.importlib.metadata, "version", lambda name: version)
    with pytest.raises(InputError, match="needs the policy on a CUDA device, not on cpu"):
        make_sampler(tiny_policy, RolloutConfig(sampler="vllm"))


def test_the_engine_is_opened_with_the_policy_and_nothing_of_its_defaults(tiny_policy, monkeypatch):
    seen = {}

    def engine(**settings):
        from transformers import AutoConfig, Qwen3ForCausalLM

        seen.update(settings)
        config = AutoConfig.from_pretrained(settings["model"])
        assert config.architectures == ["Qwen3ForCausalLM"]
        torch.manual_seed(99)  # as vLLM does
        return FakeLLM(Policy(Qwen3ForCausalLM(config), tiny_policy.tokenizer))

    monkeypatch.setattr(vllm, "_check_machine", lambda policy: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=engine, SamplingParams=FakeSamplingParams))
    before = torch.random.get_rng_state()
    config = RolloutConfig(sampler="vllm", vllm_args={"gpu_memory_utilization": 0.4, "max_model_len": 50})
    sampler = make_sampler(tiny_policy, config)
    assert torch.equal(before, torch.random.get_rng_state())
    assert vllm.os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    folder = seen.pop("model")
    assert seen == {
        "load_format": "dummy", "skip_tokenizer_init": True, "trust_remote_code": False, "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs", "dtype": "bfloat16", "gpu_memory_utilization": 0.4, "max_model_len": 50,
    }  # fmt: skip
    drawn = sampler.sample(PROMPTS, 2, LONGEST, 1.0)
    mask_SC = drawn.sequences.own_SC.bool()
    logp_SC = tiny_policy.logps(drawn.sequences).logp_SC.detach()
    torch.testing.assert_close(drawn.sampler_logps_SC[mask_SC], logp_SC[mask_SC], rtol=1e-4, atol=1e-4)
    assert vllm.os.path.isdir(folder)
    del sampler
    vllm.shutil.rmtree(folder, ignore_errors=True)


def test_the_weights_are_those_of_the_checkpoint(tiny_policy):
    from oblrpo.rollout.vllm import checkpoint_weights

    names = [name for name, _ in checkpoint_weights(tiny_policy.model)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names  # tied
    fresh = copy.deepcopy(tiny_policy.model)
    for p in fresh.parameters():
        torch.nn.init.zeros_(p)
    fresh.load_state_dict(dict(checkpoint_weights(tiny_policy.model)), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), tiny_policy.model.parameters(), strict=True))
