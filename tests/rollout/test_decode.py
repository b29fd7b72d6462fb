"""The sampling loop: what it draws is what `generate` draws, from rows that have not ended, in memory that stays."""

import dataclasses
import math
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MptConfig,
    OPTConfig,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from oblrpo.errors import DivergedError
from oblrpo.rollout import sample
from oblrpo.rollout import transformers as rollout
from oblrpo.rollout.decode import BLOCK, Draw, PreallocatedLayer, applies, cache_name, decode
from oblrpo.scores import logit_norm2
from tests.scores.models import VOCABULARY
from tests.scores.zoo import FAMILIES, build_family

G, Q, LONGEST, PAD = 3, 6, 9, 0

SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 0}
OTHERS = {
    "opt": (OPTConfig, {"word_embed_proj_dim": 16, "ffn_dim": 24, "init_std": 0.5}),  # positions from the mask
    "bloom": (BloomConfig, {}),  # ALiBi from the mask
    "mpt": (MptConfig, {"initializer_range": 0.3}),
    "falcon-alibi": (FalconConfig, {"alibi": True}),
    "gpt-neox": (GPTNeoXConfig, {"intermediate_size": 24}),
    "gpt-neo-local": (GPTNeoConfig, {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
}  # fmt: skip
WINDOWS = ("qwen2-untied-window", "mistral-untied-window", "gemma2-tied", "gemma2-untied-biased", "gemma3-tied")


def build(family, **changes):
    torch.manual_seed(0)
    if family in FAMILIES:
        return build_family(family, torch.float32, "eager" if family.startswith("gemma2") else "sdpa", **changes)
    kind, extra = OTHERS[family]
    names = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.5}
    return AutoModelForCausalLM.from_config(kind(**SMALL | names | extra)).eval()


def padded_prompts():
    """Four prompts, of which three are padded on the left."""
    torch.manual_seed(1)
    prompt_PQ = torch.randint(2, 10, (4, Q))
    mask_PQ = torch.ones_like(prompt_PQ)
    for row, padding in enumerate((0, 2, 4, 5)):
        mask_PQ[row, :padding] = 0
    return prompt_PQ, mask_PQ


@torch.no_grad()
def greedy(model, ends, longest=LONGEST):
    """Completions of `generate` and of the loop."""
    prompt_PQ, mask_PQ = padded_prompts()
    settings = GenerationConfig(max_new_tokens=longest, pad_token_id=PAD, eos_token_id=list(ends))
    repeated = {"input_ids": prompt_PQ.repeat_interleave(G, 0), "attention_mask": mask_PQ.repeat_interleave(G, 0)}
    wanted_SC = model.generate(**repeated, generation_config=settings)[:, Q:]
    found = decode(model, prompt_PQ, mask_PQ, G, longest, ends, PAD, Draw(0.0))
    return wanted_SC, found[0]


def most_uneven(never_SC):
    """Of all pairs of end tokens those under which these completions get the most lengths, and the lengths."""

    def lengths(ends):
        kept_SC = torch.isin(never_SC, torch.tensor(ends)).cumsum(1) == 0
        return {*kept_SC.sum(1).tolist()}

    ends = max(combinations(never_SC.unique().tolist(), 2), key=lambda pair: len(lengths(pair)))
    return {*ends}, lengths(ends)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_greedy_completions_are_those_of_generate(family):
    model = build(family)
    if family == "phi3-untied":  # says itself how a next token is read
        assert not applies(model)
        return
    assert applies(model)
    assert family not in WINDOWS or model.config.sliding_window < Q  # leaves tokens out
    never_SC, found_SC = greedy(model, {VOCABULARY})
    assert torch.equal(never_SC, found_SC)
    assert never_SC.shape == (4 * G, LONGEST)
    ends, lengths = most_uneven(never_SC)
    assert len(lengths) > 1
    wanted_SC, found_SC = greedy(model, ends)
    assert torch.equal(wanted_SC, found_SC)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_goes_by_the_name_that_the_model_knows(name, monkeypatch):
    """As transformers calls it up to 5.23, and from then on, where the old name warns."""
    model, plain = build("qwen3-tied"), type(build("qwen3-tied")).forward
    expected = greedy(model, {VOCABULARY})[1]
    inner = cache_name(plain)

    def old(self, input_ids, attention_mask, position_ids, past_key_values, **more):
        output = plain(self, input_ids, attention_mask, position_ids, **{inner: past_key_values}, **more)
        return SimpleNamespace(logits=output.logits, past_key_values=output[1])

    def new(self, input_ids, attention_mask, position_ids, cache, **more):
        output = plain(self, input_ids, attention_mask, position_ids, **{inner: cache}, **more)
        return SimpleNamespace(logits=output.logits, cache=output[1])

    monkeypatch.setattr(type(model), "forward", old if name == "past_key_values" else new)
    found = decode(model, *padded_prompts(), G, LONGEST, {VOCABULARY}, PAD, Draw(0.0))
    assert torch.equal(found.next_token_S, expected)


def spying(model):
    """The rows of every forward, and where each layer's keys then lie."""
    rows, places = [], []

    def after(module, inputs, keywords, output):
        rows.append(len(keywords["input_ids"]))
        places.append([layer.keys.data_ptr() for layer in getattr(output, cache_name(module.forward)).layers])

    model.register_forward_hook(after, with_kwargs=True)
    return rows, places


@torch.no_grad()
def test_rows_that_ended_are_not_read_again_and_memory_stays_where_it_is():
    model = build("llama-untied")
    never_SC, _ = greedy(model, {VOCABULARY})
    ends, lengths = most_uneven(never_SC)
    assert len(lengths) > 2
    wanted_SC, _ = greedy(model, ends)
    rows, places = spying(model)
    decode(model, *padded_prompts(), G, LONGEST, ends, PAD, Draw(0.0))
    ended_SC = torch.isin(wanted_SC, torch.tensor(list(ends)))
    live_C = ended_SC.cumsum(1).eq(0).sum(0)[:-1].tolist()  # after each token but the last
    assert rows == [4, *(count for count in live_C if count)]  # the prompts once, then who has not ended
    assert len({*rows}) > 2
    assert all(each == places[1] for each in places[1:])


@torch.no_grad()
def test_long_completions_get_more_room_by_blocks():
    model = build("llama-untied", max_position_embeddings=1024)
    longest = BLOCK + 20
    wanted_SC, found_SC = greedy(model, {VOCABULARY}, longest)
    assert torch.equal(wanted_SC, found_SC)
    _, places = spying(model)
    decode(model, *padded_prompts(), G, longest, {VOCABULARY}, PAD, Draw(0.0))
    moves = sum(before != after for before, after in pairwise(places[1:]))
    assert moves == 1
    room = PreallocatedLayer(_read(1, Q), 2, Q + 3)
    assert room.keys.shape[2] == Q + 3  # no more than completions can need


def _read(prompts, columns):
    layer = DynamicLayer()
    layer.update(*torch.randn(2, prompts, 2, columns, 4))
    return layer


def test_rows_move_up_with_what_they_have():
    read = _read(2, Q)
    room, keys = PreallocatedLayer(read, 2, Q + BLOCK), read.keys.repeat_interleave(2, 0)
    new = torch.randn(4, 2, 1, 4)
    room.update(new, new)
    room.keep(3, torch.tensor([1]), torch.tensor([3]))
    last = torch.randn(3, 2, 1, 4)
    seen, _ = room.update(last, last)
    torch.testing.assert_close(seen, torch.cat([torch.cat([keys, new], 2)[[0, 3, 2]], last], 2))


@pytest.mark.parametrize("entries", [5, 256, 300, 600])
def test_draws_are_as_frequent_as_they_are_probable(entries):
    torch.manual_seed(0)
    draws, logits_V = 10_000, 2 * torch.randn(entries, dtype=torch.float64)
    logits_V[-1], logits_V[1] = 3.0, -math.inf  # the very last entry, and one that is never drawn
    for draw, probabilities_V in (
        (Draw(1.0, features=True), logits_V.softmax(-1)),
        (Draw(0.7, features=True), (logits_V / 0.7).softmax(-1)),
        (Draw(1.0, 0.5, features=True), TopPLogitsWarper(0.5)(None, logits_V[None])[0].softmax(-1)),
    ):
        next_token_S, logp_S, entropy_S, logit_norm2_S = draw(logits_V.expand(draws, -1))
        torch.testing.assert_close(logp_S, probabilities_V.log()[next_token_S])
        torch.testing.assert_close(entropy_S, torch.special.entr(probabilities_V).sum().expand(draws))
        norm2_V = 1 - 2 * probabilities_V + probabilities_V.square().sum()
        torch.testing.assert_close(logit_norm2_S, norm2_V[next_token_S])
        count_V = torch.bincount(next_token_S, minlength=entries).double()
        assert not count_V[probabilities_V == 0].any()
        often_V = draws * probabilities_V >= 5
        expected = torch.cat([draws * probabilities_V[often_V], draws * probabilities_V[~often_V].sum()[None]])
        seen = torch.cat([count_V[often_V], count_V[~often_V].sum()[None]])
        there = expected > 0
        chi2 = ((seen - expected)[there] ** 2 / expected[there]).sum().item()
        freedom = int(there.sum()) - 1
        assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 8, (draw, chi2, freedom)


@pytest.mark.parametrize("way", ["loop", "generate"])
def test_the_most_probable_token_tells_nothing_of_its_draw(way, tiny_policy, monkeypatch):
    if way == "generate":
        monkeypatch.setattr(rollout, "applies", lambda *_: False)
    drawn = sample(tiny_policy, ["ab"], 2, 3, 0.0, logps=True, features=True)
    assert drawn.features is None
    assert not drawn.sampler_logps_SC.any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("way", ["loop", "generate", "state"])
def test_features_of_draws_are_those_of_the_trainers_forward(way, temperature, tiny_policy, monkeypatch):
    """Of completions of unlike lengths, ended and cut; `state`: a model that the loop cannot sample from."""
    policy = tiny_policy
    if way == "generate":
        monkeypatch.setattr(rollout, "applies", lambda *_: False)
    if way == "state":
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "initializer_range": 0.5}
        mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=policy.vocabulary, **sizes)).eval()
        policy = dataclasses.replace(policy, model=mamba)
        assert not applies(mamba)
    torch.manual_seed(0)
    policy.model.generation_config.eos_token_id = list(range(0, policy.vocabulary, 9))  # ends in plenty
    drawn = sample(policy, ["ab", "cdef", "g"], 8, 12, temperature, features=True)
    assert drawn.sequences.lengths_S.unique().numel() > 4
    assert 0 < int(drawn.clipped_S.sum()) < 24
    assert drawn.sampler_logps_SC is None
    with torch.no_grad():
        exact = policy.logps(drawn.sequences, temperature).features
    for name, values_S in vars(exact).items():
        torch.testing.assert_close(getattr(drawn.features, name), values_S, rtol=1e-4, atol=1e-5)


