"""Tasks of reasoning-gym: what they draw, score and refuse, and that no completion is ever run."""

import inspect
import json
import random
import re
import subprocess
import sys
import textwrap

import pytest

from oblrpo.errors import InputError
from oblrpo.tasks import gym, gym_worker, make_task
from oblrpo.tasks.gym import ReasoningGymTask, final_answer, slip
from oblrpo.workers import Worker

pytest.importorskip("reasoning_gym")

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def worker():
    worker = Worker("oblrpo.tasks.gym_worker:main", environment=gym_worker.ENVIRONMENT)
    yield worker
    worker.stop()


@pytest.fixture
def make(worker, monkeypatch):
    """Make tasks that share a process; starting one takes seconds."""
    monkeypatch.setattr(gym, "Worker", lambda *_, **__: worker)
    return lambda name, seed=0, /, **parameters: make_task(f"reasoning_gym/{name}", seed, **parameters)


def shown(task, problems):
    return [task.demonstration(problem, random.Random(0), 0.0) for problem in problems]


NAMES = [
    "acre", "arc_agi", "binary_matrix", "bitwise_arithmetic", "chain_sum", "count_primes", "countdown", "dice",
    "figlet_font", "graph_color", "isomorphic_strings", "list_functions", "n_queens", "number_sorting", "pool_matrix",
    "polynomial_multiplication", "prime_factorization", "rubiks_cube", "simple_integration", "spiral_matrix",
    "string_insertion", "word_ladder",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_example_answers_score_1_and_nothing_or_nonsense_less(make, name):
    task = make(name)
    problems = task.train_batch(1, 8)
    assert task.name == f"reasoning_gym/{name}"
    if name not in {"graph_color", "rubiks_cube"}:
        assert task.rewards(problems, shown(task, problems)) == [1.0] * 8
    for text in ("", "xyzzy [1, 'q'", "<answer></answer>", "\ud800", "9" * 10_000):
        assert all(0 <= reward < 1 for reward in task.rewards(problems, [text] * 8)), text


def test_batches_are_a_function_of_seed_step_and_size(make):
    batch = make("chain_sum").train_batch(3, 20)
    assert make("chain_sum").train_batch(3, 20) == batch
    assert len({problem.prompt for problem in batch}) == 20
    assert make("chain_sum").train_batch(4, 20) != batch
    assert make("chain_sum", 1).train_batch(3, 20) != batch


@pytest.mark.parametrize("name", ["isomorphic_strings", "list_functions"])  # order of sets; a generator all share
def test_batches_depend_neither_on_the_process_nor_on_what_it_did_before(make, name, monkeypatch):
    expected = make(name).train_batch(2, 8)
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    other = make_task(f"reasoning_gym/{name}")
    other.train_batch(9, 8)
    assert other.train_batch(2, 8) == expected


def test_held_out_problems_are_never_trained_on(make):
    held = {problem.prompt for problem in make("chain_sum", 5, **SMALL).heldout(12)}
    batches = [make("chain_sum", seed, **SMALL).train_batch(step, 100) for seed in (0, 5) for step in range(4)]
    trained = {problem.prompt for batch in batches for problem in batch}
    assert len(held) == 12
    assert len(trained) > 170  # of the 200 that there are
    assert not held & trained
    assert make("chain_sum").heldout(8)[:3] == make("chain_sum", 9).heldout(3)


def test_the_split_does_not_depend_on_the_template(make):
    plain = make("chain_sum", prompt_template="{prompt}").heldout(5)
    asked = make("chain_sum", prompt_template="Q: {prompt} A:").heldout(5)
    assert [f"Q: {problem.prompt} A:" for problem in plain] == [problem.prompt for problem in asked]


def test_the_answer_is_what_stands_in_the_last_tags():
    assert final_answer(" 12\n") == "12"
    assert final_answer("so <answer> 12\n</answer> it is") == "12"
    assert final_answer("<answer>1</answer> no: <answer>12</answer>") == "12"
    assert final_answer("<answer>1<answer>12</answer>") == "12"
    assert final_answer("12</answer>") == "12</answer>"
    assert final_answer("<answer>12") == "<answer>12"
    assert final_answer("<answer>" * 200_000) == "<answer>" * 200_000


def test_equal_answers_are_scored_once(make, worker, monkeypatch):
    task = make("chain_sum")
    problems = task.train_batch(0, 2)
    right = shown(task, problems)
    asked = []
    monkeypatch.setattr(task, "_ask", lambda *message: asked.append(message) or 0.5)
    assert task.rewards([problems[0]] * 3 + [problems[1]], [right[0], right[0], "1", right[0]]) == [0.5] * 4
    assert len([message for message in asked if message[0] == "score"]) == 3


def test_demonstrations_get_worse_with_noise_and_have_tags_where_the_template_has(make):
    task = make("chain_sum", prompt_template="{prompt}")
    problems = task.train_batch(0, 40)
    assert shown(task, problems) == [json.loads(problem.answer)["answer"] for problem in problems]
    wrong = [task.demonstration(problem, random.Random(0), 1.0) for problem in problems]
    assert max(task.rewards(problems, wrong)) < 1
    assert shown(make("chain_sum"), problems)[0].startswith("<answer>")
    cube = make("rubiks_cube")
    (problem,) = cube.train_batch(0, 1)
    with pytest.raises(
        InputError, match=r"'reasoning_gym/rubiks_cube' has no example answers .* warm_start_steps to 0"
    ):
        cube.demonstration(problem, random.Random(0), 0.0)


def test_a_slip_changes_one_character():
    for word in ("1904", "abC", "-7", "True"):
        for seed in range(20):
            wrong = slip(word, random.Random(seed))
            assert wrong != word
            assert len(word) - 1 <= len(wrong) <= len(word)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("chain_sums", {}, r"reasoning_gym has no task 'chain_sums' among its \d+\. Did you mean 'chain_sum'\?$"),
        ("zzzzzz", {}, r"reasoning_gym has no task 'zzzzzz' among its \d+; they are: ab, acre, .*zebra_puzzles\.$"),
        ("chain_sum", {"min_term": 2}, r"no parameter 'min_term'; it has: .*max_terms.* Did you mean 'min_terms'\?$"),
        ("chain_sum", {"seed": 2}, "no parameter 'seed'"),
        ("chain_sum", {"size": 2}, "no parameter 'size'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "'reasoning_gym/chain_sum' refuses its parameters: max_terms"),
        ("chain_sum", {"min_terms": "two"}, "'reasoning_gym/chain_sum' refuses its parameters: '>' not supported"),
        ("chain_sum", {"min_terms": 2.5, "max_terms": 3.5}, "makes no problem with these parameters: .*integer"),
        ("chain_sum", {"min_terms": {1}}, "takes numbers, text, lists and mappings only"),
        ("chain_sum", {"prompt_template": "no place"}, r"prompt_template must contain \{prompt\}"),
        ("chain_sum", {"prompt_template": 3}, "prompt_template must be text, got 3"),
        ("composite", {}, "'reasoning_gym/composite' cannot be trained on: it mixes other data sets"),
        ("game_of_life_halting", {}, "cannot be trained on: it gives every answer that is not empty the full score"),
        ("puzzle24", {}, "cannot be trained on: it does not check which numbers an answer uses"),
    ],
)
def test_mistakes_are_one_sentence(make, name, parameters, message):
    with pytest.raises(InputError, match=message) as caught:
        make(name, **parameters)
    assert "\n" not in str(caught.value)


