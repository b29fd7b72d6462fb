"""What nobody has requested gives way to the problems there are; what somebody requested is refused."""

from dataclasses import replace

import pytest

from lab.tasks import ADDITION
from oblrpo.errors import InputError
from oblrpo.policy import make_policy
from oblrpo.runs import RunFolder
from oblrpo.settings import (
    PolicyConfig,
    TrainConfig,
    adjustable,
    flatten,
    load_recipe,
    with_settings,
)
from oblrpo.tasks import DataTask, Problem, make_task
from oblrpo.trainer.check import check
from oblrpo.trainer.setup import adjust
from oblrpo.trainer.task import drop_long_prompts

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def policy():
    return make_policy(PolicyConfig(model_args=TINY | {"max_position_embeddings": 600}, device="cpu"))


def problems(count, word="What is"):
    return [Problem(f"{word} {number}?", str(number)) for number in range(count)]


def adjusted(policy, rows, heldout=None, **requested):
    """The config of a run on `rows`, of which `requested` was requested, and what its head says of that."""
    config = with_settings(TrainConfig(), requested, "a test")
    task = rows if not isinstance(rows, list) else DataTask("mine", rows, heldout, config.task.heldout_fraction)
    fits, held, _, words = adjust(config, task, policy, adjustable(config))
    assert len(held) == fits.run.eval_prompts
    assert fits.given == config.given
    assert len(task.train_batch(1, fits.rollout.prompts_per_step)) == fits.rollout.prompts_per_step
    return flatten(fits), words


@pytest.mark.parametrize(
    ("count", "requested", "P", "heldout_rows"),
    [
        (3000, {}, 64, 128),
        (300, {}, 64, 42),
        (50, {}, 46, 4),
        (9, {}, 7, 2),
        (8, {}, 6, 2),
        (7, {"prompts_per_step": 4}, 4, 2),
        (4, {"prompts_per_step": 2, "eval_prompts": 2}, 2, 2),
        (300, {"eval_prompts": 40}, 64, 40),  # the share that is held out is a default, too
        (300, {"eval_prompts": 4}, 64, 4),
        (50, {"prompts_per_step": 48}, 48, 2),
        (50, {"prompts_per_step": 30, "eval_prompts": 20}, 30, 20),
        (50, {"heldout_fraction": 0.5}, 25, 25),
    ],
)
def test_it_trains_on_as_many_rows_as_there_are(policy, count, requested, P, heldout_rows):
    flat, words = adjusted(policy, problems(count), **requested)
    assert (flat["prompts_per_step"], flat["eval_prompts"]) == (P, heldout_rows)
    assert {name: flat[name] for name in requested} == requested
    usual = flatten(TrainConfig()) | {"chat": False} | requested
    changed = [name for name in flat if flat[name] != usual[name]]
    if "heldout_fraction" in changed:  # it is said in rows
        changed.remove("heldout_fraction")
        assert " rows held out" in words
    assert words.count(" instead of ") == len(changed)
    assert words.count("\n") == bool(words)
    assert all(f"{name} {flat[name]} instead of {usual[name]} (" in words for name in changed)
    # Another run with these numbers, as they stand in config.yaml, has the same problems.
    again, nothing = adjusted(policy, problems(count), **{name: flat[name] for name in adjustable(TrainConfig())})
    assert (again, nothing) == (flat, "")


