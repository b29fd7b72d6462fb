"""Completions in which tools, environments and rollouts have written tokens: those are read, and have no score."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_chat_template

from oblrpo import estimators
from oblrpo.errors import InputError
from tests.trl.support import PROMPTS, Capture, flat, ours, scores, tiny_policy
from tests.trl.test_gradient import assert_close, policy_of

CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
LORA = {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
G = 4


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number.
        b: the second number.

    Returns:
        The sum.
    """
    return a + b


class Sums:
    """An environment: it knows the first number, says so, and rewards how often it was asked."""

    def reset(self, **row):
        """Begin with a row of the data."""
        self.first, self.asked = len(row["prompt"][0]["content"]), 0
        return f" It is {self.first}."

    def plus(self, b: int) -> int:
        """Adds a number to the first one.

        Args:
            b: the number.

        Returns:
            The sum.
        """
        self.asked += 1
        return self.first + b

    def get_reward(self):
        """The number of calls."""
        return float(self.asked)


def chat_policy():
    """A tiny Qwen3 in float64 that speaks bytes and the marks of Qwen3's chats."""
    torch.manual_seed(0)
    tokenizer = tiny_policy().tokenizer
    tokenizer.split_special_tokens = False
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = qwen3_chat_template
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return SimpleNamespace(model=Qwen3ForCausalLM(config).double(), tokenizer=tokenizer)


def speak(trainer, call):
    """Let the model say these things: every second row calls a tool first, and answers what it says."""
    said = []

    def turn(prompt_ids, *_, **__):
        calls = not said
        said.append(len(prompt_ids))
        texts = [call % row if calls and row % 2 else "~" * row + "!" for row in range(len(prompt_ids))]
        return [trainer.processing_class(f"{text}<|im_end|>")["input_ids"] for text in texts], None

    trainer._generate_single_turn = turn
    return said


def length(completions, **_):
    """A reward of its own for nearly every completion."""
    return [len(str(completion)) / 100 for completion in completions]


def check_update(trainer, update, name="oblr"):
    """Norms and gradient against one backward a completion."""
    policy, temperature = policy_of(trainer, update), trainer.temperature
    norms, gradients = [], []
    rewards = iter(update["generation"].rewards_PG.split(2))
    for batch in update["batch"]:
        scores_SN = scores(policy, batch, temperature)
        norm2_PG = scores_SN.square().sum(1).view(-1, G)
        rewards_PG = next(rewards)
        b = estimators.baseline(name, rewards_PG, norm2_PG=norm2_PG)
        gradients.append((rewards_PG - b).flatten()[:, None] * scores_SN)
        norms.append(norm2_PG.flatten())
    assert_close(-flat(update["grads"]), torch.cat(gradients).mean(0), 1e-6)  # rewards are float32
    found = torch.tensor(list(trainer._logs["extra"]["score_norm2"]), dtype=torch.float64)
    torch.testing.assert_close(found, torch.cat(norms), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("tools", {}),
        ("tools", {"gradient_checkpointing": True, "peft_config": LoraConfig(**LORA)}),
        ("environment", {}),
    ],
    ids=["tools", "lora checkpointed", "environment"],
)
def test_what_a_tool_says_is_read_and_has_no_score(tmp_path, monkeypatch, kind, given):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    words, function = ({"tools": [add]}, "add") if kind == "tools" else ({"environment_factory": Sums}, "plus")
    further = '"a": 3, ' if kind == "tools" else ""
    trainer = ours(
        tmp_path, chat_policy(), length, prompts=CHATS, words=words, max_steps=1, max_completion_length=256,
        baseline="oblr", look_steps=1, **given,
    )  # fmt: skip
    said = speak(trainer, f'<tool_call>\n{{"name": "{function}", "arguments": {{{further}"b": %d}}}}\n</tool_call>')
    captured = Capture(trainer)
    trainer.train()
    assert said == [16, 8]
    log = trainer.state.log_history[0]
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (0.5, 0)
    assert log.get("rewards/Sums/mean", 0.5) == 0.5
    [update] = captured.updates
    for batch in update["batch"]:
        own_S = (batch["completion_mask"] * batch["tool_mask"]).sum(1)
        assert (own_S < batch["completion_mask"].sum(1)).tolist() == [False, True] * 4
    check_update(trainer, update)