def test_without_reasoning_gym(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"needs reasoning-gym; install it with: .* pip install 'oblrpo\[reasoning-gym\]'"
    ):
        ReasoningGymTask("chain_sum")


def test_refused_scorers_are_as_bad_as_said(worker):
    """So that a version that mends them is noticed."""
    from reasoning_gym.factory import create_dataset

    halting = create_dataset("game_of_life_halting", seed=0, size=8)
    assert all(halting.score_answer("xyzzy", entry) == 1.0 for entry in halting)
    puzzle = create_dataset("puzzle24", seed=0, size=8)
    assert all(puzzle.score_answer("6*4*1*1", entry) == 1.0 for entry in puzzle)


PAYLOADS = ["{call}", "[{call}]", "({call},)", "x + {call}", "f'{{{call}}}'"]
CALL = "__import__('pathlib').Path({path!r}).touch()"


@pytest.mark.parametrize("name", sorted(gym_worker.EVALUATED))
def test_no_completion_is_run(make, name, tmp_path):
    ran = tmp_path / "ran"
    task = make(name)
    (problem,) = task.train_batch(0, 1)
    for payload in PAYLOADS:
        assert task.reward(problem, payload.format(call=CALL.format(path=str(ran)))) < 1
    assert not ran.exists()


@pytest.mark.parametrize(
    ("pattern", "guard", "runs"), [(True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("name", ["string_insertion", "polynomial_multiplication"])
def test_the_pattern_and_the_guard_each_keep_code_out(name, pattern, guard, runs, tmp_path):
    """With neither of them it does run, so these payloads are real."""
    path = tmp_path / "ran"
    code = f"""
        import sys
        from oblrpo.tasks import gym_worker
        call = {CALL.format(path=str(path))!r}
        if {guard}:
            sys.addaudithook(gym_worker._guard)
        if not {pattern}:
            gym_worker.EVALUATED = {{}} if {guard} else {{{name!r}: gym_worker._ANY}}
        gym_worker.load({name!r}, "{{}}", 1, 1)
        print(gym_worker.score({name!r}, "{{}}", 1, 1, call))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1
    assert path.exists() == runs


@pytest.mark.parametrize(
    ("name", "answer", "passes"),
    [
        ("countdown", "49*(85 - 1)/14 - 42", True), ("countdown", "9**9**9**9", False), ("countdown", "9* *9", False),
        ("countdown", "4!", False), ("countdown", "int(4)", False), ("countdown", "1.5*2", True),
        ("intermediate_integration", "2*(4*x + 2)**(3/2)/3 - exp(x)*asin(3*x) + sqrt(1 - 9*x**2)/3 + C", True),
        ("intermediate_integration", "Integral(x**2*cos(x), x) + C", False),
        ("intermediate_integration", "x.diff(x)", False), ("intermediate_integration", "x . n", False),
        ("intermediate_integration", "x_1", False), ("intermediate_integration", "lambda x", False),
        ("intermediate_integration", "x['a']", False), ("polynomial_multiplication", "-2907*y**4 + 71*y", True),
        ("polynomial_multiplication", "diff(y)", False), ("string_insertion", "['A', 'B']", True),
        ("string_insertion", "exit()", False), ("string_insertion", "a.b", False), ("n_queens", "_ Q\nQ _", True),
        ("n_queens", "f'{exit}'", False), ("n_queens", "(1)", False),
    ],
)  # fmt: skip
def test_what_may_be_evaluated(name, answer, passes):
    assert bool(gym_worker.EVALUATED[name].fullmatch(answer)) == passes


def test_no_other_scorer_evaluates_text():
    """Read from the sources, so that a version with another one is noticed."""
    from reasoning_gym.factory import DATASETS

    found = set()
    for name, (kind, _) in DATASETS.items():
        source = inspect.getsource(kind.score_answer)
        called = [value for word, value in vars(sys.modules[kind.__module__]).items() if f"{word}(" in source]
        source += "".join(inspect.getsource(value) for value in called if inspect.isfunction(value))
        if re.search(
            r"\b(?<!re\.)(?:eval|exec|compile|sympify|simplify|lambdify|parse_latex|(?:sp|sympy)\.parse_expr)\(", source
        ):
            found.add(name)
        if "parse_expr(" in source and getattr(sys.modules[kind.__module__], "parse_expr", len).__module__.startswith(
            "sympy"
        ):
            found.add(name)
    assert found - set(gym_worker.REFUSED) == set(gym_worker.EVALUATED)


def test_a_score_that_takes_too_long_is_0_and_the_next_is_right(make, monkeypatch):
    monkeypatch.setattr(gym, "SCORE_SECONDS", 5.0)
    task = make("polynomial_multiplication")
    (problem,) = task.train_batch(0, 1)
    (right,) = shown(task, [problem])
    assert task.rewards([problem] * 2, ["9**9**9**9", right]) == [0.0, 1.0]


def test_a_process_that_died_is_replaced(make, worker):
    task = make("chain_sum")
    (problem,) = task.train_batch(0, 1)
    worker._process.kill()
    worker._process.wait()
    assert task.rewards([problem], shown(task, [problem])) == [1.0]


def test_a_generator_that_takes_too_long_is_named(make, monkeypatch):
    monkeypatch.setattr(gym, "DRAW_SECONDS", 0.001)
    with pytest.raises(InputError, match=r"'reasoning_gym/knight_swap' makes no problem .* no answer after 0.001 s"):
        make("knight_swap")
