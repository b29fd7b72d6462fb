"""Where completions end and where prompts do not: targets of supervised learning, and tokenizers that append an end."""

import dataclasses

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast

from oblrpo.errors import InputError
from oblrpo.policy import PromptFormat, adopt_policy, load_policy, make_policy, tokens_of
from oblrpo.rollout import sample
from oblrpo.settings import PolicyConfig

TURN = "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|eot|>{% endfor %}"
ASKING = TURN + "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
ENDS = (256, 258, 259)  # <|end|>, <|eom|> and <|eot|>


def llama3(end="<|eot|>", template=TURN):
    """A tokenizer of bytes with Llama 3's kinds of special tokens, of which several end something."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>", "<|eom|>", "<|eot|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|end|>", eos_token=end, padding_side="left", chat_template=template
    )


@pytest.fixture
def chatty(tmp_path):
    """Returns a policy loaded from a folder as Llama 3's are, whose generation config names three end tokens."""

    def made(tokenizer, ends=ENDS):
        torch.manual_seed(0)
        built = make_policy(
            PolicyConfig(model_args={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, device="cpu")
        )
        built.model.resize_token_embeddings(len(tokenizer))
        built.model.generation_config = GenerationConfig(eos_token_id=list(ends), pad_token_id=256)
        built.model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return load_policy(str(tmp_path), PolicyConfig(device="cpu"))

    return made


USER = [{"role": "user", "content": "2+2"}]


@pytest.mark.parametrize(
    ("end", "template", "ends", "text", "chat"),
    [
        ("<|eot|>", ASKING, ENDS, "<|eot|>", "four<|eot|>"),
        ("<|end|>", ASKING, ENDS, "<|end|>", "four<|eot|>"),  # as of a base model with a template
        ("<|eot|>", ASKING.replace("<|eot|>", "\n<|eom|>\n"), ENDS, "<|eot|>", "four\n<|eom|>"),
        ("<|eot|>", ASKING, (256,), "<|eot|>", "four<|eot|>"),
        ("<|eom|>", ASKING.replace("<|eot|>", ""), (256, 258), "<|eom|>", "four<|eom|>"),
        ("<|eot|>", TURN, ENDS, "<|eot|>", "<|start|>assistant:four<|eot|>"),  # whose prompts do not begin a turn
        ("<|eom|>", TURN.replace("m.content", "m.content | upper"), ENDS, "<|eom|>", "four<|eom|>"),
        ("<|eom|>", "{{ raise_exception('no') if messages | length > 1 }}" + TURN, ENDS, "<|eom|>", "four<|eom|>"),
        (None, ASKING, (258, 256), "<|eom|>", "four<|eot|>"),
        (None, ASKING.replace("<|eot|>", ""), (258, 256), "<|eom|>", "four<|eom|>"),
    ],
    ids=[
        "instruct",
        "base",
        "other turns",
        "tokenizer's alone",
        "no end",
        "not begun",
        "another text",
        "refused",
        "the model's first",
        "the model's first, no end",
    ],
)
def test_what_is_learned_ends_as_the_tokenizer_or_the_chat_template_ends_it(chatty, end, template, ends, text, chat):
    policy = chatty(llama3(end, template), ends)
    _, answers, _ = tokens_of(policy, ["2+2=", USER], ["4", "four"])
    assert policy.tokenizer.batch_decode(answers) == ["4" + text, chat]
    assert {row[-1] for row in answers} <= set(policy.end_tokens)
    as_chat = dataclasses.replace(policy, format=PromptFormat(chat=True))
    batch = as_chat.sequences(["2+2="], ["four"])
    assert policy.tokenizer.decode(batch.completion_SC[0]) == chat
    assert policy.tokenizer.decode(policy.sequences(["2+2="], ["4"]).completion_SC[0]) == "4" + text


@pytest.mark.parametrize(
    ("end", "template", "ends", "expected"),
    [
        ("<|end|>", TURN, (256,), (256, 259)),
        ("<|end|>", TURN.replace("<|eot|>", "\n<|eom|>\n"), (256,), (256, 258)),
        ("<|end|>", TURN, (258,), (258, 256, 259)),  # the tokenizer's own as well, as TRL does
        ("<|end|>", TURN + "<|end|>", (256,), (256, 259)),  # as Phi-3's, of which turns but the last have no other
        ("<|end|>", TURN.replace("<|eot|>", "{% if not loop.last %}<|eot|>{% endif %}"), (256,), (256, 259)),
        ("<|end|>", TURN.replace("<|eot|>", "\n"), (256,), (256, 257)),  # as GLM's: what begins the next turn
        ("<|end|>", "{% for m in messages %}{{ m.content }}\n{% endfor %}", (256,), (256,)),  # none is made up
        ("<|end|>", "{{ raise_exception('no') if messages | length > 1 }}" + TURN, (256,), (256,)),
        ("<|end|>", None, (256,), (256,)),
    ],
    ids=["turn", "text around", "tokenizer", "two", "between turns", "next turn", "lines", "refused", "no template"],
)
def test_what_ends_a_turn_ends_completions_of_any_kind_of_model(chatty, tmp_path, end, template, ends, expected):
    policy = chatty(llama3(end, template), ends)
    assert tuple(policy.end_tokens) == expected
    adopted = adopt_policy(policy.model, policy.tokenizer, PolicyConfig(model="python:x"), train=False)
    assert tuple(adopted.end_tokens) == expected
    assert policy.model.generation_config.eos_token_id == list(ends)  # the object is left as it is
    policy.save(tmp_path / "saved")
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == list(expected)


def test_a_model_without_any_end_is_refused(tiny_policy):
    tiny_policy.model.generation_config.eos_token_id = tiny_policy.tokenizer.eos_token = None
    with pytest.raises(InputError, match=r"neither the model .* nor its tokenizer has an end token"):
        adopt_policy(tiny_policy.model, tiny_policy.tokenizer, PolicyConfig(model="python:x"))


def test_a_completion_stops_where_the_template_ends_a_turn(chatty):
    policy = chatty(llama3("<|end|>"), (256,))
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[259] *= 50
    torch.manual_seed(0)
    drawn = sample(policy, [USER], 50, 20, 1.0)
    sequences = drawn.sequences
    last_S = sequences.completion_SC.gather(1, sequences.lengths_S[:, None] - 1)[:, 0]
    assert 0 < (last_S == 259).sum() == ((sequences.completion_SC == 259) & sequences.own_SC.bool()).sum()
    assert torch.equal(drawn.clipped_S, ~torch.isin(last_S, torch.tensor([256, 259])))


def appending(how):
    """A tokenizer that begins each text with a token and puts its end behind it."""
    tokenizer = llama3()
    if how == "post-processor":
        both = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|start|>", "<|eot|>")]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|start|> $A <|eot|>", special_tokens=both)
        return tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="<|end|>", bos_token="<|start|>", eos_token="<|eot|>",
        add_bos_token=True, add_eos_token=True, padding_side="left", chat_template=TURN,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["add_eos_token", "post-processor"])
