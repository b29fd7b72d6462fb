"""One environment class in TRL's trainer with our adapter and in our own: the same tokens, rewards, norms, gradient."""

import copy

import pytest
import torch

from oblrpo.environments import Environments
from oblrpo.policy import Policy
from oblrpo.policy.prompts import PromptFormat
from oblrpo.rewards import Rewards
from oblrpo.rollout.rollouts import Turn
from oblrpo.rollout.transformers import KeptTurns
from oblrpo.settings import TrainConfig, with_settings
from oblrpo.tasks import Problem
from oblrpo.trainer.setup import make_learner, sampler_of, with_tools
from tests.trl.support import Capture, flat, ours
from tests.trl.test_turns import CHATS, G, Sums, add, chat_policy, length

CALL = '<tool_call>\n{"name": "%s", "arguments": {%s"b": %d}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "%s", "arguments": {"c": 1}}\n</tool_call>'


def said(name, further, turn, row):
    """What row `row` says in its turn: two calls or one, a call with a wrong argument, or an answer."""
    if turn == 0 and row % 4 == 1:
        return CALL % (name, further, row) + "\n" + CALL % (name, further, 2)
    if turn == 0 and row % 4 == 2:
        return BAD % name
    if (turn == 0 and row % 4 == 3) or (turn == 1 and row % 8 == 1):
        return "Let me see. " + CALL % (name, further, 3)
    return "~" * row + "!"


@pytest.mark.parametrize("kind", ["environment", "tools"])
def test_both_trainers_make_the_same_update_of_an_environment(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    words = {"environment_factory": Sums} if kind == "environment" else {"tools": [add]}
    name, further = ("plus", "") if kind == "environment" else ("add", '"a": 3, ')
    policy = chat_policy()
    model = copy.deepcopy(policy.model)
    trainer = ours(
        tmp_path, policy, length, prompts=CHATS, words=words, max_steps=1, max_completion_length=400, baseline="oblr",
        look_steps=1,
    )  # fmt: skip
    turns, alive = [], []

    def speak(prompt_ids, *_, **__):
        rows = range(16) if not turns else [row for row in alive[-1] if turns[-1][row][-1]]
        texts = {row: said(name, further, len(turns), row) for row in rows}
        assert len(prompt_ids) == len(texts)
        turns.append({row: (text, "tool_call" in text) for row, text in texts.items()})
        alive.append(list(rows))
        return [trainer.processing_class(f"{text}<|im_end|>")["input_ids"] for text in texts.values()], None

    trainer._generate_single_turn = speak
    captured = Capture(trainer)
    trainer.train()
    [update] = captured.updates
    theirs = [
        (prompt[prompt_mask.bool()].tolist(), ids[mask.bool()].tolist(), own[mask.bool()].tolist())
        for part in update["batch"]
        for prompt, prompt_mask, ids, mask, own in zip(
            part["prompt_ids"], part["prompt_mask"], part["completion_ids"], part["completion_mask"], part["tool_mask"],
            strict=True,
        )
    ]  # fmt: skip
    texts = [trainer.processing_class.decode(prompt) for prompt, _, _ in theirs[::G]]
    chats = [next(chat for chat in CHATS if f"\n{chat[0]['content']}" in text) for text in texts]

    own = Policy(model.eval(), policy.tokenizer, PromptFormat())
    given = {"environment": "python:it"} if kind == "environment" else {"tools": ("python:it",)}
    settings = {
        **given, "baseline": "oblr", "look_steps": 1, "num_generations": G, "max_completion_length": 400,
        "prompts_per_step": 4, "reward_clip": 0.0,
    }  # fmt: skip
    config = with_settings(TrainConfig(), settings, "test")
    environments = Environments(
        config.turns.environment, config.turns.tools, 2000, {"python:it": Sums if kind == "environment" else add}
    )
    own = with_tools(own, environments)
    problems = [Problem(chat, "") for chat in chats]
    names = ["python:length", *filter(None, [environments.reward])]
    rewards = Rewards(None, names, functions={"python:length": length}, environment=environments.reward)
    learner = make_learner(own, rewards, config, sampler_of(own, config, environments))
    drawn = []

    def draw(self, rows, contexts, rooms):
        assert rows == alive[len(drawn)]
        ids = [policy.tokenizer(f"{turns[len(drawn)][row][0]}<|im_end|>")["input_ids"] for row in rows]
        drawn.append(rows)
        return [Turn(each, torch.zeros(3, len(each), dtype=torch.float64)) for each in ids]

    monkeypatch.setattr(KeptTurns, "draw", draw)
    seen = {}

    def step():
        seen["grads"] = {name: p.grad.clone() for name, p in own.model.named_parameters() if p.grad is not None}

    monkeypatch.setattr(learner.optimizer, "step", step)
    samples = learner.sample(problems)
    sequences, episodes = samples.rollouts.sequences, samples.rollouts.episodes
    mine = []
    for ids, mask, own_T in zip(sequences.ids_ST, sequences.mask_ST, sequences.own_ST, strict=True):
        before, behind = mask.bool().clone(), mask.bool().clone()
        before[sequences.start :], behind[: sequences.start] = False, False
        mine.append((ids[before].tolist(), ids[behind].tolist(), own_T[behind].tolist()))
    assert mine == theirs
    assert any(0 in own_T and 1 in own_T for _, _, own_T in mine)

    log = trainer.state.log_history[0]
    calls, failures = sum(each.calls for each in episodes), sum(each.failures for each in episodes)
    assert log["tools/call_frequency"] == pytest.approx(calls / 16)
    assert log["tools/failure_frequency"] == pytest.approx(failures / calls)
    assert failures
    assert calls > 12
    assert log["completions/mean_length"] == pytest.approx(float(sequences.lengths_S.float().mean()))
    torch.testing.assert_close(samples.rewards_PG.double(), update["generation"].rewards_PG.double(), rtol=1e-6, atol=0)

    result = learner.learn_from(samples, 1)
    norm2_PG = torch.tensor(list(trainer._logs["extra"]["score_norm2"]), dtype=torch.float64).view(-1, G)
    torch.testing.assert_close(result.norm2_PG.double(), norm2_PG, rtol=1e-6, atol=0)
    mine_N, theirs_N = flat(seen["grads"]), flat(update["grads"])
    assert float((mine_N - theirs_N).norm() / theirs_N.norm()) < 1e-6  # rewards are float32
