"""Episodes on pages and the console: turn by turn, whatever a policy or a tool has said."""

import json

import pytest

from oblrpo.errors import InputError
from oblrpo.report.console import in_columns
from oblrpo.report.episodes import MOST_LINES, in_a_line, lines_of
from oblrpo.report.export import model_card
from oblrpo.report.notebook import as_html, as_text
from oblrpo.report.page import DRAWN, write_report
from oblrpo.report.record import before_and_after, read_run
from oblrpo.runs import HELD_OUT, RunFolder
from oblrpo.tables.metrics import CHARTS
from oblrpo.tasks.episode import STOPS, Episode, logged
from tests.report.conftest import completions, row

HOSTILE = (
    "<img src=x onerror=alert(1)> \x1b[2J\x1b[31m \u202eeurt\u2066 \ud800 & </code></details><script>alert(2)</script>"
)
"""What a tool may return, and a policy may write."""
SEEN = r"\u001b[2J\u001b[31m \u202eeurt\u2066 \ud800"


def called(*calls, content="", **more):
    functions = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in calls]
    return {"role": "assistant", "content": content, "tool_calls": functions, **more}


def read(name, content):
    return {"role": "tool", "name": name, "content": content}


SHOP = [
    called(("price", {"item": "œuf", "of": [1, None]}), ("sum", [3]), content="See.", reasoning_content="an egg?"),
    read("price", "3"),
    read("sum", str({"error": "no"})),
    called(("price", {})),
    read("price", "4"),
    {"role": "assistant", "content": "It costs 3."},
]


def episode(messages, stop="answer", observation=""):
    """A row's part that is an episode."""
    said = Episode(messages)
    said.text, said.stop, said.observation = "<|tool|> all of it", stop, observation
    said.turns = sum(each["role"] == "assistant" for each in messages)
    return logged(said)


def run_of(write_run, *said):
    """A run in which all completions are these, in turn, and the first of them is what held-out prompts got."""
    texts = [each | said[number % len(said)] for number, each in enumerate(completions())]
    rows = [{"step": 0, "eval/accuracy": 0.2}, row(1) | {"eval/accuracy": 0.5}]
    run = write_run(rows, {1: texts}, environment="shop.py:Shop", tools=["t.py:add"])
    for step in (0, 1):
        asked = {"prompt": "held out", "answer": "7", "reward": step, **said[0]}
        (run / "completions" / f"{HELD_OUT}step_{step}.jsonl").write_text(json.dumps(asked) + "\n")
    return run


def test_every_turn_call_and_result_has_a_line():
    said = episode(SHOP, observation="Three left.")
    assert lines_of(said) == [
        ("environment", "Three left.", "read"),
        ("policy thinks", "an egg?", "own"),
        ("policy", "See.", "own"),
        ("policy calls", 'price(item="œuf", of=[1, null])', "own"),
        ("policy calls", "sum([3])", "own"),
        ("price", "3", "read"),
        ("sum failed", "{'error': 'no'}", "failed"),
        ("policy calls", "price()", "own"),
        ("price", "4", "read"),
        ("policy", "It costs 3.", "own"),
    ]
    assert in_a_line(said) == (
        "3 turns: See. price(item=\"œuf\", of=[1, null]) sum([3]) -> 3 -> {'error': 'no'}; price() -> 4; It costs 3."
    )
    assert in_a_line(episode(SHOP[:4], "turns")).endswith("; price() (ended by turns)")
    assert lines_of(episode([{"role": "assistant", "content": ""}])) == [("policy", "", "own")]
    assert in_a_line(episode([], "error")) == "0 turns:  (ended by error)"


