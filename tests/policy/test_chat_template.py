"""What a chat template makes of tool calls, reasoning, parts, roles and arguments; and text that one has made."""

import json
import re

import pytest
from tokenizers.processors import TemplateProcessing

from oblrpo.errors import InputError
from oblrpo.policy import PromptFormat, adopt_policy, byte_tokenizer
from oblrpo.policy.prompts import BARE
from oblrpo.settings import PolicyConfig, SamplingConfig
from oblrpo.tasks.data import problems_of

SIMPLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RICH = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m['role'] }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}()\n{% endif %}{% endif %}"
)
ASK = {"role": "user", "content": "2+2"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "1", "name": "add"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
ADDED = '<user>2+2<assistant>{"name": "add", "arguments": {"a": 2}}<tool>4<assistant>'
SHOWN_TOOLS = '<tools>[{"type": "function", "function": {"name": "add"}}]'


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def problem_of(row):
    (problem,) = problems_of([("here", row)], "prompt", "", "{prompt}")
    return problem


def prompt_of(row):
    return problem_of(row).prompt


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": [ASK, CALL, RESULT]}, ADDED),
        ({"prompt": [ASK, CALL | {"content": None}, RESULT]}, ADDED),
        ({"prompt": [ASK, {key: CALL[key] for key in ("role", "tool_calls")}, RESULT]}, ADDED),
        # As a table fills up what only some messages have.
        ({"prompt": [ASK | {"tool_calls": None}, CALL, RESULT | {"tool_calls": []}], "tools": None}, ADDED),
        ({"prompt": [ASK, CALL, RESULT], "tools": TOOLS}, SHOWN_TOOLS + ADDED),
        ({"prompt": [ASK, CALL, RESULT], "tools": json.dumps(TOOLS)}, SHOWN_TOOLS + ADDED),
        ({"prompt": [ASK], "tools": []}, "<user>2+2<assistant>"),
        ({"prompt": [ASK], "tools": "calculator", "chat_template_kwargs": ""}, "<user>2+2<assistant>"),
        ({"prompt": [ASK | {"id": 3, "weight": 0, "name": "Ann"}]}, "<user>2+2<assistant>"),  # which `notes` tell
        ({"prompt": [ASK], "chat_template_kwargs": {"enable_thinking": False}}, "<user>2+2<assistant>()\n"),
        # Read, and of no effect here.
        ({"prompt": [ASK], "chat_template_kwargs": {"enable_thinking": True}}, "<user>2+2<assistant>"),
        (
            {"prompt": [ASK, {"role": "assistant", "content": "5", "reasoning_content": "So"}, ASK]},
            "<user>2+2<assistant>(So)5<user>2+2<assistant>",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2"}]}]}, "<user>2+2<assistant>"),
    ],
)
def test_the_template_is_given_what_a_row_has(tokenizer, row, shown):
    tokenizer.chat_template = RICH
    assert PromptFormat().text(tokenizer, prompt_of(row)) == shown


@pytest.mark.parametrize("config", [PolicyConfig, SamplingConfig])
def test_the_template_is_given_what_a_run_sets(tiny_policy, config):
    """Of training and of evaluation; what a row sets goes first."""
    args, tokenizer = {"enable_thinking": False}, tiny_policy.tokenizer
    tokenizer.chat_template = RICH
    settings = config(chat=True, system_prompt="S", chat_template_args=args)
    settings = settings if config is PolicyConfig else settings.policy("")
    policy = adopt_policy(tiny_policy.model, tokenizer, settings)
    rows = policy.tokens(["2+2", prompt_of({"prompt": [ASK], "chat_template_kwargs": {"enable_thinking": True}})])
    assert tokenizer.batch_decode(rows) == ["<system>S<user>2+2<assistant>()\n", "<system>S<user>2+2<assistant>"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": [ASK, CALL, ASK]}, "'tool_calls' of message 1 (assistant)"),
        (
            {"prompt": [ASK, {"role": "assistant", "content": "5", "reasoning_content": "So"}, ASK]},
            "'reasoning_content' of message 1 (assistant)",
        ),
        ({"prompt": [ASK], "tools": TOOLS}, "'tools' (of the columns"),
        ({"prompt": [ASK], "chat_template_kwargs": {"enable_thinkng": True}}, "'enable_thinkng' (of the columns"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2"}]}]},
            "the content of message 0 (user), a JSON array, but as Python writes it",
        ),
    ],
)
def test_what_the_template_does_not_take_is_refused_by_name(tokenizer, row, words):
    tokenizer.chat_template = SIMPLE
    with pytest.raises(
        InputError, match=re.escape(f"here: column 'prompt': the model's chat template does not show {words}")
    ):
        PromptFormat().text(tokenizer, prompt_of(row))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": [ASK, CALL, RESULT]}, "message 2 (tool), a JSON string"),
        ({"prompt": [{"role": "developer", "content": "user"}, ASK]}, "message 0 (developer)"),
        ({"prompt": [ASK, {"role": "assistant", "content": "5"}, ASK]}, "message 1 (assistant)"),
    ],
)
def test_messages_that_the_template_passes_over_are_refused(tokenizer, row, words):
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}<user>{{ m.content }}{% endfor %}{{ tool_calls }}"
    )
    with pytest.raises(InputError, match=re.escape(words)):
        PromptFormat().text(tokenizer, prompt_of(row))


