"""verl's agent loop with a tool and our adapter on a CPU: whose tokens count, and what it makes of them."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from verl.utils.tokenizer import continuous_token_wiring as wiring
from verl.utils.tokenizer.continuous_token import GLMContinuousTokenBuilder
from verl.workers.engine_workers import ActorRolloutRefWorker

from oblrpo import estimators
from oblrpo.adapters.verl.engine import OBLRWorker
from oblrpo.adapters.verl.prompt_rows import PromptRows
from oblrpo.adapters.verl.scoring import GRAM
from oblrpo.adapters.verl.settings import REPLACED_ENDS
from oblrpo.errors import InputError
from oblrpo.scores import oracle
from tests.verl.support import launch, turns
from tests.verl.support.batches import logps

OUTPUTS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Metrics of two steps in which the policy calls a tool, and the first batch."""
    folder = tmp_path_factory.mktemp("turns")
    turns.make_model(folder / "model")
    turns.make_data(folder)
    changes = turns.overrides(OUTPUTS) | {"algorithm.adv_estimator": "oblr_po", "+oblrpo.score_norms": "exact"}
    code, printed = launch.run(folder, 1, 2, dump=folder / "first.pt", **changes)
    assert code == 0, printed[-6000:]
    return launch.metrics(folder), torch.load(folder / "first.pt"), folder


@pytest.fixture(scope="module")
def truth(run):
    """Rows of the first batch, the model in float64, and each row's score by loop autograd."""
    _, batch, folder = run
    rows = [
        {"prompts": prompt, "responses": response, "response_mask": mask}
        for prompt, response, mask in zip(batch["prompts"], batch["responses"], batch["response_mask"], strict=True)
    ]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).eval()
    return rows, model, scores(model, rows)


def scores(model, rows):
    """One row at a time, (S, N)."""
    return torch.stack([torch.cat([g.flatten() for g in oracle.scores(model, logps(model, [row]))[0]]) for row in rows])


def written(row, tokenizer):
    """What the policy wrote and what it was told, turn by turn: text and whether it is the policy's own."""
    found = []
    for token, own in zip(row["responses"].tolist(), row["response_mask"].tolist(), strict=True):
        if not found or found[-1][1] != own:
            found.append(([], own))
        found[-1][0].append(token)
    return [(tokenizer.decode(tokens), bool(own)) for tokens, own in found]


def test_the_policy_calls_the_tool_and_is_told(run, truth):
    lines, _, folder = run
    rows, *_ = truth
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    episodes = [written(row, tokenizer) for row in rows]
    counts = [sum(own for _, own in episode) for episode in episodes]
    assert set(counts) == {1, 2, 3}
    groups = PromptRows(run[1]["uid"])
    assert any(len(set(each)) > 1 for each in groups.take(torch.tensor(counts)).tolist())
    results = [text for episode in episodes for text, own in episode if not own]
    assert all(text.startswith("\n<|im_start|>user\n<tool_response>\n") for text in results)
    assert any("apple" in text for text in results)
    assert any("Error executing tool" in text for text in results)
    assert lines[1]["num_turns/mean"] == 2 * sum(counts) / len(counts)  # verl counts what is said to the policy, too
    assert sorted(lines) == [1, 2]


def test_lengths_are_of_the_policys_own_tokens(run):
    lines, batch, _ = run
    own = sum(float(mask.sum()) for mask in batch["response_mask"]) / len(batch["uid"])
    every = sum(len(mask) for mask in batch["response_mask"]) / len(batch["uid"])
    assert batch["facts"]["mean_length"] == pytest.approx(own)
    assert lines[1]["response_length/mean"] == pytest.approx(every)  # verl's counts the tool's words
    assert every > 2 * own


