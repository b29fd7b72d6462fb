"""The toy job: sums of digits, a tiny Qwen3 that adds now and then, a reward, data files."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig
from oblrpo.trainer.demonstrations import warm_start

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **unused):
    """1 for the right sum."""
    return float(solution_str.strip() == ground_truth)


def problem(rng):
    a, b = rng.randint(0, 4), rng.randint(0, 4)
    return f"{a}+{b}=", str(a + b)


def demonstrations(step):
    rng = random.Random(f"demonstrations/{step}")
    prompts, answers = zip(*(problem(rng) for _ in range(64)), strict=True)
    noisy = [answer if rng.random() < 0.5 else str(rng.randint(0, 8)) for answer in answers]
    return list(prompts), noisy


def make_model(folder: Path, hidden_size=32, layers=2, steps=400) -> Path:
    """A policy that gets about half of the sums right, as transformers saves it."""
    torch.manual_seed(0)
    policy = make_policy(
        PolicyConfig(model_args={"hidden_size": hidden_size, "num_hidden_layers": layers}, device="cpu")
    )
    warm_start(policy, demonstrations, steps, 3e-3)
    policy.save(folder)
    qwen_like(policy.tokenizer).save_pretrained(folder)
    return folder


def qwen_like(tokenizer):
    """The byte tokenizer with the name of Qwen's end token, which verl insists on, and a chat template."""
    renamed = tokenizer.backend_tokenizer.to_str().replace("<eos>", "<|im_end|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(renamed),
        pad_token=tokenizer.pad_token,
        eos_token="<|im_end|>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def make_data(folder: Path, batches=64) -> Path:
    """Batches of 16 different sums each, in the order in which verl takes them (data.shuffle=False)."""
    import pandas

    rng = random.Random("train")
    every = [(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5)]
    records = []
    for index, (prompt, answer) in enumerate(each for _ in range(batches) for each in rng.sample(every, 16)):
        records.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": prompt}],
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"index": index},
            }
        )
    path = folder / "train.parquet"
    pandas.DataFrame(records).to_parquet(path)
    return path
