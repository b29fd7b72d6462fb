import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from oblrpo.errors import InputError
from oblrpo.policy import (
    Policy,
    PromptFormat,
    Sequences,
    adopt_policy,
    byte_tokenizer,
    load_policy,
    make_policy,
    tokens_of,
)
from oblrpo.rollout import sample
from oblrpo.settings import PolicyConfig
from oblrpo.trainer.demonstrations import warm_start
from tests.scores.zoo import VOCABULARY, build_family

TOKENIZER = byte_tokenizer()


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
@settings(max_examples=200, deadline=None)
def test_the_byte_tokenizer_keeps_any_text(text):
    ids = TOKENIZER(text).input_ids
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_in_a_prompt_are_only_text():
    assert TOKENIZER.eos_token_id not in TOKENIZER("a<eos>b<pad>").input_ids


def one_at_a_time(policy, batch, temperature):
    """log pi of each row from its real tokens alone, no padding, straight from the model."""
    result = []
    prompt_SQ, prompt_mask_SQ = batch.ids_ST[:, : batch.start], batch.mask_ST[:, : batch.start]
    for prompt, pmask, completion, cmask in zip(
        prompt_SQ, prompt_mask_SQ, batch.completion_SC, batch.own_SC, strict=True
    ):
        prompt, completion = prompt[pmask.bool()], completion[cmask.bool()]
        logits = policy.model(torch.cat([prompt, completion])[None]).logits[0] / temperature
        logp = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, completion[:, None])
        result.append(logp.sum())
    return torch.stack(result)


def test_padding_changes_no_log_probability(tiny_policy):
    torch.manual_seed(0)
    drawn = sample(tiny_policy, ["a", "abcdef", "xy"], 3, 9, temperature=0.8)
    logps = tiny_policy.logps(drawn.sequences, temperature=0.8)
    logps_S, entropy_SC = logps.logps_S, logps.entropy_SC
    torch.testing.assert_close(logps_S, one_at_a_time(tiny_policy, drawn.sequences, 0.8), rtol=1e-4, atol=1e-4)
    assert entropy_SC.shape == drawn.sequences.completion_SC.shape
    trimmed = drawn.sequences.at(slice(0, 3))
    assert trimmed.start == 1
    torch.testing.assert_close(tiny_policy.logps(trimmed, 0.8).logps_S, logps_S[:3], rtol=1e-4, atol=1e-4)


def test_rows_are_moved_to_the_left_and_never_read_padding(tiny_policy):
    """What stands in the padding may be any token; the rectangle is no wider than the longest row."""
    torch.manual_seed(0)
    drawn = sample(tiny_policy, ["a", "abcdef", "xy"], 2, 5, temperature=1.0).sequences
    ids_ST, first_S = drawn.flush_left()
    assert ids_ST.shape[1] == int(drawn.mask_ST.sum(1).max())
    assert first_S.tolist() == [1, 1, 6, 6, 2, 2]
    for row, (ids, mask) in enumerate(zip(drawn.ids_ST, drawn.mask_ST.bool(), strict=True)):
        assert torch.equal(ids_ST[row, : mask.sum()], ids[mask])
    other = dataclasses.replace(drawn, ids_ST=torch.where(drawn.mask_ST.bool(), drawn.ids_ST, 7))
    assert torch.equal(tiny_policy.logps(other).logps_S, tiny_policy.logps(drawn).logps_S)


@pytest.mark.parametrize(
    ("name", "plain"),
    [("qwen3-tied", True), ("llama-untied", True), ("gemma2-tied", False), ("gpt2-tied", True)],
)
def test_the_head_is_taken_apart_only_where_it_is_one_product(name, plain):
    """Soft-capped logits are more; either way log-probability, entropy and logit norm are those of the logits."""
    torch.manual_seed(0)
    model = build_family(name, torch.float32, "eager")
    policy = Policy(model.eval(), TOKENIZER)
    assert (policy.head is not None) == plain
    ids_ST = torch.randint(1, VOCABULARY, (3, 7))
    mask_ST = torch.ones_like(ids_ST)
    mask_ST[0, :2] = 0
    mask_ST[1, 5:] = 0
    own_ST = mask_ST.clone()
    own_ST[:, :3] = 0
    batch = Sequences(ids_ST, mask_ST, own_ST, 3)
    found = policy.logps(batch, 0.7)
    for row, mask in enumerate(mask_ST.bool()):
        count = int(own_ST[row].sum())
        ids = ids_ST[row][mask]
        logits = model(ids[None]).logits[0, -count - 1 : -1] / 0.7
        chosen = ids[-count:]
        logp = logits.log_softmax(-1)
        expected = {
            "token_logps_SC": logp.gather(1, chosen[:, None])[:, 0],
            "entropy_SC": -(logp.exp() * logp).sum(-1),
            "logit_norm2_SC": 1 - 2 * logp.exp().gather(1, chosen[:, None])[:, 0] + logp.exp().square().sum(-1),
        }
        for key, values in expected.items():
            torch.testing.assert_close(getattr(found, key)[row, :count], values, rtol=1e-4, atol=1e-5)