def test_tokens_were_drawn_where_they_are_scored(run, truth):
    """Nothing is tokenised again: with these tokens before it, each has the probability it was drawn with."""
    _, batch, _ = run
    rows, model, _ = truth
    for row, drawn in zip(rows, batch["rollout_log_probs"], strict=True):
        whole, start = torch.cat([row["prompts"], row["responses"]]), len(row["prompts"])
        with torch.no_grad():
            logp_TV = model(input_ids=whole[None], use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
        logp_T = logp_TV.gather(1, row["responses"][:, None])[:, 0] * row["response_mask"]
        assert torch.allclose(logp_T, drawn.double(), atol=1e-4)


def test_norms_baseline_and_gradient_are_those_of_the_policys_own_tokens(run, truth):
    lines, batch, _ = run
    rows, model, score_SN = truth
    norm2_S = score_SN.square().sum(1)
    groups = PromptRows(batch["uid"])
    P = len(groups.rows_of)
    assert groups.row_PG.shape == (P, OUTPUTS)
    found_S = groups.put(groups.take(torch.stack(batch[GRAM])).diagonal(dim1=1, dim2=2))
    assert ((found_S - norm2_S).abs() / norm2_S).max() <= 3e-5

    rewards_PG = groups.take(torch.stack([each.double().sum() for each in batch["rm_scores"]]))
    baseline_PG = estimators.baseline("oblr", rewards_PG, norm2_PG=groups.take(norm2_S))
    advantage_S = groups.put(rewards_PG - baseline_PG)
    assert advantage_S.abs().max() > 0.1
    for row, advantage, each in zip(rows, advantage_S, batch["advantages"], strict=True):
        assert torch.allclose(each.double(), advantage * row["response_mask"], atol=1e-5)

    share_SN = -advantage_S[:, None] * score_SN / len(rows)
    group_norm2_P = torch.stack([(share_SN[rows].sum(0) * P).square().sum() for rows in groups.rows_of])
    moments = estimators.moments(group_norm2_P, share_SN.sum(0).square().sum())
    assert lines[1]["actor/grad_norm"] == pytest.approx(float(share_SN.sum(0).norm()), rel=1e-4)
    assert lines[1]["actor/trace_cov"] == pytest.approx(moments.trace_cov, rel=1e-4)

    wrong = [row | {"response_mask": torch.ones_like(row["response_mask"])} for row in rows]
    told_S = torch.tensor([bool((row["response_mask"] == 0).any()) for row in rows])
    every_S = scores(model, wrong).square().sum(1)
    assert ((every_S - norm2_S).abs() / norm2_S)[told_S].min() > 0.01  # or all of this would not show whose they are


def test_tools_are_refused_where_verl_replaces_the_token_that_ends_a_turn(refusal):
    builders = {
        name: wiring.get_continuous_token_builder_class(family) for name, family in wiring._MODEL_TYPE_TO_FAMILY.items()
    }
    assert {name for name, each in builders.items() if issubclass(each, GLMContinuousTokenBuilder)} == REPLACED_ENDS
    ids = {"<|observation|>": 1, "<|user|>": 2}
    builder = GLMContinuousTokenBuilder(SimpleNamespace(convert_tokens_to_ids=ids.get))
    drawn, told = [5, 1], [1, 7]  # each with the token between them
    merged = builder._merge_context_token_ids(drawn, told)
    assert merged.token_ids == [5, 1, 7]
    assert builder.align_response_metadata(merged, [1, 1])[0] == [1, 0, 0]  # though the policy drew it

    said = refusal("glm4_moe", function_tool_path="tools.py")
    assert "multi_turn.function_tool_path=tools.py and a glm4_moe model" in said


@pytest.fixture
def refusal(monkeypatch):
    """What a worker says, before anything is sampled, of a model that reads 120 tokens."""
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: None)

    def of(model_type, prompt_length=40, max_model_len=None, **tools):
        config = Qwen3Config(max_position_embeddings=120)
        config.model_type = model_type
        engine = SimpleNamespace(module=SimpleNamespace(config=config), configure=lambda *args: None)
        worker = object.__new__(OBLRWorker)
        worker.actor = SimpleNamespace(engine=engine)
        multi_turn = {"tool_config_path": None, "function_tool_path": None} | tools
        rollout = {"prompt_length": prompt_length, "response_length": 80, "max_model_len": max_model_len}
        worker.config = OmegaConf.create({"oblrpo": {}, "rollout": rollout | {"multi_turn": multi_turn}})
        try:
            worker.init_model()
        except InputError as error:
            return str(error)
        return ""

    return of


def test_tools_are_refused_where_an_episode_could_outgrow_the_context(refusal):
    """For verl's server then raises, and how long an episode is, is up to what was sampled."""
    assert refusal("qwen3", tool_config_path="tools.yaml") == ""
    assert refusal("qwen3", prompt_length=41) == ""
    said = refusal("qwen3", prompt_length=41, tool_config_path="tools.yaml")
    assert "multi_turn.tool_config_path=tools.yaml and actor_rollout_ref.rollout.max_model_len=120: an episode" in said
    assert "at least data.max_prompt_length + data.max_response_length=121" in said
    assert "max_model_len=119" in refusal("qwen3", max_model_len=119, tool_config_path="tools.yaml")
