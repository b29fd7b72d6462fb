"""Demonstrations of several turns: the tokens are those of the loop of turns and tools, with a loss on turns alone."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from oblrpo.errors import InputError
from oblrpo.policy import PromptFormat, tokens_of
from oblrpo.policy.tool_calls import ToolFormat
from oblrpo.trainer.demonstrations import accumulate_loss
from tests.policy.test_answers import policy_of

__all__ = ["policy_of"]

HERMES = (
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}</s>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ADD["function"]["parameters"]["properties"] = {"a": {"type": "integer"}, "b": {"type": "integer"}}
USER = [{"role": "user", "content": "2+2"}]


def call(a, b):
    return {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}


def said(content, *calls):
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def tool(content):
    return {"role": "tool", "name": "add", "content": content}


EPISODES = {
    "one call": [said("", call(2, 2)), tool("4"), said("4")],
    "words and two calls": [said("yes ", call(2, 2), call(9, 12)), tool("4"), tool("21"), said("the answer is 4")],
    "calls after calls": [said("", call(2, 2)), tool("4"), said("no", call(4, 1)), tool("5\n"), said("4\n5")],
    "a call at the end": [said("", call(2, 2))],
}


@pytest.fixture
def acting(policy_of):
    def made(kind, template=HERMES):
        return replace(policy_of(kind, template), format=PromptFormat(chat=True, template_args={"tools": [ADD]}))

    return made


@pytest.mark.parametrize("kind", ["bytes"])
@pytest.mark.parametrize("episode", EPISODES.values(), ids=EPISODES)
def test_the_tokens_are_those_of_the_loop(acting, kind, episode):
    """A prompt, a turn up to its end token, the results as the loop appends them, the next turn ..."""
    policy = acting(kind)
    tools = ToolFormat.of(policy.tokenizer, policy.format, [ADD])
    [prompt], [answer], [own] = tokens_of(policy, [USER], [episode])
    assert prompt == policy.tokens([USER])[0]
    text, rest, expected = policy.tokenizer.decode(prompt), list(episode), []
    for at, message in enumerate(episode):
        if message["role"] == "tool":
            continue
        begin = len(expected)
        end = next((place for place in range(begin, len(own)) if not own[place]), len(own))
        turn = answer[begin:end]
        assert turn[-1] == policy.tokenizer.eos_token_id
        assert policy.tokenizer.eos_token_id not in turn[:-1]
        parsed = tools.parse(prompt + expected, turn)
        assert parsed["content"].strip() == message["content"].strip()
        assert parsed.get("tool_calls") == message.get("tool_calls")
        expected += turn
        results = [(each["name"], each["content"]) for each in rest[at + 1 :] if each["role"] == "tool"]
        results = results[: len(message.get("tool_calls", []))]
        if at + 1 < len(episode):
            follow = tools.results(parsed, results, turn)
            assert own[len(expected) : len(expected) + len(follow)] == [0] * len(follow)
            expected += follow
    assert answer == expected
    assert len(own) == len(answer)
    assert text.endswith("<|start|>assistant\n")


def test_the_words_of_tools_have_no_loss(acting):
    """The gradient is that of transformers' cross entropy over the turns alone, in batches with other rows too."""
    policy = acting("bytes")
    rows = [EPISODES["calls after calls"], "4", EPISODES["one call"]]
    total, tokens = torch.zeros(()), 0
    for row in rows:
        [prompt], [answer], [own] = tokens_of(policy, [USER], [row])
        assert 0 < sum(own) <= len(own)
        labels = [token if mine else -100 for token, mine in zip(answer, own, strict=True)]
        logits_TV = policy.model(torch.tensor([prompt + answer])).logits[0]
        labels_T = torch.tensor([-100] * (len(prompt) - 1) + labels)
        total = total + cross_entropy(logits_TV[:-1], labels_T, ignore_index=-100, reduction="sum")
        tokens += sum(own)
    (total / tokens).backward()
    expected = [copy.deepcopy(p.grad) for p in policy.parameters]
    policy.model.zero_grad()
    batch = policy.sequences([USER] * 3, rows)
    assert accumulate_loss(policy, batch) == pytest.approx((total / tokens).item(), rel=1e-5)
    for parameter, theirs in zip(policy.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-4, atol=1e-6)
    assert batch.own_ST.sum() == tokens < batch.mask_ST[:, batch.start :].sum()


def test_no_logit_at_the_words_of_a_tool_has_a_gradient(acting):
    """By autograd: what the loss asks of the distributions from which the tool's words would have been drawn is 0."""
    policy = acting("bytes")
    [prompt], _, [own] = tokens_of(policy, [USER], [EPISODES["one call"]])
    batch = policy.sequences([USER], [EPISODES["one call"]])
    logits_TV = policy.model(batch.ids_ST).logits[0]
    logits_TV.retain_grad()
    logps_T = logits_TV[:-1].log_softmax(-1).gather(1, batch.ids_ST[0, 1:, None])[:, 0]
    (logps_T * batch.own_ST[0, 1:]).sum().backward()
    assert policy.logps(batch).logps_S.item() == pytest.approx((logps_T * batch.own_ST[0, 1:]).sum().item(), rel=1e-5)
    moved_T = logits_TV.grad.abs().sum(-1) > 0
    assert moved_T.tolist() == [bool(mine) for mine in [*[0] * (len(prompt) - 1), *own, 0]]


CONTENT = "{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (HERMES.replace("m.tool_calls or []", "[]"), "the model's turn begins after .* with the whole"),
        (HERMES.replace(CONTENT, "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"), "the tool's turn begins"),
        # As Qwen3: the last turn shows an empty thought, which is gone when another follows.
        (
            HERMES.replace(CONTENT, "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}" + CONTENT),
            "the tool's turn begins after .*which does not continue",
        ),
        (HERMES.replace("</s>\n", "\n"), "no token behind .* that ends the model's turn"),
    ],
    ids=["no calls", "no results", "another past", "no end"],
)
def test_a_template_that_cannot_show_an_episode_is_refused(acting, template, words):
    policy = acting("bytes", template)
    with pytest.raises(InputError, match=f"^sft.jsonl line 3: .*{words}"):
        tokens_of(policy, [USER], [EPISODES["one call"]], ["sft.jsonl line 3"])


def test_messages_behind_plain_text_are_refused(policy_of):
    policy = policy_of("bytes", HERMES)
    with pytest.raises(
        InputError, match="line 3: the completion is messages, but the prompt is plain text; set --chat"
    ):
        tokens_of(policy, ["2+2"], [EPISODES["one call"]], ["line 3"])
