"""Calls of tools and their results under the chat templates that TRL comes with: read and written as TRL does."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, parse_response

from oblrpo.errors import InputError
from oblrpo.policy import PromptFormat
from oblrpo.policy.tool_calls import ToolFormat

TEMPLATES = {path.stem: path.read_text() for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
READ = re.compile(r"glm4moe|llama3_[12]|nemotron_3|qwen2_5(_training)?$|qwen3")
"""The templates whose calls are read without a response template."""
WITH_THEIRS = re.compile(r"gemma4|gptoss|lfm2_(v2|2_5)")
"""Those whose calls are read by the response template that TRL has for them."""
ENDS = ["<|im_end|>", "<|eot_id|>", "<|return|>", "<|endoftext|>"]
ASK = {"role": "user", "content": "Which?"}


def find(what: str, count: int, exact: bool, where: list[str]):
    """Finds things.

    Args:
        what: what to find.
        count: how many.
        exact: whether nothing else will do.
        where: the places.
    """


def ping():
    """Says that it is there."""


TOOLS = [get_json_schema(find), get_json_schema(ping)]
ARGUMENTS = {"what": "12", "count": 3, "exact": True, "where": ["a b", "c"]}
FIND = {"type": "function", "function": {"name": "find", "arguments": ARGUMENTS}}
PING = {"type": "function", "function": {"name": "ping", "arguments": {}}}


def tokenizer_of(name, theirs=False):
    """A tokenizer of bytes with a template and the special tokens in it; with TRL's response template, or none."""
    template = TEMPLATES[name]
    special = sorted(
        set(re.findall(r"<[|\uff5c][^<>\s{}'\"]*[|\uff5c]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_turn>", template))
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    end = next((end for end in ENDS if end in special), "<eos>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, bos_token="<bos>", chat_template=template
    )
    if theirs:
        tokenizer.chat_template = TEMPLATES[name.removesuffix("_training")]  # by which TRL knows the family
        add_response_schema(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def format_of(tokenizer):
    return ToolFormat.of(tokenizer, PromptFormat(chat=True), TOOLS)


def suffix(tokenizer, results):
    """What TRL's trainer puts behind a turn."""
    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=None, chat_template_kwargs={}
    )
    messages = [{"role": "tool", "name": name, "content": content} for name, content in results]
    return GRPOTrainer._get_tool_suffix_ids(trainer, messages)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize(
    "results", [[("ping", "42")], [("find", '{"error": "no\n"}'), ("ping", "")]], ids=["one", "two"]
)
def test_results_are_written_as_in_trl_and_the_other_templates_are_refused(name, results):
    if not READ.match(name):
        with pytest.raises(InputError, match=r"does not show (the|calls of) tools|no parser known here reads"):
            format_of(tokenizer_of(name))
        if not WITH_THEIRS.match(name):
            return
    tokenizer = tokenizer_of(name, theirs=not READ.match(name))
    ids = format_of(tokenizer).results({"tool_calls": [{"function": {"name": results[0][0]}}]}, results)
    theirs = suffix(tokenizer_of("qwen3_training") if name == "qwen3" else tokenizer, results)  # as TRL trains it
    # TRL leaves out the line end behind an end of turn that is not the tokenizer's.
    assert ids == (tokenizer("\n").input_ids if name == "gemma4_v2" else []) + theirs


JSON = '<tool_call>\n{"name": "find", "arguments": {"what": "12", "count": "3"}}\n</tool_call>'
TAGS = (
    "<tool_call>\n<function=find>\n<parameter=what>\n12\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>\n"
    "</tool_call>"
)
KEYS = (
    "<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>12</arg_value>\n<arg_key>count</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
BARE = '{"name": "find", "parameters": {"what": "12", "count": 3}}'
WHOLE = [JSON, TAGS, KEYS, BARE]
CALLS = [
    "",
    *WHOLE,
    *(call + "\n" + call for call in WHOLE[:3]),
    *(call.partition("3")[0] for call in WHOLE),
    *(call.replace("find", "fly") for call in WHOLE),
    *(call.replace("12", "1 \n 2") for call in WHOLE[1:3]),
    JSON.replace("}}", "}"),
    TAGS.replace("</parameter>", ""),
    "<tool_call>\n</tool_call>",
    "</tool_call>",
]
BEFORE = ["", "It is 42.", "I\n\nthink so. \n", "Hm.\n</think>\n\nYes.", "<think>\nHm.\n</think>\n\n", "\ud55c <b>&"]


@pytest.mark.parametrize("name", sorted(filter(READ.match, TEMPLATES)))
def test_turns_are_read_as_in_trl(name):
    tokenizer, theirs = tokenizer_of(name), tokenizer_of(name, theirs=True)
    ours = format_of(tokenizer)
    context = tokenizer.apply_chat_template([ASK], tools=TOOLS, add_generation_prompt=True)["input_ids"]
    end = next(end for end in ("<|im_end|>", "<|eot_id|>", "<|user|>") if end in tokenizer.get_added_vocab())
    found = 0
    for before in BEFORE:
        # Where thoughts begin in the prompt and never end, TRL reads text of Nemotron, and thoughts of all others.
        if "</think>" not in before and name.startswith("nemotron"):
            continue
        for call in CALLS:
            ids = tokenizer(before + call + end, add_special_tokens=False).input_ids
            mine = ours.parse(context, ids)
            trls = parse_response(theirs, ids, prefix=context, tools=TOOLS)
            if thought := trls.pop("reasoning_content", "").removesuffix(
                end
            ):  # of thoughts that do not end, TRL's does
                trls["reasoning_content"] = thought.rstrip()
            assert mine == trls, before + call
            found += "tool_calls" in mine
    assert found >= 8