@pytest.mark.parametrize(
    ("count", "requested", "words"),
    [
        (7, {}, r"mine has too few rows \(7\); give at least 8, or set prompts_per_step yourself\."),
        (1, {}, r"mine has too few rows \(1\)"),
        (50, {"prompts_per_step": 100}, r"too few for 100 to train on .* set prompts_per_step lower, add rows or give"),
        (50, {"prompts_per_step": 49}, r"mine has 50 rows, too few for 49 to train on \(prompts_per_step\) and 2 held"),
        (50, {"eval_prompts": 128}, r"too few for 2 to train on .* 128 held out \(eval_prompts\); set eval_prompts"),
        (50, {"prompts_per_step": 31, "eval_prompts": 20}, "set prompts_per_step or eval_prompts lower"),
        (50, {"heldout_fraction": 0.0}, r"mine has 0 held-out rows, but 2 are needed; add rows or raise heldout_frac"),
        (50, {"heldout_fraction": 0.1, "eval_prompts": 20}, "4 held-out rows, but 20 are needed; set eval_prompts low"),
        (50, {"heldout_fraction": 0.5, "prompts_per_step": 40}, "25 training rows, but 40 are needed"),
        (50, {"tokens_per_micro_batch": 30}, "tokens_per_micro_batch is 30, but the longest prompt with 4 completions"),
        (50, {"max_completion_length": 599}, "with completions of 599 it does not fit the model's 600"),
        (
            50,
            {"max_completion_length": 99, "sampler": "vllm", "vllm_args": {"max_model_len": 100}},
            r"the longest prompt has \d+ tokens; with completions of 99 it does not fit vllm_args.max_model_len, 100",
        ),
        (
            50,
            {"sampler": "vllm", "vllm_args": {"max_model_len": 60}},
            "with completions of 64 it does not fit vllm_args",
        ),
    ],
)
def test_what_somebody_requested_is_refused(policy, count, requested, words):
    with pytest.raises(InputError, match=words):
        adjusted(policy, problems(count), **requested)


def test_completions_give_way_to_the_longest_sequence_that_vllm_is_to_hold(policy):
    requested = {"model": "loaded", "sampler": "vllm", "vllm_args": {"max_model_len": 100}}
    flat, words = adjusted(policy, problems(50), **requested)
    assert flat["max_completion_length"] == 100 - len("What is 49?")
    assert "max_completion_length 89 instead of 512 (vllm_args.max_model_len)" in words
    flat, _ = adjusted(policy, problems(50), **requested | {"sampler": "transformers"})
    assert flat["max_completion_length"] == 512


def test_rows_with_equal_prompts_stay_on_one_side(policy):
    assert adjusted(policy, problems(4) * 2)[0]["eval_prompts"] == 2
    with pytest.raises(InputError, match="its 8 rows hold few different prompts"):
        adjusted(policy, problems(1) * 8)


def test_rows_that_were_too_long_stay_away_when_others_are_held_out(policy):
    few = problems(20)
    twins = [Problem(problem.prompt.replace(" ", " " * 50), "") for problem in few]
    task = DataTask("mine", few + twins)
    drop_long_prompts(task, policy, 40)
    flat, _ = adjusted(policy, task, eval_prompts=10)
    assert (flat["prompts_per_step"], flat["eval_prompts"]) == (10, 10)
    assert task.notes == ["20 of 40 problems of mine are longer than 40 tokens (max_prompt_length); they are left out."]


def test_held_out_rows_of_their_own_may_be_few(policy):
    flat, _ = adjusted(policy, problems(8), problems(20, "How much is"))
    assert (flat["prompts_per_step"], flat["eval_prompts"], flat["heldout_fraction"]) == (8, 20, 0.1)
    with pytest.raises(InputError, match="mine has 1 held-out row, but 2 are needed; add rows"):
        adjusted(policy, problems(8), problems(1, "How much is"))
    with pytest.raises(InputError, match="mine has 20 held-out rows, but 30 are needed; set eval_prompts lower or add"):
        adjusted(policy, problems(8), problems(20, "How much is"), eval_prompts=30)


def test_a_small_built_in_task_holds_out_what_it_has(policy):
    few = make_task(ADDITION, min_terms=2, max_terms=2, largest=9)
    flat, words = adjusted(policy, few, model="loaded")
    assert (flat["prompts_per_step"], flat["eval_prompts"]) == (64, 13)
    assert words == "adjusted   eval_prompts 13 instead of 128 (no more are held out)\n"
    with pytest.raises(InputError, match=r"about 13 held-out problems .* but 64 are needed"):
        adjusted(policy, few, eval_prompts=64)


def test_a_budget_of_exactly_one_prompt_is_enough(policy):
    needed = (len("What is 49?") + 64) * 4
    flat, words = adjusted(policy, problems(50), tokens_per_micro_batch=needed)
    assert (flat["tokens_per_micro_batch"], "tokens_per_micro_batch" in words) == (needed, False)
    with pytest.raises(InputError, match=f"set it to at least {needed}"):
        adjusted(policy, problems(50), tokens_per_micro_batch=needed - 1)


def test_prompts_of_the_longest_length_allowed_are_kept(policy):
    task = DataTask("mine", problems(20))
    drop_long_prompts(task, policy, len("What is 9?"))
    assert sorted(problem.prompt for problem in task.given) == [f"What is {n}?" for n in range(10)]