def test_a_token_that_is_nearly_sure_keeps_the_digits_of_its_features():
    logits_SV = torch.tensor([[30.0, 0.0, 0.0, -math.inf], [12.0, 1.0, 0.0, -3.0]])
    drawn = Draw(1.0, features=True)(logits_SV)
    assert drawn.next_token_S.tolist() == [0, 0]
    exact_S1 = logit_norm2(logits_SV[:, None].double(), torch.zeros(2, 1, dtype=torch.long))
    torch.testing.assert_close(drawn.logit_norm2_S, exact_S1[:, 0].float(), rtol=1e-5, atol=0)
    entropy_S = torch.special.entr(logits_SV.double().softmax(-1)).sum(-1)
    torch.testing.assert_close(drawn.entropy_S, entropy_S.float(), rtol=1e-2, atol=1e-9)


@pytest.mark.parametrize("way", ["loop", "generate"])
def test_draws_of_a_part_of_the_distribution_have_the_figures_of_that_part(way, tiny_policy, monkeypatch):
    if way == "generate":
        monkeypatch.setattr(rollout, "applies", lambda *_: False)
    torch.manual_seed(0)
    drawn = sample(tiny_policy, ["ab"], 40, 1, 1.0, 0.5, logps=True, features=True)
    with torch.no_grad():
        ids_ST = torch.tensor(tiny_policy.tokens(["ab"]))
        scores_1V = TopPLogitsWarper(0.5)(None, tiny_policy.model(ids_ST).logits[:, -1])
    probabilities_V, ids_S = scores_1V.softmax(-1)[0], drawn.sequences.completion_SC[:, 0]
    torch.testing.assert_close(drawn.sampler_logps_SC[:, 0], probabilities_V.log()[ids_S])
    torch.testing.assert_close(drawn.features.entropy_S, torch.special.entr(probabilities_V).sum().expand(40))


