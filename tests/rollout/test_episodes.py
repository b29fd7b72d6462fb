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
from oblrpo.tasks.task import Messages

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
        return [2 + len(text) % 5 for _, text in results] * (
            1 + message["tool_calls"][0]["function"]["arguments"]["n"] % 4
        )


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
    object.__setattr__(
        policy, "tokens", lambda prompts: [[3 + len(text) % 7] * (2 + len(text) % 5) for text in prompts]
    )
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
        logits = policy.model(
            input_ids=sequences.ids_ST,
            attention_mask=sequences.mask_ST,
            position_ids=(sequences.mask_ST.cumsum(1) - 1).clamp(min=0),
        ).logits
    logps = logits[:, :-1].log_softmax(-1).gather(2, sequences.ids_ST[:, 1:, None])[..., 0][:, sequences.start - 1 :]
    exact = 1e-9 if rollouts.sampler_logps_SC.dtype == torch.float64 else 1e-5  # what `generate` reports
    torch.testing.assert_close(rollouts.sampler_logps_SC[own_SC].double(), logps[own_SC], rtol=exact, atol=exact)
    assert (rollouts.sampler_logps_SC[~own_SC] == 0).all()
    return sequences


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_tokens_are_drawn_behind_all_that_was_read(tiny_policy, kind):
    policy = policy_of(tiny_policy, kind)
    rollouts = sampler_of(policy).sample(PROBLEMS, G, LONGEST, 1.0)
    sequences = check(policy, rollouts)
    stops = [episode.stop for episode in rollouts.episodes]
    assert {"answer"} < set(stops) or kind == "gpt2"
    assert max(episode.turns for episode in rollouts.episodes) > 2
    assert (sequences.mask_ST[:, sequences.start :].sum(1) <= LONGEST).all()


def test_blocks_of_rows_act_in_environments_of_their_own(tiny_policy):
    """Rewards may look at all environments when everything has been sampled."""
    policy = policy_of(tiny_policy)
    sampler = sampler_of(policy)
    sampler.sampler.max_num_seqs = G
    rollouts = sampler.sample(PROBLEMS, G, LONGEST, 1.0)
    check(policy, rollouts)
    assert len({id(episode.environment) for episode in rollouts.episodes}) == len(PROBLEMS) * G
    assert all(episode.reward == episode.environment.number for episode in rollouts.episodes)


class Slow(Sums):
    """Answers late in one episode."""

    waited = 0

    def reset(self, **row):
        """Begin."""
        self.slow = row["prompt"] == "p"
        return super().reset(**row)

    def plus(self, n: int) -> int:
        """Add, perhaps slowly.

        Args:
            n: what to add.
        """
        if self.slow:
            time.sleep(0.3)
        return super().plus(n)


def test_a_slow_tool_holds_up_nobody(tiny_policy, monkeypatch):
    """The others take their turns meanwhile, and what was read of the slow row is still there when it joins them."""
    monkeypatch.setattr(episodes, "TOGETHER", 0.02)
    policy = policy_of(tiny_policy)
    sampler = sampler_of(policy, Slow)
    drawn = []
    turns = sampler.sampler.turns

    def watched(temperature):
        made = turns(temperature)
        draw = made.draw
        made.draw = lambda rows, *rest: drawn.append(rows) or draw(rows, *rest)
        return made

    sampler.sampler.turns = watched
    torch.manual_seed(1)
    rollouts = sampler.sample(PROBLEMS, G, LONGEST, 1.0)
    check(policy, rollouts)
    slow = [row for row in range(G) if rollouts.episodes[row].turns > 1]
    after = next(place for place, rows in enumerate(drawn) if place and set(slow) & set(rows))
    assert slow
    assert after > 1


def test_the_stops_of_episodes(tiny_policy):
    policy = policy_of(tiny_policy)
    rollouts = sampler_of(policy, Sums, max_turns=1).sample(PROBLEMS, G, LONGEST, 1.0)
    found = {episode.stop for episode in rollouts.episodes}
    assert "turns" in found
    assert found <= {"answer", "length", "turns"}
    assert all(episode.turns == 1 and not episode.calls for episode in rollouts.episodes)
    late = sampler_of(policy, Slow, episode_seconds=0.4).sample(PROBLEMS[:1], 16, 60, 1.0)
    assert "timeout" in {episode.stop for episode in late.episodes}


class Hanging(Sums):
    """Hangs in some calls."""

    def plus(self, n: int) -> int:
        """Add, or hang.

        Args:
            n: what to add.
        """
        if n in (3, 9):
            time.sleep(5)
        return super().plus(n)


