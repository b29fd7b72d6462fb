"""What is tried before anything is sampled: noise in forwards, and rows that depend on the longest beside them."""

import math
import random

import numpy
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

from oblrpo.errors import InputError
from oblrpo.memory import peak_bytes
from oblrpo.policy import Policy, Sequences, byte_tokenizer
from oblrpo.policy.checks import _random_states, check_lengths, check_scores, noise
from oblrpo.policy.load import check_values
from oblrpo.policy.sequences import pad
from oblrpo.rollout import sample

TOKENIZER = byte_tokenizer()
SIZES = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


def longrope(long=8.0, short=1.0):
    lists = {"short_factor": [short] * 8, "long_factor": [long] * 8}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32} | lists


def phi3(**factors):
    return Phi3ForCausalLM(
        Phi3Config(**SIZES, original_max_position_embeddings=32, rope_parameters=longrope(**factors))
    )


def gemma3():
    kinds = {"sliding_attention": DEFAULT, "full_attention": DYNAMIC}
    sizes = SIZES | {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, rope_parameters=kinds))


def llama(**given):
    return LlamaForCausalLM(LlamaConfig(**SIZES, **given))


FOLLOW = {
    "phi3": (phi3, 32),
    "phi3, nearly the same": (lambda: phi3(long=1.01), 32),
    "phimoe": (lambda: PhimoeForCausalLM(PhimoeConfig(**SIZES, num_local_experts=2, rope_parameters=longrope()
               | {"short_mscale": 1.0, "long_mscale": 1.2})), 32),
    "llama, longrope": (lambda: llama(rope_parameters=longrope()), 32),
    "llama, dynamic": (lambda: llama(rope_parameters=DYNAMIC), 64),
    "gemma3, dynamic": (gemma3, 64),
}  # fmt: skip
STAY = {
    "phi3, the same factors": lambda: phi3(short=8.0),
    "default": llama,
    "yarn": lambda: llama(rope_parameters=DEFAULT | {"rope_type": "yarn", "factor": 4.0}),
    "linear": lambda: llama(rope_parameters=DEFAULT | {"rope_type": "linear", "factor": 4.0}),
    "opt, which has no rotary embedding": lambda: OPTForCausalLM(OPTConfig(vocab_size=len(TOKENIZER), hidden_size=16,
               word_embed_proj_dim=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2)),
}  # fmt: skip


def policy_of(make):
    torch.manual_seed(0)
    return Policy(make().eval(), TOKENIZER)


def in_training(policy):
    policy.model.train()
    return policy


def rows_of(policy, *lengths):
    torch.manual_seed(1)
    rows = [torch.randint(2, 258, (length,)).tolist() for length in lengths]
    parts = [pad([row[:4] for row in rows], 0, True, policy.device), pad([row[4:] for row in rows], 0, False, "cpu")]
    return Sequences.of(*parts[0], *parts[1])


def check(policy, longest):
    check_lengths(policy, lambda: longest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FOLLOW)
def test_frequencies_that_follow_the_longest_row_are_refused_beyond_the_length_at_which_they_change(kind, dtype):
    make, most = FOLLOW[kind]
    policy = policy_of(lambda: make().to(dtype))
    check(policy, most)
    with pytest.raises(
        InputError, match=rf"^rows may have {most + 1} tokens, .* Limit prompt and completion together to {most} to"
    ):
        check(policy, most + 1)
    check(policy, most)  # nothing is left of the longest


@pytest.mark.parametrize("draws", [None, lambda: torch.rand(()), random.random, numpy.random.random])
def test_ten_seeds_are_tried_only_where_a_random_number_is_drawn(tiny_policy, draws):
    forwards = []
    tiny_policy.model.register_forward_hook(lambda *_: forwards.append(draws and draws()))
    assert not noise(tiny_policy)
    assert len(forwards) == (11 if draws else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STAY)
def test_frequencies_that_stay_are_taken_at_any_length(kind, dtype):
    policy = policy_of(STAY[kind])
    policy.model.to(dtype)
    check(policy, 10**9)


