"""Episodes: the tokens of every turn are draws of the policy behind all that it has read."""

import time
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from oblrpo.environments import Environments
from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.rollout import EpisodeSampler, TransformersSampler, episodes
from oblrpo.settings import TurnsConfig
from oblrpo.tasks import Problem

END, LONGEST, G = 1, 30, 4


class Sums:
    """Knows a number, and adds others to it."""

    def reset(self, **row):
        """Begin."""
        self.number = len(row["prompt"])
        return f" It is {self.number}."

    def plus(self, n: int) -> int:
        """Add to the number.

        Args:
            n: what to add.
        """
        if n == 7:
            raise ValueError("seven")
        self.number += n
        return self.number

    def get_reward(self):
        """The number."""
        return float(self.number)


class Words:
    """A format of turns: the first token is the argument of a call, or the turn an answer where it is even."""

    def parse(self, context_ids, turn_ids):
        """Return the message."""
        called = [] if turn_ids[0] % 2 == 0 else [{"function": {"name": "plus", "arguments": {"n": turn_ids[0]}}}]
        return {"role": "assistant", "content": str(list(turn_ids))} | ({"tool_calls": called} if called else {})

    def results(self, message, results, turn_ids):
        """Return tokens of the results, more or fewer."""
        return [2 + len(text) % 5 for _, text in results] * (1 + message["tool_calls"][0]["function"]["arguments"]["n"] % 4)


def policy_of(tiny_policy, kind="qwen3"):
    torch.manual_seed(0)
    if kind == "qwen3":
        config = Qwen3Config(
            vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, eos_token_id=END, pad_token_id=0, max_position_embeddings=256,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_embd=16, n_layer=2, n_head=2, eos_token_id=END))
    model.generation_config.eos_token_id = END
    policy = Policy(model.double().eval(), tiny_policy.tokenizer)
    object.__setattr__(policy, "encode", lambda prompts, room: [[3 + len(text) % 7] * (2 + len(text) % 5) for text in prompts])
    return policy


PROBLEMS = [Problem(f"p{'!' * number}", str(number)) for number in range(5)]


def sampler_of(policy, environment=Sums, features=True, **limits):
    environments = Environments("python:it", objects={"python:it": environment})
    config = TurnsConfig(environment="python:it", **limits)
    return EpisodeSampler(TransformersSampler(policy, True, features), policy, environments, Words(), config)


def check(policy, rollouts):
    """Every own token has the log-probability that the model gives it behind the whole row."""
    sequences = rollouts.sequences
    own_SC = sequences.own_SC.bool()
    with torch.no_grad():
        logits = policy.model(input_ids=sequences.ids_ST, attention_mask=sequences.mask_ST,
                              position_ids=(sequences.mask_ST.cumsum(1) - 1).clamp(min=0)).logits
    logps = logits[:, :-1].log_softmax(-1).gather(2, sequences.ids_ST[:, 1:, None])[..., 0][:, sequences.start - 1 :]
    torch.testing.assert_close(rollouts.sampler_logps_SC[own_SC], logps[own_SC], rtol=1e-9, atol=1e-9)
    assert (rollouts.sampler_logps_SC[~own_SC] == 0).all()
    return sequences


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_tokens_are_drawn_behind_all_that_was_read(tiny_policy, kind):
    policy = policy_of(tiny_policy, kind)
    rollouts = sampler_of(policy).sample(PROBLEMS, G, LONGEST, 1.0)
    sequences = check(policy, rollouts)
    stops = [episode.stop for episode in rollouts.episodes]
    assert {"answer", "length"} <= set(stops)
    assert max(episode.turns for episode in rollouts.episodes) > 2
    assert (sequences.mask_ST[:, sequences.start :].sum(1) <= LONGEST).all()