def test_what_hangs_in_a_thread_ends_its_own_episode(tiny_policy):
    policy = policy_of(tiny_policy)
    sampler = sampler_of(policy, Hanging, tool_seconds=0.2)
    rollouts = sampler.sample(PROBLEMS, G, LONGEST, 1.0)
    check(policy, rollouts)
    stopped = [episode for episode in rollouts.episodes if episode.stop == "error"]
    assert stopped
    assert len(stopped) < len(rollouts.episodes)
    assert all(episode.reward is None and episode.failures for episode in stopped)
    gone = {id(episode.environment) for episode in stopped}
    assert not gone & {id(host.environment) for host in sampler.environments._free}


class Broken(Sums):
    """Hangs always."""

    def plus(self, n: int) -> int:
        """Hang.

        Args:
            n: a number.
        """
        time.sleep(5)


def test_a_run_whose_environments_all_end_is_refused(tiny_policy, monkeypatch):
    policy = policy_of(tiny_policy)
    sampler = sampler_of(policy, Broken, tool_seconds=0.05)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "plus", "arguments": {"n": 1}}}]}
    monkeypatch.setattr(sampler.format, "parse", lambda *_: call, raising=False)
    with pytest.raises(InputError, match=r"no environment lived to the end .* the tool 'plus': no answer after 0.05 s"):
        sampler.sample(PROBLEMS[:1], 2, 200, 1.0)


def test_results_that_leave_no_room_are_not_read(tiny_policy):
    policy = policy_of(tiny_policy)
    rollouts = sampler_of(policy).sample(PROBLEMS, G, 6, 1.0)
    sequences = check(policy, rollouts)
    assert (sequences.mask_ST[:, sequences.start :].sum(1) <= 6).all()
    full = [episode for episode in rollouts.episodes if episode.stop == "length" and episode[-1].get("tool_calls")]
    assert any(episode.calls for episode in full)
    assert rollouts.clipped_S.tolist() == [episode.stop == "length" for episode in rollouts.episodes]


def test_logps_are_kept_for_those_who_ask(tiny_policy):
    policy = policy_of(tiny_policy)
    sampler = sampler_of(policy)
    sampler.sampler = replace(sampler.sampler, logps=False)
    assert sampler.sample(PROBLEMS, G, LONGEST, 1.0).sampler_logps_SC is None


def test_a_model_without_the_loop_reads_the_whole_context_again(tiny_policy, monkeypatch):
    policy = policy_of(tiny_policy)
    monkeypatch.setattr("oblrpo.rollout.transformers.applies", lambda model: False)
    check(policy, sampler_of(policy).sample(PROBLEMS, G, LONGEST, 1.0))


def test_rows_with_tools_of_their_own_are_refused(tiny_policy):
    """They would be shown others than those that are there."""
    prompt = Messages([{"role": "user", "content": "p"}], "rows.jsonl line 1", {"tools": [{}]})
    with pytest.raises(InputError, match=r"rows.jsonl line 1 brings tools for the chat template"):
        sampler_of(policy_of(tiny_policy)).sample([Problem(prompt, "")], G, LONGEST, 1.0)


class Wordy(Sums):
    """Says too much."""

    def reset(self, **row):
        """Begin."""
        super().reset(**row)
        return "x" * 300


def test_what_reset_says_may_be_too_long(tiny_policy):
    policy = policy_of(tiny_policy)
    object.__setattr__(policy, "tokens", lambda prompts: [[3] * len(text) for text in prompts])
    with pytest.raises(InputError, match=r"with what reset says \('x+'\) a prompt has 301 tokens, and 30 more .* 256"):
        sampler_of(policy, Wordy).sample(PROBLEMS[:1], G, LONGEST, 1.0)


def test_calls_count_where_an_episode_runs_out_of_time(tiny_policy):
    rollouts = sampler_of(policy_of(tiny_policy), Slow, episode_seconds=0.1).sample(PROBLEMS[:1], 16, 60, 1.0)
    late = [episode for episode in rollouts.episodes if episode.stop == "timeout"]
    assert late
    assert all(episode.calls for episode in late)


def test_nothing_is_kept_of_rows_that_have_ended(tiny_policy):
    sampler = sampler_of(policy_of(tiny_policy))
    made = []
    turns = sampler.sampler.turns
    sampler.sampler.turns = lambda temperature: made.append(turns(temperature)) or made[-1]
    sampler.sample(PROBLEMS, G, LONGEST, 1.0)
    assert made[0]._kept == {}