@pytest.mark.parametrize("kind", ["phi3", "llama, longrope"])
def test_what_is_taken_is_exact_and_what_is_refused_is_not(kind):
    """A short row alone and beside a longer one, and the sampler beside the trainer, by tokens."""
    make, most = FOLLOW[kind]
    policy = policy_of(make)
    apart, sampled = {}, {}
    for longest in (most, most + 1):
        with torch.no_grad():
            alone = policy.logps(rows_of(policy, 20)).token_logps_SC[0, :16]
            beside = policy.logps(rows_of(policy, 20, longest)).token_logps_SC[0, :16]
            drawn = sample(policy, ["abc"], 8, longest - 3, 1.0, logps=True)
            scored = policy.logps(drawn.sequences).token_logps_SC
        own_SC = drawn.sequences.own_SC.bool()
        assert int(drawn.sequences.mask_ST.sum(1).max()) == longest
        apart[longest] = float((alone - beside).abs().max())
        sampled[longest] = float((scored - drawn.sampler_logps_SC)[own_SC].abs().max())
    assert max(apart[most], sampled[most]) < 1e-4
    assert min(apart[most + 1], sampled[most + 1]) > 0.1


class Adds(torch.nn.Module):
    """A head with something before it."""

    def __init__(self, head, what):
        super().__init__()
        self.head, self.what = head, what

    def forward(self, hidden):
        return self.head(self.what(self, hidden))


def draws_in_vain(module, hidden):
    torch.rand([])
    return hidden


ADDED = {
    "always": lambda module, hidden: torch.nn.functional.dropout(hidden, 0.1),  # as `training` is by default
    "while it trains": lambda module, hidden: torch.nn.functional.dropout(hidden, 0.1, module.training),
    "of Python": lambda module, hidden: hidden * random.uniform(0.9, 1.1),
    "in vain": draws_in_vain,
    "none": lambda module, hidden: hidden,
}


@pytest.mark.parametrize(("what", "evaluated", "trained"), [
    ("always", True, True), ("while it trains", False, True), ("of Python", True, True), ("in vain", False, False),
    ("none", False, False),
])  # fmt: skip
def test_noise_is_what_two_forwards_of_the_same_tokens_differ_by(what, evaluated, trained):
    policy = policy_of(llama)
    policy.model.lm_head = Adds(policy.model.lm_head, ADDED[what]).eval()
    before = torch.get_rng_state()
    assert bool(noise(policy)) == evaluated
    if evaluated:
        with pytest.raises(InputError, match=r"forwards even in eval mode \(random numbers; the same tokens"):
            check_scores(policy, "")
    assert bool(noise(in_training(policy))) == trained
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_model_on_a_gpu_draws_on_the_cpu_is_seen(monkeypatch):
    """As LayerDrop does, whose two forwards are often the same."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(1))
    device = torch.device("cuda")
    before = _random_states(device)
    assert before == _random_states(device)
    torch.rand([])
    assert before != _random_states(device)


OPT = {"vocab_size": len(TOKENIZER), "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "dropout": 0.0,
       "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: llama(attention_dropout=0.1), "attention_dropout"),
        (lambda: SeedOssForCausalLM(SeedOssConfig(**SIZES, head_dim=16, attention_dropout=0.1)), "attention_dropout"),
        (lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, router_jitter_noise=0.01)), "router_j"),
        (lambda: OPTForCausalLM(OPTConfig(**OPT | {"dropout": 0.1})), "dropout"),
        (lambda: OPTForCausalLM(OPTConfig(**OPT, layerdrop=0.3)), "layerdrop"),
        (lambda: PhimoeForCausalLM(PhimoeConfig(**SIZES, num_local_experts=4, rope_parameters=DEFAULT)), "router_j"),
    ],
    ids=["attention", "seed-oss", "router", "hidden", "layers", "phimoe"],
)
def test_noise_is_named_by_the_config_s_rates_and_is_none_in_eval_mode(make, name):
    policy = policy_of(make)
    assert not noise(policy)
    assert name in noise(in_training(policy))


def test_looking_for_nan_takes_no_copy_of_a_weight():
    model = torch.nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16)
    assert peak_bytes(lambda: check_values(model, "the model"), "cpu") < 0.1 * model.weight.nbytes
    for value in (math.nan, math.inf, -math.inf):
        with torch.no_grad():
            model.weight[7, 7] = value
        with pytest.raises(InputError, match=r"the model has NaN or infinities in weight"):
            check_values(model, "the model")
