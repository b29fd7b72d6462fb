"""A tiny policy that calls a tool in about every second turn, with an argument of a letter or two."""

import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = """\
{%- for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}!do{{ call.function.arguments.values() | join }}{% endfor %}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

RESPONSE = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {"close": "<end>"},
        "tool_calls": {
            "open": "!do", "close_pattern": "(?=!do|<end>)", "repeats": True, "content": "text",
            "transform": {"type": "function", "function": {"name": "do", "arguments": {"what": "{content}"}}},
        },
    },
}  # fmt: skip


def tokenizer():
    """Of bytes, with a word for a call."""
    letters = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    words = ["<end>", "<user>", "<assistant>", "<tool>"]
    made.add_tokens([AddedToken(word, normalized=False, special=True) for word in words])
    made.add_tokens([AddedToken("!do", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", padding_side="left",
        clean_up_tokenization_spaces=False, chat_template=TEMPLATE, response_template=RESPONSE,
    )  # fmt: skip


def save_policy(folder, letters="abc", seed=0, head_dim=8):
    """Write a model folder; the policy draws from calls, these letters and ends, nearly evenly."""
    words = tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=1024, tie_word_embeddings=False,
        pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    wanted = words.convert_tokens_to_ids(["!do", "<end>", *letters])
    with torch.no_grad():  # the first channel is the same for all tokens, and tells the wanted ones from others
        model.model.embed_tokens.weight[:, 0] = 3
        model.lm_head.weight[:, 0] = -3
        model.lm_head.weight[wanted, 0] = 3
        model.lm_head.weight[wanted[:2], 0] = 3.2
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def save_rows(path, count=40):
    """Write rows with a number each."""
    path.write_text("".join(json.dumps({"prompt": f"Row {row}", "number": row % 5}) + "\n" for row in range(count)))
    return path