def test_an_episode_of_very_many_calls_shows_its_two_ends():
    lines = lines_of(episode([called(*(("price", {"n": n}) for n in range(1000)))]))
    assert len(lines) == MOST_LINES + 1
    assert lines[MOST_LINES // 2] == ("", "960 lines left out", "read")
    assert lines[-1][1] == "price(n=999)"


def test_the_page_shows_them_turn_by_turn(write_run):
    long = [called(("look", {})), read("look", "z" * 5000)]
    page = write_report(
        run_of(write_run, episode(SHOP, observation="Three left."), episode(long, "length"))
    ).read_text()
    for drawn in ('class="turn own"><small>policy calls</small> <code>price(item=&#34;œuf&#34;, of=[1, null])</code>',
                  'class="turn failed"><small>sum failed</small> <code>{&#39;error&#39;: &#39;no&#39;}</code>',
                  'class="turn read"><small>environment</small> <code>Three left.</code>',
                  f"3 turns, ended by answer: {STOPS['answer']}", f"1 turn, ended by length: {STOPS['length']}",
                  "z" * 240 + " …</code> <small>5000 characters"):  # fmt: skip
        assert drawn in page
    assert "z" * 2001 not in page
    assert "all of it" not in page
    assert page.count("See.") == 2 + 3  # before, after, and one of the two completions of each prompt shown


@pytest.mark.parametrize(
    "messages",
    [
        [called(("look", {"at": "it"})), read("look", HOSTILE), {"role": "assistant", "content": HOSTILE}],
        [called((HOSTILE, {HOSTILE: HOSTILE}), (HOSTILE, HOSTILE), reasoning_content=HOSTILE), read(HOSTILE, HOSTILE)],
        [called(("look", {})), read("look", str({"error": HOSTILE}))],
    ],
    ids=["a result", "everything", "an error"],
)
def test_nothing_of_an_episode_does_anything_to_a_page_or_a_console(write_run, messages):
    said = episode(messages, stop=HOSTILE, observation=HOSTILE)
    run = run_of(write_run, said)
    page, card = write_report(run).read_text("utf-8"), model_card(read_run(run), 1, "name", "", False)
    pairs = before_and_after(RunFolder(run), read_run(run).measured)
    console = "\n".join(in_columns(pairs, 4000))
    for shown in (page, as_html(run), as_text(run), console, card):
        assert not set(shown) & {"\x1b", "\u202e", "\u2066", "\ud800"}
    for html in (page, as_html(run)):
        assert not any(tag in html for tag in ("<img", "<script"))
    assert SEEN in page
    assert page.count("<details") == page.count("</details>")
    assert page.count("<div") == page.count("</div>")
    assert SEEN in console
    assert SEEN in card


def test_a_line_of_an_episode_is_read_on_the_console(write_run):
    run = run_of(write_run, episode(SHOP[3:5] + SHOP[5:]))
    pairs = before_and_after(RunFolder(run), read_run(run).measured)
    assert in_columns(pairs, 100)[1] == (
        "held out         0  2 turns: price() -> 4; It costs 3.  1  2 turns: price() -> 4; It costs 3."
    )
    assert "    after       1  '2 turns: price() -> 4; It costs 3.'" in as_text(run)
    assert "<code>price()</code>" in as_html(run)
    card = model_card(read_run(run), 1, "name", "", False)
    assert "| `2 turns: price() -> 4; It costs 3.` | 1 |" in card
    assert "- **Environment and tools**: `shop.py:Shop`, `t.py:add`, at most 8 turns\n" in card


@pytest.mark.parametrize(
    "messages", ["text", [3], [{"tool_calls": "x"}], [{"tool_calls": [3]}], [{"tool_calls": [{"function": "f"}]}]]
)
def test_messages_that_are_none_are_named(write_run, messages):
    run = run_of(write_run, episode(SHOP) | {"messages": messages})
    with pytest.raises(InputError, match=r"step_\d.jsonl line 1 has no messages; remove that line.$"):
        write_report(run)


def test_a_run_with_tools_has_charts_of_turns_and_calls(write_run):
    of_tools = {"turns/mean": 2.0, "tools/call_frequency": 1.0, "tools/failure_frequency": 0.0}
    with_, without = (read_run(write_run([row(1) | more], name=str(len(more)))) for more in (of_tools, {}))
    charts = [chart for chart in CHARTS if chart.keys in of_tools]
    assert [len(DRAWN[chart.kind](with_, chart)) for chart in charts] == [1, 1, 0]
    assert not any(DRAWN[chart.kind](without, chart) for chart in charts)


def test_calls_that_were_not_made_are_shown_as_such():
    """A turn that was cut in a call, or one too many, has made none of its calls."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result = {"role": "tool", "name": "f", "content": "1"}
    for messages, calls, last in (([call, result, call], 1, "would call"), ([call, result, call], 2, "calls")):
        lines = lines_of({"messages": messages, "stop": "length", "calls": calls})
        assert [who for who, _, _ in lines] == ["policy calls", "f", f"policy {last}"]