def test_entropy_is_that_of_the_sampling_distribution(tiny_policy):
    batch = tiny_policy.sequences(["ab"], ["c"])
    entropy_SC = tiny_policy.logps(batch, temperature=0.5).entropy_SC
    probability = (tiny_policy.model(batch.ids_ST[:, : batch.start]).logits[0, -1] / 0.5).softmax(0)
    assert entropy_SC[0, 0].item() == pytest.approx(-(probability * probability.log()).sum().item(), rel=1e-4)


def test_the_sampler_draws_from_the_distribution_that_is_scored(tiny_policy):
    """Frequencies of the first token against exp(log pi); a model with sampling defaults of its own, all ignored."""
    with torch.no_grad():
        tiny_policy.model.lm_head.weight *= 3  # a distribution with some shape
    defaults = tiny_policy.model.generation_config
    defaults.update(top_k=1, repetition_penalty=5.0, min_new_tokens=3, top_p=0.1, temperature=9.0, do_sample=True)
    torch.manual_seed(0)
    draws = 20_000
    drawn = sample(tiny_policy, ["abc"], draws, 1, temperature=0.7)
    logits = tiny_policy.model(drawn.sequences.ids_ST[:1, : drawn.sequences.start]).logits[0, -1]
    expected = (logits / 0.7).softmax(0).double().detach()
    found = torch.bincount(drawn.sequences.completion_SC[:, 0], minlength=len(expected)).double()
    common = draws * expected >= 5  # where the chi-square statistic is one
    chi2 = ((found - draws * expected) ** 2 / (draws * expected))[common].sum().item()
    degrees = int(common.sum())
    assert abs(chi2 - degrees) < 5 * (2 * degrees) ** 0.5
    greedy_share = found.max() / draws
    assert greedy_share < 0.9
    assert tiny_policy.model.generation_config is defaults


def test_a_completion_ends_with_its_first_end_token(tiny_policy):
    end = tiny_policy.end_tokens[0]
    torch.manual_seed(0)
    drawn = sample(tiny_policy, ["ab"], 400, 6, temperature=1.0)
    ended = (drawn.sequences.completion_SC == end).any(1)
    assert 0 < ended.sum() < 400
    for row, mask, clipped in zip(drawn.sequences.completion_SC, drawn.sequences.own_SC, drawn.clipped_S, strict=True):
        kept = row[mask.bool()].tolist()
        assert end not in kept[:-1]
        assert (kept[-1] == end) != bool(clipped)
        assert not clipped or len(kept) == drawn.sequences.completion_SC.shape[1]


def test_prompts_that_cannot_be_used(tiny_policy):
    with pytest.raises(InputError, match="empty"):
        tiny_policy.encode([""], room=1)
    with pytest.raises(InputError, match=r"2040 tokens; with completions of 9 it does not fit the model's 2048"):
        tiny_policy.encode(["a" * 2040], room=9)
    assert len(tiny_policy.encode(["a" * 2040], room=8)[0]) == 2040


def test_a_token_without_an_embedding_is_named_wherever_it_stands(tiny_policy):
    """Tokens that were added to the tokenizer alone; on a GPU they end the process."""
    tiny_policy.tokenizer.add_tokens(["<tool>"])
    tiny_policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = dataclasses.replace(tiny_policy, format=PromptFormat(chat=True, system_prompt="use <tool>:"))
    for policy, prompt, completion in (
        (tiny_policy, "a <tool>", "b"), (tiny_policy, "a", "<tool>"), (chat, "a", "b"),
    ):  # fmt: skip
        with pytest.raises(
            InputError, match=r"has the token '<tool>' \(258\), beyond the 258 that the model knows: res"
        ):
            tokens_of(policy, [prompt], [completion])
    for read in (tiny_policy.lengths, tiny_policy.encode):
        with pytest.raises(InputError, match=r"the prompt 'a <tool>'... has the token '<tool>'"):
            read(["fine", "a <tool>"], room=1)
        assert read(["fine"], room=1)


