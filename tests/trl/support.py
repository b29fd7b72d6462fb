"""The toy job: digits to be answered with the same digit, a tiny policy, and trainers of it that write little."""

import copy

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from oblrpo.adapters.trl import OBLRPOConfig, OBLRPOTrainer
from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig

PROMPTS = [f"{digit}=" for digit in range(8)]


def tiny_policy(dtype=torch.float32):
    """A policy with random weights and a tokenizer of bytes."""
    torch.manual_seed(0)
    policy = make_policy(
        PolicyConfig(model_args={"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}, device="cpu")
    )
    policy.model.to(dtype)
    return policy


def reward(prompts, completions, **_):
    """The share of bytes above the prompt's digit, so that nearly every output has a reward of its own."""
    return [
        sum(ord(byte) > 60 + 8 * int(prompt[0]) for byte in text) / 8 + len(text) / 100
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def settings(folder, **given):
    """What keeps a run short; `given` goes before."""
    return {
        "output_dir": str(folder), "seed": 3, "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
        "gradient_accumulation_steps": 2, "max_completion_length": 8, "learning_rate": 1e-3, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "report_to": "none", "logging_steps": 1, "save_strategy": "no",
        "disable_tqdm": True, "max_grad_norm": 0.0, "dataloader_pin_memory": False,
    } | given  # fmt: skip


def ours(folder, policy=None, reward_funcs=reward, kind=OBLRPOTrainer, prompts=PROMPTS, words=(), **given):
    """An OBLRPOTrainer of the toy job; `words` are further ones of its constructor."""
    policy = policy or tiny_policy()
    words = {"train_dataset": Dataset.from_dict({"prompt": prompts})} | dict(words)
    words |= {name: given.pop(name) for name in ("peft_config", "callbacks") if name in given}
    return kind(
        policy.model, reward_funcs, args=OBLRPOConfig(**settings(folder, **given)), processing_class=policy.tokenizer,
        **words,
    )  # fmt: skip


def theirs(folder, policy=None, kind=GRPOTrainer, config=GRPOConfig, callbacks=None, reward_funcs=reward, **given):
    """One of TRL's own trainers of the toy job."""
    policy = policy or tiny_policy()
    return kind(
        policy.model, reward_funcs, args=config(**settings(folder, **given)), callbacks=callbacks,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}), processing_class=policy.tokenizer,
    )  # fmt: skip


class Capture(TrainerCallback):
    """What each update was made of: the batch, the policy before it, its gradient, and what was logged."""

    def __init__(self, trainer):
        self.trainer, self.updates = trainer, []
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        whole = copy.deepcopy({name: parameter.detach() for name, parameter in model.named_parameters()})
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        groups = self.trainer.optimizer.param_groups
        update = {"weights": whole, "grads": grads, "batch": self.trainer._buffered_inputs, "rate": groups[0]["lr"]}
        self.updates.append(update | {"generation": getattr(self.trainer, "_generation", None)})


def scores(policy, batch, temperature=1.0):
    """grad log pi(o|q) of every row by one backward each, as flat vectors, (S, N): neither tape nor fused head.

    A tool's tokens are read, and have no log-probability.
    """
    model, rows = policy.model.eval(), []
    parameters = [p for p in model.parameters() if p.requires_grad]
    for row in range(len(batch["prompt_ids"])):
        real = {name: batch[f"{name}_ids"][row][batch[f"{name}_mask"][row].bool()] for name in ("prompt", "completion")}
        ids = torch.cat([real["prompt"], real["completion"]])
        logits = model(input_ids=ids[None]).logits[0, len(real["prompt"]) - 1 : -1] / temperature
        logp_C = logits.log_softmax(-1).gather(1, real["completion"][:, None])[:, 0]
        own_C = batch["tool_mask"][row][: len(logp_C)] if "tool_mask" in batch else torch.ones_like(logp_C)
        logp = (logp_C * own_C).sum()
        found = torch.autograd.grad(logp, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def flat(grads):
    """Gradients by name as one vector."""
    return torch.cat([each.flatten() for each in grads.values()])


def assert_first_tokens(trainer, policy, temperature, rows=1024):
    """The first tokens that a trainer draws have the policy's frequencies, by chi-square."""
    [prompt] = policy.tokenizer(text=["3="])["input_ids"]
    drawn, _ = trainer._generate_single_turn([prompt] * rows, None, {}, 4)
    with torch.no_grad():
        p_V = (policy.model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1).double()
    found_V = torch.bincount(torch.tensor([row[0] for row in drawn]), minlength=len(p_V)).double()
    often = rows * p_V > 5
    found, wanted = (torch.cat([each[often], each[~often].sum()[None]]) for each in (found_V, rows * p_V))
    freedom = len(found) - 1
    assert freedom > 10
    assert float(((found - wanted) ** 2 / wanted).sum()) < freedom + 4 * (2 * freedom) ** 0.5
