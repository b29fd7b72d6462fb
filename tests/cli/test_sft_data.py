"""`--sft-data`: rows of prompt and completion before RL, as a user meets them."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from oblrpo.policy import load_policy, make_policy
from oblrpo.settings import PolicyConfig
from tests.cli.conftest import metrics_of, weights_of
from tests.cli.test_families import folder_of

pytestmark = pytest.mark.usefixtures("dense_reward")
ROWS = [{"prompt": f"{number}=", "completion": str(number)} for number in range(10)]


@pytest.fixture
def write(tmp_path):
    def call(rows, name="sft.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    return call


@pytest.fixture
def loaded(tmp_path):
    """A folder with a model and a chat template."""
    torch.manual_seed(1)
    policy = make_policy(
        PolicyConfig(model_args={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, device="cpu")
    )
    policy.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    policy.save(tmp_path / "model")
    return tmp_path / "model"


def test_an_epoch_then_rl(small_run, write, tmp_path):
    code, out, err = small_run(sft_data=write(ROWS), warm_start_args={"batch": 4}, seed=3)
    assert code == 0, err
    assert "warm start 3 steps on 10 rows of sft_data, 1 epoch(s), batch 4, AdamW at 0.003" in out
    assert "warm start 3: loss" in out
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0]["warm_start_loss"] > 0
    assert "eval/accuracy_before_warm_start" not in rows[0]  # built from nothing: nothing is known of it
    plain = tmp_path / "plain"
    assert small_run(output=plain, seed=3)[0] == 0
    assert weights_of(tmp_path / "run", 0) != weights_of(plain, 0)


def test_a_loaded_model_is_measured_before(small_run, write, loaded, tmp_path):
    messages = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": "y", "id": 7}],
        }
        for row in ROWS
    ]
    settings = {"model": loaded, "warm_start_args": {"batch": 2, "learning_rate": 1e-2}, "steps": 1}
    code, out, err = small_run(sft_data=write(messages), warm_start_steps=50, **settings)
    assert code == 0, err
    assert "50 steps on 10 rows of sft_data, 10 epoch(s), batch 2, AdamW at 0.01" in out
    assert "before warm start" in out
    first = metrics_of(tmp_path / "run")[0]
    assert first["warm_start_loss"] < 1
    assert first["eval/accuracy_before_warm_start"] != first["eval/accuracy"]
    learned = load_policy(str(tmp_path / "run" / "checkpoints" / "step_0"), PolicyConfig(device="cpu"))
    asked = learned.tokenizer("<user>3=<assistant>", return_tensors="pt").input_ids
    assert learned.tokenizer.decode(learned.model(asked).logits[0, -1].argmax()) == "y"
    as_text = tmp_path / "text"
    texts = write([{"prompt": row["prompt"], "completion": "y"} for row in ROWS], "texts.jsonl")
    chat = small_run("--chat", output=as_text, sft_data=texts, warm_start_steps=50, **settings)
    assert chat[0] == 0, chat[2]
    assert weights_of(as_text, 0) == weights_of(tmp_path / "run", 0)
    code, out, _ = small_run(
        "--dry-run", output=tmp_path / "x", sft_data=texts, **settings | {"warm_start_args": {"batch": 2}}
    )
    assert "AdamW at 2e-05" in out


def test_calls_and_results_of_tools(small_run, write, loaded, tmp_path):
    """Arguments may be JSON text, as OpenAI writes them, or hold the nulls of a table: the same is learned."""
    policy = load_policy(str(loaded), PolicyConfig(device="cpu"))
    policy.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    policy.tokenizer.split_special_tokens = False
    policy.save(loaded)
    found = []
    for name, arguments in (("mapping", {"a": 2}), ("text", '{"a": 2}'), ("nulls", {"a": 2, "b": None})):
        called = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        episode = [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            TOOL | {"tool_calls": None},
            ASSISTANT,
        ]
        rows = [{"prompt": f"{number}", "completion": episode} for number in range(4)]
        settings = {"model": loaded, "steps": 0, "warm_start_args": {"batch": 2, "learning_rate": 1e-3}}
        code, _, err = small_run("--chat", output=tmp_path / name, sft_data=write(rows, f"{name}.jsonl"), **settings)
        assert code == 0, err
        found.append(weights_of(tmp_path / name, 0))
    assert found[0] == found[1] == found[2]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT
def test_adapters(small_run, write, loaded, tmp_path):
    code, out, err = small_run(sft_data=write(ROWS), model=loaded, lora={"r": 2}, warm_start_args={"batch": 4}, steps=1)
    assert code == 0, err
    assert "AdamW at 0.0002" in out
    adapters = tmp_path / "run" / "checkpoints" / "step_0"
    assert AutoModelForCausalLM.from_pretrained(adapters).peft_config


def test_blocks_change_nothing_else(small_run, write, tmp_path):
    for name, blocks in {"all": 0, "one": 1}.items():
        settings = {
            "sft_data": write(ROWS),
            "warm_start_args": {"batch": 7},
            "prompts_per_micro_batch": blocks,
            "steps": 0,
        }
        assert small_run(output=tmp_path / name, **settings)[0] == 0
    whole, parts = (metrics_of(tmp_path / name)[0]["warm_start_loss"] for name in ("all", "one"))
    assert parts == pytest.approx(whole, rel=1e-5)


def test_held_out_rows_are_left_out(small_run, write, tmp_path):
    data = write([{"prompt": f"{number} is", "answer": str(number)} for number in range(90)], "data.jsonl")
    rows = [{"prompt": f"{number}  IS", "completion": "x"} for number in range(90)]
    settings = {"data": data, "steps": 0, "prompts_per_step": 2, "heldout_fraction": 0.2, "eval_prompts": 5}
    code, out, err = small_run(sft_data=write(rows), **settings)
    assert code == 0, err
    assert "5 of 90 rows of sft_data have held-out prompts; they are left out" in out
    assert "on 85 rows of sft_data" in out


def test_resumed_before_it_had_ended(small_run, write, tmp_path, oblrpo, monkeypatch):
    settings = {"sft_data": write(ROWS), "warm_start_args": {"batch": 2}, "steps": 2}
    assert small_run(output=tmp_path / "whole", **settings)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr("oblrpo.report.console.Progress.warm_start", lambda self, step, loss: 1 / (3 - step))
        with pytest.raises(ZeroDivisionError):
            small_run(**settings)
    assert oblrpo("train", "--resume", "--output", tmp_path / "run")[0] == 0
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")
    assert oblrpo("train", "--resume", "--output", tmp_path / "run", "--steps", "3")[0] == 0


GOOD = {"prompt": "a", "completion": "b"}
ASSISTANT, TOOL = {"role": "assistant", "content": "b"}, {"role": "tool", "name": "add", "content": "4"}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
NOT_JSON = {"type": "function", "function": {"name": "add", "arguments": "{a: 2"}}


@pytest.mark.parametrize(
    ("rows", "flags", "words"),
    [
        ([GOOD, {"prompt": "a", "completion": " "}], {}, "sft.jsonl line 2: column 'completion' is empty"),
        ([{"prompt": "a", "completions": "b"}], {}, "no column 'completion'; .* Did you mean 'completions'"),
        ([{"question": "a", "completion": "b"}], {}, "no column 'prompt'"),
        ([GOOD], {"prompt_column": "question"}, "no column 'question'"),
        ([{"prompt": "a", "completion": []}], {}, "begin and end with the assistant"),
        ([GOOD | {"completion": [{"role": "user", "content": "b"}]}], {}, "begin and end with the assistant"),
        ([GOOD | {"completion": [{"role": "assistant", "content": ""}]}], {}, "column .content. is empty"),
        ([GOOD | {"completion": [ASSISTANT | {"tool_calls": [1]}]}], {}, "message 0 has the call 1; a call is"),
        ([GOOD | {"completion": [ASSISTANT | {"tool_calls": [NOT_JSON]}]}], {}, "message 0 has the call"),
        ([GOOD | {"completion": [ASSISTANT, ASSISTANT]}], {}, "with others' .role tool. between any two"),
        (
            [GOOD | {"completion": [ASSISTANT, TOOL | {"content": [{"type": "text", "text": "4"}]}, ASSISTANT]}],
            {},
            "content of message 1 is a JSON array, not text",
        ),
        ([GOOD | {"completion": [ASSISTANT, TOOL]}], {}, "begin and end with the assistant's"),
        ([GOOD | {"completion": [ASSISTANT | {"reasoning": "b"}]}], {}, "message 0 has 'reasoning'; only text"),
        ([GOOD | {"completion": [ASSISTANT | {"tool_calls": CALLS}, TOOL, ASSISTANT]}], {}, "plain text; set --chat"),
        ([GOOD, GOOD | {"completion": "b" * 2048}], {}, "sft.jsonl line 2: prompt and completion have 2050 tokens"),
        (
            [GOOD],
            {"warm_start_args": {"noise": 0.1}},
            "noise in --warm-start-args has no effect because sft_data",
        ),
        ([], {}, "sft.jsonl holds no rows"),
    ],
)
def test_bad_rows(small_run, write, tmp_path, rows, flags, words):
    code, _, err = small_run(sft_data=write(rows), **flags)
    assert code == 2
    assert "Traceback" not in err
    assert re.search(words, err), err
    assert not (tmp_path / "run").exists()


def test_no_such_file_and_no_template_for_messages_or_under_chat(small_run, write, tmp_path):
    code, _, err = small_run(sft_data=tmp_path / "none.jsonl")
    assert (code, "Cannot read the data file" in err) == (2, True)
    folder_of("qwen3-tied", tmp_path / "bare")
    asked = [{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}]
    for flags, rows in ((("--chat",), [GOOD]), ((), asked)):
        code, _, err = small_run(*flags, model=tmp_path / "bare", sft_data=write(rows))
        assert (code, "no chat template" in err) == (2, True)
    assert not (tmp_path / "run").exists()
