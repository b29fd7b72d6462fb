"""Messages with tool calls, reasoning and parts come to the same text as in TRL."""

import pytest
from trl.data_utils import apply_chat_template

from oblrpo.policy import PromptFormat, byte_tokenizer
from oblrpo.tasks.data import problems_of
from tests.policy.test_chat_template import ASK, CALL, RESULT, RICH, TOOLS

ROWS = [
    {"prompt": [ASK]},
    {"prompt": [ASK, CALL | {"content": None}, RESULT], "tools": TOOLS},
    {"prompt": [ASK], "chat_template_kwargs": {"enable_thinking": False}},
    {"prompt": [ASK, {"role": "assistant", "content": "5", "reasoning_content": "So"}, ASK]},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2"}]}]},
]


@pytest.mark.parametrize("row", ROWS)
def test_rows_become_the_text_that_trl_makes_of_them(row):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = RICH
    (problem,) = problems_of([("here", row)], "prompt", "", "{prompt}")
    theirs = {name: value for name, value in row.items() if name != "tools"}
    expected = apply_chat_template(theirs, tokenizer, tools=row.get("tools"))["prompt"]
    assert PromptFormat().text(tokenizer, problem.prompt) == expected
