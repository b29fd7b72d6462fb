"""A job with a tool: keys whose values the policy has to look up, and a tiny Qwen3 that writes calls.

`python -m tests.verl.support.turns FOLDER` learns it for 40 steps.
"""

import random
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AddedToken, Qwen3Config, Qwen3ForCausalLM
from verl.tools.function_tool import function_tool

from oblrpo.policy import byte_tokenizer
from tests.verl.support import launch
from tests.verl.support.learning import OURS, SHRUNK, curve
from tests.verl.support.task import qwen_like

VALUES = {0: "4", 1: "7", 2: "1", 3: "apple", 4: "9", 5: "6"}
"""What the tool knows; it raises KeyError for every other key."""

ASKED = range(5)
END = "<|im_end|>"
BEGINNING = '{"name": "look_up", "arguments": {"key": '
CALL = f"<tool_call>{BEGINNING}%s}}}}</tool_call>"
TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", BEGINNING, "assistant"]
"""Text that is one token; the first four are Qwen3's own."""

SIZES = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}  # fmt: skip

CHAT_TEMPLATE = """
{%- for tool in tools or [] %}<|im_start|>system
{{ tool.function.name }}<|im_end|>
{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@function_tool
def look_up(key: int) -> str:
    """Return the value of a key.

    Args:
        key: the key, a digit.
    """
    return VALUES[key]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **unused):
    """1 where the policy's last turn is the value."""
    return float(solution_str.rpartition("assistant\n")[2].strip() == ground_truth)


def tokenizer_of_turns():
    """The byte tokenizer with the tokens of Qwen3's turns and calls."""
    tokenizer = qwen_like(byte_tokenizer())
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True, normalized=False)], special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def demonstrations(tokenizer, rng):
    """A prompt and the policy's turn after it: guesses, calls that may have a wrong key, second calls, answers."""
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    key, called = rng.choice(ASKED), 0
    messages = [{"role": "user", "content": f"{key}?"}]
    while True:
        prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        knows = messages[-1]["content"] == VALUES[key]
        if called == 2 or rng.random() < (0.8 if knows else 0.3):
            value = VALUES[key] if knows and rng.random() < 0.8 else rng.choice(list(VALUES.values()))
            yield prompt, value + END
            return
        asked, called = key if rng.random() < 0.6 else rng.randint(0, 7), called + 1
        result = VALUES.get(asked, f"Error executing tool 'look_up': {asked}")
        messages += [{"role": "assistant", "content": CALL % asked}, {"role": "tool", "content": result}]
        yield prompt, CALL % asked + END


def make_model(folder: Path, steps=150) -> Path:
    """A policy that often calls the tool, as transformers saves it."""
    torch.manual_seed(0)
    tokenizer, rng = tokenizer_of_turns(), random.Random("turns")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **SIZES, **ends))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for _ in range(steps):
        turns = [turn for _ in range(32) for turn in demonstrations(tokenizer, rng)]
        rows = [[torch.tensor(tokenizer.encode(text)) for text in turn] for turn in turns]
        ids_ST = pad_sequence([torch.cat(row) for row in rows], batch_first=True)
        own_ST = pad_sequence([torch.cat([0 * prompt, own**0]) for prompt, own in rows], batch_first=True)[:, 1:] > 0
        cross_entropy(model(input_ids=ids_ST).logits[:, :-1][own_ST], ids_ST[:, 1:][own_ST]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_data(folder: Path, rows=320) -> Path:
    """Keys to look up, the same every time."""
    import pandas

    records = [
        {
            "data_source": "keys",
            "prompt": [{"role": "user", "content": f"{index % len(ASKED)}?"}],
            "reward_model": {"style": "rule", "ground_truth": VALUES[index % len(ASKED)]},
            "extra_info": {"index": index},
        }
        for index in range(rows)
    ]
    path = folder / "train.parquet"
    pandas.DataFrame(records).to_parquet(path)
    return path


def overrides(outputs: int) -> dict[str, object]:
    """Settings of a run on 8 prompts a step, by verl's agent loop, with the adapter."""
    rollout = "actor_rollout_ref.rollout"
    return OURS | {
        "data.train_batch_size": 8,
        "data.max_prompt_length": 40,
        "data.max_response_length": 80,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        f"{rollout}.n": outputs,
        f"{rollout}.agent.default_agent_loop": "tool_agent",
        f"{rollout}.multi_turn.function_tool_path": __file__,
        f"{rollout}.multi_turn.max_assistant_turns": 3,
        "reward.custom_reward_function.path": __file__,
    }


def main(folder: Path) -> None:
    """Learn, and print means over five steps each."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model")
    make_data(folder)
    code, printed = launch.run(folder, 1, 40, **overrides(8) | SHRUNK)
    print(printed[-3000:] if code else "")
    for key in ("critic/score/mean", "num_turns/mean", "response_length/mean"):
        print(key, curve(launch.metrics(folder), key))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