def test_what_tools_answer_is_no_variety_of_the_policys(tmp_path, monkeypatch):
    """All rows say the same, and the environment something else to each."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    numbers = itertools.count()
    monkeypatch.setattr(Sums, "reset", lambda self, **row: vars(self).update(first=next(numbers), asked=0))
    words, turns = {"environment_factory": Sums}, []
    trainer = ours(tmp_path, chat_policy(), length, prompts=CHATS, words=words, max_steps=1, max_completion_length=256)

    def turn(prompt_ids, *_, **__):
        turns.append(len(prompt_ids))
        call = '<tool_call>\n{"name": "plus", "arguments": {"b": 2}}\n</tool_call>'
        text = call if len(turns) % 2 else "!"
        return [trainer.processing_class(f"{text}<|im_end|>")["input_ids"] for _ in prompt_ids], None

    trainer._generate_single_turn = turn
    trainer.train()
    log, told = trainer.state.log_history[0], {str(each) for each in trainer._logs["completion"]}
    assert len(told) == 16
    assert (log["completions/distinct_ratio"], log["completions/same_ratio"]) == (1 / 16, 1)


def test_an_environment_that_owns_the_data_makes_whole_updates(tmp_path, monkeypatch):
    """TRL's stand-ins for prompts last for one generation, and an update would end there."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    words = {"environment_factory": Sums, "train_dataset": None}
    trainer = ours(tmp_path, chat_policy(), length, words=words, per_device_train_batch_size=4, steps_per_generation=1)
    trainer.train()
    assert [log["skipped"] for log in trainer.state.log_history if "reward" in log] == [0, 0]


def rollout(temperature=1.0, told=lambda logps: logps):
    """A `rollout_func` that draws two tokens, hears two of the environment, and draws two more."""

    def draw(prompts, trainer):
        model, rows = trainer.model, {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        for prompt in prompts:
            ids = start = trainer.processing_class(prompt)["input_ids"]
            logps = []
            for _ in range(2):
                for _ in range(2):
                    with torch.no_grad():
                        logp_V = (model(torch.tensor([ids])).logits[0, -1] / temperature).log_softmax(-1)
                    token = int(torch.multinomial(logp_V.exp(), 1))
                    ids, logps = [*ids, token], [*logps, float(logp_V[token])]
                if len(logps) == 2:
                    ids, logps = [*ids, 70, 71], [*logps, 0.0, 0.0]
            row = {"prompt_ids": start, "completion_ids": ids[len(start) :], "logprobs": told(logps)}
            for key, value in (row | {"env_mask": [1, 1, 0, 0, 1, 1]}).items():
                rows[key].append(value)
        return rows

    return draw


@pytest.mark.parametrize("given", [{}, {"temperature": 0.5}])
def test_what_the_environment_of_a_rollout_says_has_no_score(tmp_path, monkeypatch, given):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    words = {"rollout_func": rollout(given.get("temperature", 1.0))}
    given = {"max_steps": 1, "baseline": "oblr", "look_steps": 1, **given}
    trainer = ours(tmp_path, tiny_policy(torch.float64), words=words, **given)
    captured = Capture(trainer)
    trainer.train()
    [update] = captured.updates
    assert all(batch["tool_mask"].tolist() == [[1, 1, 0, 0, 1, 1]] * 8 for batch in update["batch"])
    check_update(trainer, update)
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-6


def test_a_policy_that_has_moved_since_is_not_taken_for_another(tmp_path, monkeypatch):
    """Log-probabilities are compared as long as no update was made on what was generated together."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    given = {"steps_per_generation": 4, "schedule": "off", "learning_rate": 0.03, "max_steps": 2}
    trainer = ours(tmp_path, tiny_policy(torch.float64), words={"rollout_func": rollout()}, **given)
    trainer.train()
    first, second = (log for log in trainer.state.log_history if "entropy" in log)
    assert first["sampling/sampling_logp_difference/max"] < 1e-6
    assert "sampling/sampling_logp_difference/max" not in second


def test_a_rollout_without_log_probabilities_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    words = {"rollout_func": lambda prompts, trainer: rollout()(prompts, trainer) | {"logprobs": None}}
    with pytest.raises(InputError, match="rollout_func does not return one log-probability per token"):
        ours(tmp_path, words=words, max_steps=1).train()


@pytest.mark.parametrize(
    ("temperature", "told", "message"),
    [
        (0.5, lambda logps: logps, "nats per token off the policy's"),
        (1.0, lambda logps: [0.0] * 6, "nats per token off the policy's"),
        (1.0, lambda logps: [logps[0], None, *logps[2:]], "invalid log-probabilities"),
        (1.0, lambda logps: logps[:2] + logps[4:], "one log-probability per token"),
        (1.0, lambda logps: [[logp] for logp in logps], "one log-probability per token"),
    ],
    ids=["another temperature", "zeros", "unknown", "own tokens alone", "nested"],
)
def test_a_rollout_of_another_policy_is_refused(tmp_path, monkeypatch, temperature, told, message):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = ours(tmp_path, words={"rollout_func": rollout(temperature, told)}, max_steps=1)
    with pytest.raises(InputError, match=rf"{message}.*every token of completion_ids"):
        trainer.train()
    assert not trainer.optimizer.state
