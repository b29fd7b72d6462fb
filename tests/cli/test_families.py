"""Every family of the model zoo, end to end: a folder, three steps of RL, a checkpoint that transformers loads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config, Phi3ForCausalLM

from oblrpo.policy import byte_tokenizer
from tests.cli.conftest import complained
from tests.scores.zoo import FAMILIES, build_family


def folder_of(name, path):
    """A tiny random model of a family with the tokenizer of bytes, as a hub folder has them."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokens = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    positions = {"n_positions": 64} if name.startswith("gpt2") else {"max_position_embeddings": 64}
    attention = "eager" if name.startswith("gemma2") else "sdpa"  # transformers has no other for it
    build_family(name, torch.float32, attention, **tokens, **positions).save_pretrained(path, max_shard_size="20KB")
    tokenizer.save_pretrained(path)
    return path


def test_a_token_beyond_the_embedding_is_refused_by_a_dry_run(small_run, oblrpo, tmp_path):
    model = folder_of("qwen3-tied", tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(model)
    rows = [{"prompt": f"{number} ", "completion": "1", "answer": "1"} for number in range(20)]
    more = {"plain": [], "rl": [{"prompt": "<tool>", "answer": "1"}], "sft": [rows[0] | {"completion": "<tool>"}]}
    files = {name: tmp_path / f"{name}.jsonl" for name in more}
    for name, file in files.items():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows + more[name]))
    told = "has the token '<tool>' (258), beyond the 258 that the model knows"
    dry = {"model": model, "eval_prompts": 2, "heldout_fraction": 0.5}
    complained(small_run("--dry-run", **dry, data=files["rl"]), "the prompt '<tool>'...", told)
    with_sft = small_run("--dry-run", **dry, data=files["plain"], sft_data=files["sft"])
    complained(with_sft, "the demonstration '<tool><eos>'...", told)
    output = tmp_path / "out"
    complained(oblrpo("evaluate", model, "--data", files["rl"], "--output", output, "--device", "cpu"), told)
    code, out, _ = small_run("--dry-run", **dry, data=files["plain"])
    assert code == 0
    assert "sampler    transformers; completions end with <eos>\n" in out


@pytest.mark.parametrize("name", FAMILIES)
def test_loads_trains_saves_and_reloads(name, small_run, tmp_path, dense_reward):
    model = folder_of(name, tmp_path / "model")
    assert len(list(model.glob("*.safetensors"))) > 1  # sharded, as large models are
    code, _, err = small_run(model=model, steps=3, eval_steps=0, schedule="off")
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["grad_norm"] > 0 for row in rows[1:])
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    loaded, again = (AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval() for _ in range(2))
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(checkpoint)("ab,bc:a>c=").input_ids])
    with torch.no_grad():
        logits, others, first = (each(ids).logits for each in (loaded, again, before))
    assert torch.equal(logits, others)
    assert not torch.equal(logits, first)  # it has learned something
    code, _, err = small_run(model=checkpoint, steps=0, output=tmp_path / "again")
    assert code == 0, err
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "checkpoints" / "step_0", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(saved.eval()(ids).logits, logits)


def test_rows_beyond_the_length_at_which_rotary_frequencies_change_are_refused_before_a_step(small_run, tmp_path):
    """Phi-3's, for every row of a forward, by the longest: of 48 tokens here."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 48}
    config = Phi3Config(
        vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=48, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4} | factors,
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    result = small_run(model=tmp_path / "model", max_completion_length=40, steps=1)
    complained(result, "if one has more than 48, the model uses other rotary frequencies", "together to 48 tokens")
    code, _, err = small_run(model=tmp_path / "model", max_completion_length=16, steps=1)
    assert code == 0, err
