"""Making tasks by name, and what is refused."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import oblrpo.tasks
from lab.tasks import ADDITION, COUNTDOWN
from oblrpo.errors import InputError
from oblrpo.tasks import BENCHMARKS, TASKS, Problem, make_task

SOURCES = sorted(Path(oblrpo.tasks.__file__).parent.rglob("*.py"))


def test_every_task_can_be_made_by_its_name():
    assert list(TASKS) == ["arithmetic", "path"]
    assert all(make_task(name, 3).name == name for name in TASKS)


def test_every_task_says_what_it_is_with_an_example_that_solves_it():
    for name in TASKS:
        task = make_task(name)
        prompt, *answers = re.findall("`(.*?)`", task.about)
        problem = Problem(prompt, prompt[:-1] if name == "path" else answers[0])
        assert answers
        assert task.rewards([problem] * len(answers), answers) == [1.0] * len(answers)
    assert all(benchmark.about.endswith(".") for benchmark in BENCHMARKS.values())


def test_parameters_and_seed_arrive():
    task = make_task(ADDITION, 4, min_terms=3, max_terms=3, largest=9)
    assert task.seed == 4
    assert all(problem.prompt.count("+") == 2 and len(problem.prompt) == 6 for problem in task.train_batch(0, 50))


@pytest.mark.parametrize(("name", "suggestion"), [("pth", r" Did you mean 'path'\?"), ("qqqq", "")])
def test_an_unknown_task_is_named_with_a_suggestion(name, suggestion):
    known = "arithmetic, path, reasoning_gym/NAME, and file.py:Class for your own."
    with pytest.raises(InputError, match=f"^Unknown task '{name}'; the tasks are: {known}{suggestion}$"):
        make_task(name)


def test_an_unknown_parameter_is_named_with_a_suggestion():
    message = r"Task 'path' has no parameter 'max_node'; it has: min_nodes, max_nodes. Did you mean 'max_nodes'"
    with pytest.raises(InputError, match=message):
        make_task("path", max_node=5)


@pytest.mark.parametrize(
    ("name", "parameter", "value", "message"),
    [
        (ADDITION, "min_terms", 1, "min_terms must be a whole number from 2 to 9, got 1"),
        (ADDITION, "max_terms", 10, "max_terms must be a whole number from 3 to 9, got 10"),
        (ADDITION, "largest", 8, "largest must be a whole number from 9 to 9999, got 8"),
        (ADDITION, "largest", 99.0, "largest must be a whole number from 9 to 9999, got 99.0"),
        ("arithmetic", "shots", 17, "shots must be a whole number from 0 to 16, got 17"),
        ("arithmetic", "smallest", -1, "smallest must be a whole number from 0 to 9989, got -1"),
        ("arithmetic", "largest", 9, "largest must be a whole number from 10 to 9999, got 9"),
        ("arithmetic", "operations", "+/", r"operations must be some of the signs \+-\*, got '\+/'"),
        ("arithmetic", "operations", "", r"operations must be some of the signs \+-\*, got ''"),
        (COUNTDOWN, "count", 1, "count must be a whole number from 2 to 4, got 1"),
        (COUNTDOWN, "count", True, "count must be a whole number from 2 to 4, got True"),
        (COUNTDOWN, "largest", 51, "largest must be a whole number from 5 to 50, got 51"),
        ("path", "min_nodes", 3, "min_nodes must be a whole number from 4 to 9, got 3"),
        ("path", "max_nodes", "6", "max_nodes must be a whole number from 4 to 9, got '6'"),
    ],
)
def test_parameters_out_of_range_are_refused(name, parameter, value, message):
    called = name.rpartition("/")[2].partition(".")[0]
    with pytest.raises(InputError, match=f"^Task '{called}': {message}"):
        make_task(name, **{parameter: value})


def test_the_largest_may_not_be_below_the_smallest():
    with pytest.raises(InputError, match="max_terms must be a whole number from 4 to 9, got 3"):
        make_task(ADDITION, min_terms=4, max_terms=3)
    with pytest.raises(InputError, match="max_nodes must be a whole number from 6 to 9, got 5"):
        make_task("path", min_nodes=6, max_nodes=5)


OWN = """
from oblrpo.tasks import GeneratedTask, Problem

class Doubles(GeneratedTask):
    name = "doubles"

    def draw(self, rng):
        number = rng.randint(1, 999)
        return Problem(f"{number}*2=", str(2 * number))

    def reward(self, problem, completion):
        return float(completion == problem.answer)

    def demonstration(self, problem, rng, noise):
        return problem.answer

class Bare(GeneratedTask):
    def draw(self, rng):
        return Problem("", "")

def doubles(seed=0):
    return Doubles(seed)
"""


def test_a_task_of_ones_own_is_named_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    task = make_task(f"{tmp_path}/mine.py:Doubles", 3)
    (problem,) = task.train_batch(0, 1)
    assert (task.seed, task.rewards([problem] * 2, [problem.answer, "0"])) == (3, [1.0, 0.0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Double", r"has no class 'Double'; write .*mine.py:Doubles; it defines: Doubles, Bare"),
        ("doubles", "is not a class that inherits from oblrpo.tasks.GeneratedTask"),
        ("Bare", "lacks what every task has: demonstration, reward, name"),
        ("Doubles", "has no parameter 'largest'; it has none"),
    ],
)
def test_what_is_no_task_is_refused(tmp_path, name, words):
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(InputError, match=words):
        make_task(f"{tmp_path}/mine.py:{name}", largest=3)


def names_in(source):
    """Every name, imported name and attribute but `re.compile`."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "re"):
            yield node.attr


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_source_can_execute_text(source):
    """Python's own ways, and those of sympy that read text by Python's eval."""
    assert not {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "lambdify"} & set(names_in(source))


def test_importing_the_tasks_needs_neither_torch_nor_transformers():
    code = "import sys, oblrpo.tasks; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
