"""What every generated task keeps to, those of the laboratory, which are named by their files, among them."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.tasks import ADDITION, COUNTDOWN
from oblrpo.errors import InputError
from oblrpo.tasks import make_task
from oblrpo.tasks.task import is_heldout

VARIANTS = {
    "addition": (ADDITION, {}),
    "addition_long": (ADDITION, {"min_terms": 6, "max_terms": 9, "largest": 999}),
    "countdown": (COUNTDOWN, {}),
    "countdown_2": (COUNTDOWN, {"count": 2, "largest": 30}),
    "countdown_4": (COUNTDOWN, {"count": 4}),
    "path": ("path", {}),
    "path_7": ("path", {"min_nodes": 7, "max_nodes": 7}),
}
PINNED = {
    ADDITION: (["3+1+8+9=", "2+1+8+4="], ["21", "15"]),
    COUNTDOWN: (["9,2,2>5=", "4,3,7>7="], ["9,2,2>5", "4,3,7>7"]),
    "path": (["eb,ce,ed,ab,db:a>c=", "eb,fb,ac,ae,de,ab:d>f="], ["eb,ce,ed,ab,db:a>c", "eb,fb,ac,ae,de,ab:d>f"]),
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def make(request):
    name, parameters = request.param
    return lambda seed=0: make_task(name, seed, **parameters)


def prompts(problems):
    return [problem.prompt for problem in problems]


def test_batches_are_a_function_of_seed_and_step(make):
    assert make().train_batch(3, 20) == make().train_batch(3, 20)
    assert make().train_batch(3, 20) != make().train_batch(4, 20)
    assert make(0).train_batch(3, 20) != make(1).train_batch(3, 20)


@pytest.mark.parametrize("name", PINNED)
def test_batches_do_not_depend_on_the_process(name):
    problems = make_task(name, 0).train_batch(0, 2)
    assert (prompts(problems), [problem.answer for problem in problems]) == PINNED[name]


def test_batches_have_the_size_and_distinct_prompts(make):
    assert len(set(prompts(make().train_batch(0, 128)))) == 128


def test_heldout_does_not_depend_on_the_seed_and_grows_at_its_end(make):
    assert make(0).heldout(30) == make(7).heldout(30)
    assert make().heldout(30)[:10] == make().heldout(10)
    assert len(set(prompts(make().heldout(30)))) == 30


def test_heldout_and_training_are_disjoint(make):
    heldout = set(prompts(make().heldout(50)))
    trained = {
        prompt for seed in range(3) for step in range(20) for prompt in prompts(make(seed).train_batch(step, 50))
    }
    assert len(trained) > 500
    assert not heldout & trained


def test_a_tenth_of_what_is_drawn_is_held_out(make):
    rng = random.Random(0)
    share = sum(is_heldout(make().draw(rng).prompt) for _ in range(2000)) / 2000
    assert 0.06 < share < 0.14


@pytest.mark.parametrize(
    ("first", "second"), [("12+7+30=", "30+12+7="), ("3,5,7>22=", "7,3,5>22="), ("ab,bc,ca:a>c=", "cb,ac,ba:a>c=")]
)
def test_reordered_problems_are_on_the_same_side(first, second):
    assert is_heldout(first) == is_heldout(second)


def test_prompts_and_demonstrations_are_short_ascii(make, demonstrated):
    for problem, shown in demonstrated(make(), 200):
        assert (problem.prompt + shown).isascii()
        assert (problem.prompt + shown).isprintable()
        assert problem.prompt.endswith("=")


@pytest.mark.parametrize("name", PINNED)
def test_default_tasks_fit_48_characters(name, demonstrated):
    assert max(len(problem.prompt + shown) for problem, shown in demonstrated(make_task(name), 500)) <= 48


def test_demonstrations_without_noise_are_right(make, demonstrated):
    assert all(make().reward(problem, shown) == 1.0 for problem, shown in demonstrated(make(), 200))


def test_demonstrations_on_heldout_problems_are_right(make):
    rng = random.Random(0)
    for problem in make().heldout(50):
        assert make().reward(problem, make().demonstration(problem, rng, 0.0)) == 1.0


def test_noise_makes_some_demonstrations_wrong_and_more_noise_more(make, demonstrated):
    def rate(noise):
        return sum(make().reward(problem, shown) for problem, shown in demonstrated(make(), 200, noise)) / 200

    mild, strong = rate(0.1), rate(0.4)
    assert 0.05 < strong < mild - 0.05
    assert mild < 0.97


def test_demonstrations_are_a_function_of_the_generator(make):
    (problem,) = make().train_batch(0, 1)
    shown = [make().demonstration(problem, random.Random(seed), 0.3) for seed in (*range(30), *range(30))]
    assert shown[:30] == shown[30:]


def test_lengths_vary_for_one_problem(make):
    rng = random.Random(0)
    varied = sum(
        len({len(make().demonstration(problem, rng, 0.0)) for _ in range(20)}) > 1
        for problem in make().train_batch(0, 20)
    )
    assert varied >= 12  # a sum of two terms has one demonstration only


def test_hostile_completions_earn_nothing_fast(make, hostile):
    (problem,) = make().train_batch(0, 1)
    start = time.perf_counter()
    assert make().reward(problem, hostile) == 0.0
    assert time.perf_counter() - start < 0.5


@settings(deadline=None, max_examples=100)
@given(completion=st.text() | st.text("0123456789+-*/()=, abcdef", max_size=40), name=st.sampled_from(list(PINNED)))
def test_reward_is_zero_or_one_on_any_text(completion, name):
    (problem,) = make_task(name).train_batch(0, 1)
    assert make_task(name).reward(problem, completion) in (0.0, 1.0)


def test_white_space_around_is_allowed(make, demonstrated):
    for problem, shown in demonstrated(make(), 20):
        assert make().reward(problem, f" {shown}\n") == 1.0


def test_anything_after_the_solution_spoils_it(make, demonstrated):
    for problem, shown in demonstrated(make(), 100):
        for tail in ("0", "=", "x", " 1", ".", ",", "+", shown[-1]):
            assert make().reward(problem, shown + tail) == 0.0


def test_small_tasks_repeat_prompts_in_training_but_never_in_heldout():
    task = make_task(ADDITION, min_terms=2, max_terms=2, largest=9)
    trained = set(prompts(task.train_batch(0, 200)))
    assert 60 < len(trained) <= 81
    assert len(task.train_batch(0, 200)) == 200
    with pytest.raises(InputError, match=r"Task 'addition' has about \d+ held-out problems .* but 100 are needed"):
        task.heldout(100)
    assert not trained & set(prompts(task.heldout(5)))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "8"])
def test_a_size_that_is_no_size_is_refused(make, size):
    with pytest.raises(InputError, match="batch size must be a whole number of at least 1"):
        make().train_batch(0, size)
    with pytest.raises(InputError, match="held-out size must be a whole number of at least 1"):
        make().heldout(size)
