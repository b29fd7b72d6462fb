"""What a chat template makes nothing of is told before a run, and by an evaluation; what it drops is refused by row."""

import json

import pytest

from oblrpo.policy import make_policy
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
    assert words in out


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