def test_an_end_that_the_tokenizer_appends_is_in_no_prompt_and_once_in_a_target(chatty, how):
    policy = chatty(appending(how))
    assert policy.tokenizer.decode(policy.tokenizer("2+2").input_ids) == "<|start|>2+2<|eot|>"
    texts = ["2+2", "", "so<|eot|>", USER]
    rows = policy.tokenizer.batch_decode(policy.encode(texts, 4))
    assert rows == ["<|start|>2+2", "<|start|>", "<|start|>so<|eot|>", "<|start|>user:2+2<|eot|>"]
    torch.manual_seed(0)
    drawn = sample(policy, ["2+2", "33"], 2, 4, 1.0).sequences
    assert not torch.isin(drawn.ids_ST[:2, : drawn.start], policy.end_tokens[-1]).any()
    asked, answers, _ = tokens_of(policy, ["2+2"], ["4"])
    assert policy.tokenizer.batch_decode(asked + answers) == ["<|start|>2+2", "4<|eot|>"]


def test_a_beginning_is_not_taken_for_an_end_by_a_tokenizer_of_few_letters():
    """A tokenizer that knows digits alone has nothing for most texts, on which what it appends cannot be seen."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate("0123456789+=")}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 12)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>", pad_token="<s>")
    assert PromptFormat().tokens(wrapped, ["1+2="]) == [[12, 1, 10, 2, 11]]