def test_completions_are_as_long_as_the_context_leaves(policy):
    rows = [*problems(99), Problem("x" * 400, "")]
    flat, words = adjusted(policy, rows, model="loaded")
    assert flat["max_completion_length"] == 600 - 400
    assert "max_completion_length 200 instead of 512 (the model's context)" in words
    with pytest.raises(InputError, match="has 550 tokens; with completions of 64 it does not fit"):
        adjusted(policy, [*rows, Problem("x" * 550, "")])


def test_a_policy_that_knows_nothing_writes_short_completions(policy):
    """Random text hardly ever ends by itself: 512 tokens of it took eleven minutes where a few are enough."""
    flat, words = adjusted(policy, problems(300))
    assert flat["max_completion_length"] == 64
    assert "max_completion_length 64 instead of 512 (a policy that is built begins with random text)" in words
    for requested in ({"max_completion_length": 400}, {"model": "loaded"}, {"sft_data": ("shown.jsonl",)}):
        assert adjusted(policy, problems(300), **requested)[0]["max_completion_length"] == requested.get(
            "max_completion_length", 512
        )
    taught = adjusted(policy, make_task("path"), warm_start_steps=5)
    assert (taught[0]["max_completion_length"], taught[1]) == (512, "")


@pytest.mark.parametrize("context", [600, 150, 120])
def test_prompts_that_are_yet_to_be_generated_have_room_to_be_longer(context):
    """By as many tokens as the longest that was seen; rows of data are all seen, and leave all but themselves."""
    tight = make_policy(PolicyConfig(model_args=TINY | {"max_position_embeddings": context}, device="cpu"))
    few = make_task("arithmetic")
    seen = [problem.prompt for problem in (*few.heldout(128), *few.train_batch(1, 64))]
    longest = max(tight.lengths(seen))
    assert 150 - 2 * longest > 64
    flat, _ = adjusted(tight, few, warm_start_steps=1)
    assert flat["max_completion_length"] == max(64, min(512, context - 2 * longest))
    flat, _ = adjusted(tight, [Problem(prompt, "") for prompt in seen], model="loaded")
    assert flat["max_completion_length"] == min(512, context - longest)


def test_numbers_of_a_recipe_bend_on_data_of_the_users_own(policy):
    """They were not typed; a YAML file of the user's own was."""
    config = with_settings(load_recipe("smollm2-arithmetic", TrainConfig()), {"data": "mine.jsonl"}, "a test")
    task = DataTask("mine", [Problem("x" * 200, ""), *problems(19)])
    fits, *_, words = adjust(config, task, policy, adjustable(config))
    assert fits.rollout.tokens_per_micro_batch == (200 + 4) * 4
    assert "tokens_per_micro_batch 816 instead of 512" in words
    demo = with_settings(load_recipe("demo", TrainConfig()), {"data": "mine.jsonl"}, "a test")
    check(demo)
    fits, *_, words = adjust(demo, DataTask("mine", problems(50)), policy, adjustable(demo))
    assert not fits.warm_start.begins
    assert "warm_start_steps 0 instead of 200 (data has no demonstrations)" in words
    with pytest.raises(InputError, match="warm_start_steps needs sft_data or a built-in task"):
        check(with_settings(demo, {"warm_start_steps": 200}, "a test"))


def test_what_was_requested(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("prompts_per_step: 32\n")
    own = load_recipe(str(file), TrainConfig())
    assert "prompts_per_step" not in adjustable(own)
    assert "eval_prompts" in adjustable(own)
    assert adjustable(load_recipe("demo", TrainConfig())) == adjustable(TrainConfig())
    assert replace(own, given=()) == own  # two runs are not different by it
    assert "chat" in adjustable(with_settings(own, {"chat": None}, "a test"))
    run = RunFolder(tmp_path / "run")
    run.create(with_settings(TrainConfig(), {"steps": 7}, "a test"))
    assert load_recipe(str(run.config_file), TrainConfig()).given == ("steps",)
    file.write_text(run.config_file.read_text().replace("eval_prompts: 128", "eval_prompts: 20"))
    assert not adjustable(load_recipe(str(file), TrainConfig())) - {"chat"}  # somebody has been at it
