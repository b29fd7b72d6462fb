"""Demonstrations as tokens: prompt and answer are those of one text, by any tokenizer and in any template."""

import dataclasses

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from oblrpo.errors import InputError
from oblrpo.policy import PromptFormat, adopt_policy, tokens_of
from oblrpo.settings import PolicyConfig

TEXTS = ["8+4+9=12+9=21 what is the answer yes it is 4", "2+2 4", "Answer: yes no 12 = 21\nthe cat", "user\nthink"] * 20
SPECIAL = ["<pad>", "<s>", "</s>", "<|start|>", "<|end|>", "[INST]", "[/INST]", "<think>", "</think>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(scheme):
    """As Llama 2's: words begin with a space, and so does every text, by its normalizer or its pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        spaces = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([spaces, pre_tokenizers.Digits(individual_digits=True)])
    written = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(written)
    texts = [word for text in TEXTS for word in text.split()] if scheme == "normalizer" else TEXTS
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *BYTES]))
    return tokenizer


def bytes_of(prefix):
    """As GPT-2's and Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return tokenizer


KINDS = {
    "first": lambda: sentencepiece("first"), "always": lambda: sentencepiece("always"),
    "normalizer": lambda: sentencepiece("normalizer"),
    "bytes": lambda: bytes_of(False), "prefix": lambda: bytes_of(True),
}  # fmt: skip


@pytest.fixture
def policy_of(tiny_policy):
    def made(kind, template=None, begins=True):
        tokenizer = KINDS[kind]()
        tokenizer.add_special_tokens(SPECIAL)
        if begins:
            begin = [("<s>", tokenizer.token_to_id("<s>"))]
            tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=begin)
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left",
            chat_template=template, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        tiny_policy.model.resize_token_embeddings(len(wrapped), mean_resizing=False)
        tiny_policy.model.generation_config.eos_token_id = wrapped.eos_token_id
        return adopt_policy(tiny_policy.model, wrapped, PolicyConfig(model="python:x"))

    return made


PAIRS = [
    ("8+4+9=", "12+9=21"), ("Answer: ", "yes"), ("Answer:", " yes"), ("the c", "at"), ("what is", "the"), ("a\n", "b"),
    ("x =", " 12"), ("8+4=", "\n12"), ("\u00e9", "\u00fc"), ("the answer is ", "  4"), ("q", " "), ("8+4=", ""),
]  # fmt: skip


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_completion_are_the_tokens_of_one_text(policy_of, kind, begins):
    """Also where a token of that text lies across the prompt's end; the prompt is as it is sampled from."""
    policy = policy_of(kind, begins=begins)
    tokenizer = policy.tokenizer
    prompts, answers, _ = tokens_of(policy, *map(list, zip(*PAIRS, strict=True)))
    assert prompts == policy.tokens([prompt for prompt, _ in PAIRS])
    for pair, prompt, answer in zip(PAIRS, prompts, answers, strict=True):
        whole = tokenizer("".join(pair)).input_ids
        assert tokenizer.decode(prompt + answer) == tokenizer.decode(whole) + "</s>"
        assert prompt + answer == [*whole, tokenizer.eos_token_id] or whole[: len(prompt)] != prompt


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' and '</think>' not in m.content %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<think>final{% endif %}<|end|>"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
USER = [{"role": "user", "content": "2+2"}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("template", "begun", "learned"),
    [
        (MISTRAL, "[INST] 2+2 [/INST]", " {}</s>"),
        (CHATML, "<|start|>assistant\n", "{}</s>"),
        (QWEN3, "<|start|>assistant\n", "<think>\n\n</think>\n\n{}</s>"),
        (HARMONY, "<|start|>assistant", "<think>final<|end|>{}</s>"),
        (MISTRAL.replace("m.content", "m.content | trim"), "[INST] 2+2 [/INST]", " {}</s>"),
    ],
    ids=["mistral", "chatml", "qwen3", "harmony", "trimmed"],
)
def test_an_answer_is_what_the_template_shows_behind_the_prompt(policy_of, kind, template, begun, learned):
    policy = policy_of(kind, template)
    tokenizer, words = policy.tokenizer, ["4", "yes\nno", "a </s> b", "12+9=21"]
    assert policy.format.text(tokenizer, USER).endswith(begun)
    prompts, answers, _ = tokens_of(policy, [USER] * len(words), words)
    for word, prompt, answer in zip(words, prompts, answers, strict=True):
        text = policy.format.text(tokenizer, USER) + learned.format(word)
        assert prompt + answer == tokenizer(text, add_special_tokens=False).input_ids
        assert answer[-1] in policy.end_tokens


@pytest.mark.parametrize("kind", ["first", "bytes"])
def test_without_thinking_the_empty_thought_is_the_prompt_s(policy_of, kind):
    policy = dataclasses.replace(policy_of(kind, QWEN3), format=PromptFormat(template_args={"enable_thinking": False}))
    [prompt], [answer], _ = tokens_of(policy, [USER], ["4"])
    assert policy.tokenizer.decode(answer) == "4</s>"
    assert policy.tokenizer.decode(prompt).endswith("</think>\n\n")


@pytest.mark.parametrize(
    ("template", "answer", "words"),
    [
        (CHATML[:-11] + "<think>\n{% endif %}", "4", r"assistant\\n<think>\\n', .* as .*assistant\\n4</s>\\n'"),
        (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), "<think>s</think>4", r".*assistant\\n4</s>"),
    ],
    ids=["another beginning", "left out"],
)  # fmt: skip
def test_what_would_not_continue_what_is_sampled_is_refused(policy_of, template, answer, words):
    policy = policy_of("bytes", template)
    with pytest.raises(InputError, match=f"^sft.jsonl line 3: the model's turn begins after .*{words}.*as text"):
        tokens_of(policy, [USER], [answer], ["sft.jsonl line 3"])
    rendered = policy.format.text(policy.tokenizer, USER)  # the way out
    [prompt], [learned], _ = tokens_of(policy, [rendered], [answer])
    assert policy.tokenizer.decode(prompt + learned) == "<s>" + rendered + answer + "</s>"