def test_logits_that_are_no_numbers_are_told(tiny_policy):
    next_token_S, *_ = Draw(1.0)(torch.tensor([[0.0, 1.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]]))
    assert (next_token_S[1:] == -1).all()
    assert next_token_S[0] >= 0
    with torch.no_grad():
        next(iter(tiny_policy.parameters)).fill_(math.nan)
    with pytest.raises(DivergedError, match="lower learning_rate"):
        sample(tiny_policy, ["ab"], 2, 3, 1.0)


def test_two_samples_of_one_seed_are_the_same_and_others_differ(tiny_policy):
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(sample(tiny_policy, ["ab", "c"], 4, 12, 1.0, logps=True))
    first, again, other = (each.sequences.completion_SC for each in drawn)
    assert torch.equal(first, again)
    assert torch.equal(drawn[0].sampler_logps_SC, drawn[1].sampler_logps_SC)
    assert not torch.equal(first, other)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers for it
def test_adapters_are_sampled_with_and_learned_prompts_go_by_generate():
    adapted = get_peft_model(build("llama-untied"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert applies(adapted.eval())
    wanted_SC, found_SC = greedy(adapted, {VOCABULARY})
    assert torch.equal(wanted_SC, found_SC)
    with adapted.disable_adapter():
        assert not torch.equal(found_SC, greedy(adapted, {VOCABULARY})[1])
    prompted = get_peft_model(build("llama-untied"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert not applies(prompted)


def test_states_and_models_that_read_in_their_own_way_go_by_generate():
    assert not applies(AutoModelForCausalLM.from_config(MambaConfig(hidden_size=8, num_hidden_layers=1)))

    class Own(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, *inputs, **keywords):
            return super().prepare_inputs_for_generation(*inputs, **keywords)

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert applies(LlamaForCausalLM(LlamaConfig(**sizes)))
    assert not applies(Own(LlamaConfig(**sizes)))


@pytest.mark.parametrize("way", ["loop", "generate"])
def test_both_ways_sample_the_same_kind_of_thing(way, tiny_policy, monkeypatch):
    """In bfloat16, too, with the log-probabilities of what was drawn."""
    if way == "generate":
        monkeypatch.setattr(rollout, "applies", lambda *_: False)
    for policy, precision in ((tiny_policy, 1e-4), (dataclasses.replace(tiny_policy, bf16=True), 0.1)):
        torch.manual_seed(0)
        drawn = sample(policy, ["ab", "cdef"], 6, 12, 0.8, logps=True)
        sequences = drawn.sequences
        own_SC = sequences.own_SC.bool()
        trainer_SC = policy.logps(sequences, 0.8).token_logps_SC.detach()
        assert drawn.sampler_logps_SC.dtype == torch.float32
        torch.testing.assert_close(drawn.sampler_logps_SC[own_SC], trainer_SC[own_SC], rtol=precision, atol=precision)
        assert (sequences.completion_SC[~own_SC] == policy.tokenizer.pad_token_id).all()
        assert (sequences.lengths_S[drawn.clipped_S] == 12).all()
