"""Prompts as text and as messages, and the precision and memory of a forward."""

import dataclasses
import sys
import time

import pytest
import torch
from tokenizers import normalizers
from transformers import BloomConfig, BloomForCausalLM, OPTConfig, OPTForCausalLM

from oblrpo.errors import InputError
from oblrpo.policy import Policy, PromptFormat, byte_tokenizer, load_policy, make_policy, tokens_of
from oblrpo.rollout import sample
from oblrpo.scores import ScoreTape
from oblrpo.settings import PolicyConfig
from oblrpo.tasks import Problem
from oblrpo.tasks.data import Outline

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if shout %}!{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chatty(tiny_policy):
    tiny_policy.tokenizer.chat_template = TEMPLATE
    return tiny_policy


def shown(policy, prompt, **settings):
    policy = dataclasses.replace(policy, format=PromptFormat(**settings))
    return policy.tokenizer.decode(policy.encode([prompt], 1)[0])


def test_text_stays_text_and_messages_take_the_template(chatty):
    user = [{"role": "user", "content": "2+2"}]
    assert shown(chatty, "2+2") == "2+2"
    assert shown(chatty, "2+2", chat=True) == "<user>2+2<assistant>"
    assert shown(chatty, user) == "<user>2+2<assistant>"
    assert shown(chatty, user, system_prompt="S") == "<system>S<user>2+2<assistant>"
    assert (
        shown(chatty, [{"role": "system", "content": "T"}, *user], system_prompt="S") == "<system>T<user>2+2<assistant>"
    )
    assert shown(chatty, user, template_args={"shout": True}) == "<user>2+2!<assistant>"


def test_a_prompt_at_a_glance_is_one_line_as_the_model_reads_it(chatty):
    assert PromptFormat(chat=True).preview(chatty.tokenizer, "2\n+2") == r"'<user>2\n+2<assistant>'"
    long = PromptFormat(chat=True).preview(chatty.tokenizer, "x" * 300)
    assert (long[:8], long[-12:], len(long)) == ("'<user>x", "<assistant>'", 120 + 5 + 75 + 2)


def test_texts_and_messages_in_one_batch_keep_their_places(chatty):
    rows = chatty.encode(["a", [{"role": "user", "content": "b"}], "c"], 1)
    assert [chatty.tokenizer.decode(row) for row in rows] == ["a", "<user>b<assistant>", "c"]
    assert sample(chatty, ["a", [{"role": "user", "content": "b"}]], 2, 3, 1.0).sequences.completion_SC.shape == (4, 3)


def test_a_built_policy_reads_messages_a_line_each_and_says_nothing_of_its_template_beside_texts(tiny_policy):
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    assert tiny_policy.tokenizer.decode(tiny_policy.encode([asked], 1)[0]) == "Be brief.\nWho?\n"
    assert not tiny_policy.format.notes(tiny_policy.tokenizer, [asked])
    assert not tiny_policy.format.notes(tiny_policy.tokenizer, ["plain"])


def test_messages_without_a_template_or_with_one_that_refuses(tiny_policy):
    tiny_policy.tokenizer.chat_template = None
    with pytest.raises(InputError, match="has no chat template"):
        tiny_policy.encode([[{"role": "user", "content": "x"}]], 1)
    tiny_policy.tokenizer.chat_template = "{{ raise_exception('no system, please') }}"
    with pytest.raises(InputError, match="chat template refuses a prompt: no system, please"):
        tiny_policy.encode([[{"role": "user", "content": "x"}]], 1)


def record(policy, temperature=0.9):
    """Log-probabilities, score norms and the gradient of a fixed batch."""
    batch = policy.sequences(["ab", "abcd", "x"], ["cde", "f", "ghijk"])
    tape = ScoreTape(policy.model)
    with tape:
        output = policy.logps(batch, temperature)
        tape.record(output.logps_S)
    norm2_S = tape.norm2()
    tape.accumulate(torch.tensor([0.3, -1.0, 0.7]))
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters])
    policy.model.zero_grad()
    return output.logps_S.detach(), norm2_S, gradient