def test_a_template_for_parts_shows_nothing_of_text(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<u>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(InputError, match=r"does not show the content of message 0 \(user\), a JSON string"):
        PromptFormat(chat=True).tokens(tokenizer, ["2+2"])


def test_tool_calls_are_in_the_text_that_is_logged():
    problem = problem_of({"prompt": [ASK, CALL, RESULT]})
    assert problem.text.splitlines()[0] == "2+2"
    assert '"arguments": {"a": 2}' in problem.text
    assert problem.key == problem_of({"prompt": [ASK | {"id": 7}, CALL, RESULT]}).key


@pytest.mark.parametrize(
    ("template", "settings", "notes"),
    [
        (SIMPLE, {"system_prompt": "S", "chat": True}, []),
        (RICH, {"chat": True, "template_args": {"enable_thinking": True}}, []),
        (RICH, {"template_args": {"x": 1}}, ["chat_template_args has no effect: the prompts are plain text .* --chat"]),
        (RICH, {"chat": False, "system_prompt": "S"}, ["system_prompt has no effect: the prompts are plain text"]),
        (
            RICH,
            {"chat": True, "template_args": {"enable_thinkng": True}},
            [r"ignores 'enable_thinkng' of chat_template_args. Did you mean 'enable_thinking'\?"],
        ),
        (
            "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
            {"chat": True, "system_prompt": "S"},
            ["ignores the system prompt"],
        ),
        # The turn of the model begins with a name, which is missing; or it begins with the end of the user's.
        (SIMPLE.partition("{% if")[0], {"chat": True}, ["ignores add_generation_prompt: .* without '<assistant>'"]),
        (
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
            "{{ m.content }}</s>{% endif %}{% endfor %}",
            {"chat": True},
            [],
        ),
    ],
)
def test_what_the_template_ignores_is_noted(tokenizer, template, settings, notes):
    tokenizer.chat_template = template
    found = PromptFormat(**settings).notes(tokenizer, ["2+2"])
    assert len(found) == len(notes)
    assert all(re.search(words, note) for words, note in zip(notes, found, strict=True))


OF_USER = "{% for m in messages if m.role == 'user' %}<user>{{ m.content }}{% endfor %}"
JOINED = "{% for m in messages %}{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}<u>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "prompt", "chat", "noted"),
    [
        (SIMPLE, "2+2", None, True),
        (RICH, "2+2", None, True),
        (SIMPLE.partition("{% if")[0], "2+2", None, True),  # which shows no beginning of a turn, but answers
        (SIMPLE, "2+2", True, False),
        (SIMPLE, "2+2", False, False),
        (None, "2+2", None, False),
        (SIMPLE, [ASK], None, False),
        (SIMPLE, "<user>2+2<assistant>", None, False),  # a text that somebody has put into the template
        # No turn of the model, nor is there in what only puts contents together, or takes no text.
        (OF_USER, "2+2", None, False),
        (JOINED, "2+2", None, False),
        (PARTS, "2+2", None, False),
        ("{{ raise_exception('no') }}", "2+2", None, False),
    ],
)
def test_text_that_goes_past_the_template_is_noted_where_nobody_has_said_so(tokenizer, template, prompt, chat, noted):
    tokenizer.chat_template = template
    assert PromptFormat(chat).notes(tokenizer, [prompt]) == [BARE] * noted


def test_what_is_said_about_a_message_and_not_shown_is_noted(tokenizer):
    tokenizer.chat_template = RICH
    prompt = prompt_of({"prompt": [ASK | {"weight": 0, "id": 3}, CALL, RESULT | {1: 2}]})
    assert PromptFormat().notes(tokenizer, [prompt]) == [
        "the model's chat template ignores 'id', 'name', 'weight', 1 of the messages."
    ]
    tokenizer.chat_template = "{% for m in messages %}{{ m | tojson }}{% endfor %}<assistant>"
    assert PromptFormat().notes(tokenizer, [prompt]) == []


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_that_a_template_has_made_begins_once(tokenizer, begins):
    tokenizer.bos_token, tokenizer.split_special_tokens = "<eos>", False
    begin = tokenizer.bos_token_id
    if begins:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<eos> $A", special_tokens=[("<eos>", begin)]
        )
    bare = tokenizer("ab", add_special_tokens=False).input_ids
    texts, expected = (
        ["ab", "<eos>ab", "a<eos>"],
        [[begin] * begins + bare, [begin, *bare], [begin] * begins + bare[:1] + [begin]],
    )
    assert PromptFormat().tokens(tokenizer, texts) == expected
    assert PromptFormat().tokens(tokenizer, texts[1:]) == expected[1:]