def test_a_vocabulary_of_one_is_refused(tiny_policy):
    tiny_policy.model.resize_token_embeddings(1)
    with pytest.raises(InputError, match="knows one token"):
        adopt_policy(tiny_policy.model, tiny_policy.tokenizer, PolicyConfig(model="python:x"))


def test_norms_in_float32_among_weights_in_bfloat16_are_read_in_bfloat16_or_refused(tiny_policy):
    model = tiny_policy.model.bfloat16()
    model.model.norm.float()
    both = [PolicyConfig(model="python:x", bf16=bf16) for bf16 in (False, True)]
    with pytest.raises(InputError, match=r"has weights in bfloat16 and float32, which its layers do not take together"):
        adopt_policy(model, tiny_policy.tokenizer, both[0], train=False)
    policy = adopt_policy(model, tiny_policy.tokenizer, both[1], train=False)
    assert policy.logps(policy.sequences(["a"], ["b"])).logps_S.isfinite()


def test_saved_policies_load_with_plain_transformers(tiny_policy, tmp_path):
    tiny_policy.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)("hello", return_tensors="pt").input_ids
    expected = tiny_policy.model(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)
    again = load_policy(str(tmp_path), PolicyConfig(device="cpu"))
    assert again.end_tokens == tiny_policy.end_tokens
    torch.testing.assert_close(again.model(ids).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/nowhere/at/all"}, "cannot load the model '/nowhere/at/all'"),
        ({"device": "cuda:7"}, "device 'cuda:7' cannot be used"),
        ({"device": "banana"}, "device 'banana' cannot be used"),
        ({"model_args": {"hidden_size": 12, "num_attention_heads": 4}}, "multiple of twice that"),
        ({"model_args": {"num_attention_heads": 1}}, "must be even"),
        ({"model_args": {"num_attention_heads": 0}}, "must be even"),
    ],
)
def test_bad_policies(settings, message):
    with pytest.raises(InputError, match=message):
        make_policy(PolicyConfig(**settings))


def test_pickled_weights_are_refused(tiny_policy, tmp_path):
    tiny_policy.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tiny_policy.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot load"):
        load_policy(str(tmp_path), PolicyConfig(device="cpu"))


def test_warm_start_learns_a_demonstration(tiny_policy):
    losses = []
    warm_start(tiny_policy, lambda step: (["a="] * 4, ["bcd"] * 4), 150, 1e-2, lambda step, loss: losses.append(loss))
    assert losses[0] > 4
    assert losses[-1] < 0.5
    torch.manual_seed(0)
    assert sample(tiny_policy, ["a="], 20, 6, 1.0).completions.count("bcd") > 10


def test_words_of_somebody_else_are_read_and_not_scored(tiny_policy):
    """A tool answers in the middle of the first completion: its two tokens are context, and have no log-probability."""
    batch = tiny_policy.sequences(["ab", "c"], ["defgh", "ij"])
    own_ST = batch.own_ST.clone()
    own_ST[0, batch.start + 2 : batch.start + 4] = 0
    turns = dataclasses.replace(batch, own_ST=own_ST)
    told = tiny_policy.logps(turns)
    token_logps_SC = tiny_policy.logps(batch).token_logps_SC
    expected_S = (token_logps_SC * turns.own_SC).sum(1)
    torch.testing.assert_close(told.logps_S, expected_S)
    assert told.logps_S[0] != tiny_policy.logps(batch).logps_S[0]
    assert (turns.lengths_S - batch.lengths_S).tolist() == [-2, 0]
    assert batch.tokens - turns.tokens == 2  # as TRL counts
    lone = turns.at(slice(1, 2))
    assert lone.mask_ST.all(), "padding that only the first row needed"
    assert lone.start == 1
    torch.testing.assert_close(tiny_policy.logps(lone).logps_S, told.logps_S[1:])