def test_checkpointed_layers_change_nothing_and_keep_less(tiny_policy):
    plain = record(tiny_policy)
    config = PolicyConfig(
        model_args={"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        device="cpu",
        gradient_checkpointing=True,
    )
    saving = make_policy(config)
    saving.model.load_state_dict(tiny_policy.model.state_dict())
    calls = []
    assert saving.head is not None  # found by forwards of its own
    saving.model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    for found, expected in zip(record(saving), plain, strict=True):
        torch.testing.assert_close(found, expected)
    assert len(calls) == 3  # once more in the backward, and in that of the check that rows do not mix
    assert not any(module.training for module in saving.model.modules())
    calls.clear()
    with torch.no_grad():
        saving.logps(saving.sequences(["ab"], ["c"]))
    assert len(calls) == 1
    torch.manual_seed(0)
    drawn = sample(saving, ["ab"], 4, 5, 1.0)
    torch.manual_seed(0)
    assert torch.equal(drawn.sequences.completion_SC, sample(tiny_policy, ["ab"], 4, 5, 1.0).sequences.completion_SC)


def test_checkpointed_layers_that_call_dropout_themselves_do_without(tmp_path):
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    OPTForCausalLM(OPTConfig(vocab_size=len(tokenizer), dropout=0.5, **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    results, calls = [], []
    for saving in (False, True):
        config = PolicyConfig(model=str(tmp_path), gradient_checkpointing=saving, device="cpu")
        policy = load_policy(str(tmp_path), config)
        assert policy.head is not None
        policy.model.model.decoder.layers[0].fc1.register_forward_hook(lambda *_: calls.append(1))
        logps_S = policy.logps(policy.sequences(["ab", "abcd"], ["cde", "f"])).logps_S
        logps_S.sum().backward()
        results.append([logps_S.detach(), *(p.grad for p in policy.parameters)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert len(calls) == 1 + 2  # once more in the backward


def test_a_model_without_a_longest_length():
    tokenizer = byte_tokenizer()
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=8, n_layer=1, n_head=2)
    policy = Policy(BloomForCausalLM(config).eval(), tokenizer)
    assert policy.longest == sys.maxsize
    assert sample(policy, ["ab"], 2, 3, 1.0).sequences.completion_SC.shape[0] == 2


def test_bfloat16_arithmetic_on_float32_weights(tiny_policy):
    logps_S, norm2_S, gradient = record(tiny_policy)
    short = dataclasses.replace(tiny_policy, bf16=True)
    found = record(short)
    assert not torch.equal(found[0], logps_S)
    torch.testing.assert_close(found[0], logps_S, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found[1], norm2_S, rtol=0.05, atol=0)
    assert (found[2] - gradient).norm() < 0.05 * gradient.norm()
    assert gradient.dtype == found[2].dtype == torch.float32


def test_a_template_that_loops_is_ended(tiny_policy, monkeypatch):
    """Nested loops of 99,999, the most that the sandbox allows one of; the limit is lowered for the test."""
    monkeypatch.setattr("oblrpo.policy.prompts.TEMPLATE_SECONDS", 0.2)
    many = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    tiny_policy.tokenizer.chat_template = many + "{% endfor %}" * 3
    with pytest.raises(InputError, match=r"chat template .*: it takes longer than 0.2 seconds"):
        tiny_policy.encode([[{"role": "user", "content": "x"}]], 1)
    tiny_policy.tokenizer.chat_template = TEMPLATE
    time.sleep(0.3)  # nothing is left over that would end this
    assert tiny_policy.lengths([[{"role": "user", "content": "x"}]]) == [18]


def test_a_template_that_loops_on_answers_is_ended(tiny_policy, monkeypatch):
    monkeypatch.setattr("oblrpo.policy.prompts.TEMPLATE_SECONDS", 0.2)
    many = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    loops = "{% if messages[-1].role == 'assistant' %}" + many + "{% endfor %}" * 3 + "{% endif %}"
    tiny_policy.tokenizer.chat_template = TEMPLATE + loops
    with pytest.raises(InputError, match=r"chat template .*: it takes longer than 0.2 seconds"):
        tokens_of(tiny_policy, [[{"role": "user", "content": "x"}]], ["y"])


def test_lengths_are_those_of_the_tokens_of_texts_and_messages(chatty, monkeypatch):
    monkeypatch.setattr("oblrpo.policy.model.BLOCK", 2)
    prompts = ["a", [{"role": "user", "content": "b<eos>"}], "c" * 50, "<eos>é", [{"role": "user", "content": "x"}]]
    assert chatty.lengths(prompts) == [len(row) for row in chatty.tokens(prompts)]
    assert max(chatty.lengths(prompts)) == 50
    with pytest.raises(InputError, match="a prompt is empty"):
        chatty.lengths(["a", ""])
    with pytest.raises(InputError, match=r"the prompt 'ccccc.*50 tokens"):
        chatty.lengths(prompts, chatty.longest - 45)
    assert chatty.lengths(["c" * (chatty.longest + 1)], room=None) == [chatty.longest + 1]


def bytes_of(prompts):
    return Outline.of([Problem(prompt, "") for prompt in prompts]).bytes


@pytest.fixture
def short(chatty, monkeypatch):
    """Tokens are bytes, but <eos> is one: prompts of most bytes are not the longest."""
    monkeypatch.setattr("oblrpo.policy.model.BLOCK", 2)
    chatty.tokenizer.split_special_tokens = False
    assert chatty.lengths(["<eos>a"]) == [2]
    return chatty


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC()])
def test_only_prompts_that_may_be_long_are_counted(short, monkeypatch, normalizer):
    short.tokenizer.backend_tokenizer.normalizer = normalizer
    tools = [{"role": "user", "content": "x", "name": "y" * 30}]
    prompts = [
        *("<eos>" * 40 + str(n) for n in range(9)),
        *("c" * n for n in range(1, 60)),
        "\u0958" * 20,  # which NFC makes twice as long, and NFKC may make others ten times
        *([{"role": "user", "content": "d" * n}] for n in (5, 50, 6, 70, 1)),
        *([tools] * 4),
    ]
    counted = []
    lengths, exact = short.lengths, short.lengths(prompts)
    monkeypatch.setattr(Policy, "lengths", lambda self, some, room: counted.extend(some) or lengths(some, room))
    for most in (0, 60, 100, 700):
        counted.clear()
        found = short.long(prompts, bytes_of(prompts), most)
        assert found == {place: exact[place] for place in found}
        assert {place for place, length in enumerate(exact) if length > most} <= found.keys()
        assert list(found) == sorted(found)
        assert len(counted) == len(found)
        assert counted.count(tools) == 4
        assert (len(found) == len(prompts)) == (most == 0 or isinstance(normalizer, normalizers.NFKC))
    # 2 of most bytes, the first messages of their kind, and those whose bytes say nothing.
    assert len(found) in {2 + 1 + 4, len(prompts)}


def test_the_longest_prompt_is_exact_where_it_matters(short):
    prompts = ["c" * 180, *("<eos>" * 40 + str(n) for n in range(9))]
    sizes = bytes_of(prompts)
    assert short.room(prompts, 10) == (180, 10)
    assert short.room(prompts, 10, sizes=sizes) == (41, 10)
    assert short.room(prompts, 10, sizes=sizes, enough=179) == (180, 10)
    assert short.room(prompts, short.longest - 100, sizes=sizes) == (180, short.longest - 180)
    with pytest.raises(InputError, match=r"the prompt 'ccccc.*180 tokens"):
        short.room(prompts, short.longest - 100, least=short.longest - 100, sizes=sizes)


def test_messages_of_a_kind_are_shown_to_the_template_once_and_others_each(chatty, monkeypatch):
    """A template sees roles, and which contents are blank; of whatever else messages have it sees all."""
    shown = []
    show = PromptFormat.text
    monkeypatch.setattr(PromptFormat, "text", lambda self, *given: shown.append(given[1]) or show(self, *given))
    monkeypatch.setattr("oblrpo.policy.model.BLOCK", 1)
    user, blank = {"role": "user", "content": "x"}, {"role": "user", "content": " "}
    kinds = [[user], [blank, user], [user, user]]
    prompts = [*kinds * 3, [user | {"name": "n"}], [user | {"name": "m"}]]
    chatty.long(prompts, bytes_of(prompts), 900)
    assert shown == [*kinds, kinds[1], *prompts[-2:]]  # and one of those that have most bytes
