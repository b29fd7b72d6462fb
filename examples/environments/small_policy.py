"""A small policy that can call tools: random weights, the examples' words, a chat template, and how to read calls.

python examples/environments/small_policy.py models/small
"""

import sys

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = [
    "<user>", "<assistant>", "<tool>", "<tools>", "<call>", "</call>", *map(str, range(100)),
    "Day", "price", "item=", "apple", "bread", "cheese", "egg", "lemon", "milk", "plum", "rice",
    "Game", "guess", "number=", "higher", "lower", "found",
]  # fmt: skip

TEMPLATE = """\
{%- for tool in tools or [] %}<tools>{{ tool.function.name }}
{%- for name in tool.function.parameters.properties %} {{ name }}={% endfor %}{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}</call>{% endfor %}<end>
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""

# How transformers reads a turn back: text, and calls such as <call>guess number=16</call>.
RESPONSE = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {"close": "<end>"},
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>\w+)",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r" (?P<key>\w+)=(?P<value>[^ <]*)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word and number above, and for each byte, so that any other text has tokens, too."""
    letters = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", padding_side="left",
        clean_up_tokenization_spaces=False, chat_template=TEMPLATE, response_template=RESPONSE,
    )  # fmt: skip


def main(folder: str, seed: int = 0) -> None:
    """Write model and tokenizer as any of transformers' are."""
    words = tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.1, pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:2])
