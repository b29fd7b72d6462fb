"""What a chat template makes nothing of is told before a run, and by an evaluation; what it drops is refused by row."""

import json

import pytest

from oblrpo.policy import make_policy
from oblrpo.policy.prompts import BARE
from oblrpo.settings import PolicyConfig

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if enable_thinking %}!{% endif %}<assistant>"
)
FEW = ["--prompts-per-step", "2", "--num-generations", "2", "--eval-prompts", "2"]


@pytest.fixture
def files(tmp_path):
    """A folder with a model, and rows."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    policy = make_policy(PolicyConfig(model_args=sizes, device="cpu"))
    policy.tokenizer.chat_template = TEMPLATE
    policy.save(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": f"{number}+1="}], "answer": number + 1} for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "model", tmp_path / "rows.jsonl"


def test_an_argument_that_it_does_not_know(oblrpo, files, tmp_path):
    model, rows = files
    asked = ["--data", rows, "--max-completion-length", "2", "--chat-template-args", "{enable_thinkng: true}"]
    code, out, err = oblrpo("train", "--dry-run", "--model", model, *asked, *FEW, "--output", tmp_path / "run")
    assert code == 0, err
    words = "the model's chat template ignores 'enable_thinkng' of chat_template_args. Did you mean 'enable_thinking'?"
    assert f"template   {words}\n" in out
    code, out, err = oblrpo("evaluate", model, *asked, "--limit", "2", "--samples", "1", "--output", tmp_path / "e")
    assert code == 0, err
    assert words in err


def test_text_that_goes_past_it(oblrpo, files, tmp_path):
    model, rows, output, e = *files, tmp_path / "run", tmp_path / "e"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(60)))
    small = ["--max-completion-length", "2", "--device", "cpu"]
    asked = ["--model", model, "--data", rows, "--steps", 0, *small, *FEW, "--eval-samples", "1", "--output"]
    (tmp_path / "chat.yaml").write_text("chat: false\n")

    def said(*words):
        code, out, err = oblrpo(*words)
        assert code == 0, err
        return BARE in out + err

    for said_so in ("--chat", "--no-chat"):
        assert not said("train", *asked, tmp_path / said_so, said_so)
    assert not said("train", tmp_path / "chat.yaml", *asked, tmp_path / "by_file")
    assert said("train", *asked, output)
    # What the run has said, nobody has to hear of it again.
    assert not said("train", "--resume", "--no-chat", "--steps", 0, "--output", output)
    assert not said("evaluate", output / "checkpoints/step_0", *small, "--limit", 1, "--output", tmp_path / "of_run")
    assert said("evaluate", model, "--data", rows, *small, "--limit", 1, "--output", e)
    # An evaluation that says so continues one that did not.
    assert not said("evaluate", model, "--data", rows, *small, "--limit", 1, "--output", e, "--no-chat")


def test_a_checkpoint_is_asked_as_its_run_asked_on_a_benchmark_too(oblrpo, files, tmp_path):
    pytest.importorskip("math_verify")
    model, _ = files
    rows, output = tmp_path / "gsm8k.jsonl", tmp_path / "run"
    rows.write_text("".join(json.dumps({"question": f"{n}+1", "answer": f"#### {n + 1}"}) + "\n" for n in range(60)))
    length, data = ["--max-completion-length", 2], ["--data", rows]
    code, _, err = oblrpo(
        "train", "--task", "gsm8k", *data, "--model", model, *length, *FEW, "--chat", "--system-prompt", "S",
        "--eval-samples", 1, "--steps", 0, "--output", output,
    )  # fmt: skip
    assert code == 0, err
    code, out, err = oblrpo(
        "evaluate", output / "checkpoints/step_0", "--benchmark", "gsm8k", *data, *length, "--limit", 1, "--json",
        "--output", tmp_path / "e",
    )  # fmt: skip
    assert code == 0, err
    settings = json.loads(out)["results"][0]["settings"]
    assert (settings["chat"], settings["temperature"]) == (True, 1.0)
    assert settings["first_prompt"].startswith("<system>S<user>0+1")


def test_tools_that_it_does_not_show(oblrpo, files, tmp_path):
    model, rows = files
    row = {"prompt": [{"role": "user", "content": "2+2"}], "answer": 4, "tools": [{"type": "function"}]}
    with rows.open("a") as file:
        file.write(json.dumps(row))
    code, _, err = oblrpo("train", "--model", model, "--data", rows, *FEW, "--output", tmp_path / "run")
    assert code == 2
    assert "rows.jsonl line 61: column 'prompt': the model's chat template does not show 'tools'" in " ".join(
        err.split()
    )
    assert not (tmp_path / "run").exists()
