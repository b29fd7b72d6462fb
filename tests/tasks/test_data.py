"""Problems from data: batches, the held-out split and the templates."""

import contextlib
import hashlib
import json

import pytest

from oblrpo.errors import InputError
from oblrpo.rewards import Rewards
from oblrpo.tasks import DataTask, Problem, Task
from oblrpo.tasks.data import problems_of
from oblrpo.tasks.sources import read_source
from tests.tasks.data import task_of_file


@pytest.fixture
def make(tmp_path):
    def make(count=200, **options):
        path = tmp_path / "sums.jsonl"
        rows = [{"prompt": f"What is {number} + 1?", "answer": number + 1} for number in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return task_of_file(path, **options)

    return make


def prompts(problems):
    return [problem.prompt for problem in problems]


def test_it_is_a_task(make):
    task: Task = make()
    assert task.name == "sums"
    problem = task.train_batch(0, 1)[0]
    rewards = Rewards(task)
    assert rewards([problem], [f" {problem.answer}\n", problem.answer + "0"]) == ([[1.0, 0.0]], [[True, True]])


def test_an_epoch_visits_every_training_row_once(make):
    task = make()
    rows = largest_size(lambda size: task.train_batch(0, size))
    epoch = [prompt for step in range(rows // 10) for prompt in prompts(task.train_batch(step, 10))]
    assert len(epoch) == len(set(epoch)) == rows // 10 * 10
    assert sorted(prompts(task.train_batch(0, rows))) == sorted(prompts(task.train_batch(1, rows)))
    assert task.train_batch(0, rows) != task.train_batch(1, rows)


def largest_size(ask):
    """Return the largest size up to 200 that `ask` grants."""
    for size in range(200, 0, -1):
        with contextlib.suppress(InputError):
            ask(size)
            return size
    return 0


def test_no_row_comes_twice_in_a_batch_and_left_over_rows_come_later(make):
    task = make(count=50, heldout_fraction=0.0)
    batches = [prompts(task.train_batch(step, 30)) for step in range(40)]
    assert all(len(set(batch)) == 30 for batch in batches)
    assert len({prompt for batch in batches for prompt in batch}) == 50


def test_batches_are_a_function_of_seed_step_and_size(make):
    assert make().train_batch(1000, 8) == make().train_batch(1000, 8)
    assert make(seed=0).train_batch(3, 8) != make(seed=1).train_batch(3, 8)
    assert make().train_batch(3, 8) != make().train_batch(4, 8)
    assert make().train_batch(0, 8) == make().train_batch(0, 16)[:8]


def test_the_held_out_rows_never_train_and_do_not_depend_on_seed_or_template(make):
    heldout = prompts(make().heldout(10))
    assert heldout == prompts(make(seed=9).heldout(10))
    assert [f"Q: {prompt}" for prompt in heldout] == prompts(make(prompt_template="Q: {prompt}").heldout(10))
    assert make().heldout(10)[:4] == make().heldout(4)
    for seed in range(3):
        trained = {prompt for step in range(40) for prompt in prompts(make(seed=seed).train_batch(step, 16))}
        assert len(trained) > 150
        assert not trained & set(heldout)


def test_a_larger_fraction_holds_out_the_same_rows_and_more(make):
    small, large = make(heldout_fraction=0.1).heldout(10), make(heldout_fraction=0.5).heldout(70)
    assert large[:10] == small


def test_duplicate_prompts_are_allowed_and_stay_on_one_side(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{row % 30}", "answer": "x"}) + "\n" for row in range(60)))
    task = task_of_file(path, heldout_fraction=0.5)
    held = largest_size(task.heldout)
    assert 10 < held < 50
    assert held % 2 == 0
    assert not set(prompts(task.heldout(held))) & set(prompts(task.train_batch(0, 60 - held)))


def test_too_few_rows_for_a_batch(make):
    with pytest.raises(
        InputError,
        match=r"sums has 20 training rows, but 21 are needed; set prompts_per_step lower, add rows or lower",
    ):
        make(count=20, heldout_fraction=0.0).train_batch(0, 21)
    with pytest.raises(InputError, match=r"sums has 0 held-out rows, but 3 are needed; .* raise heldout_fraction"):
        make(heldout_fraction=0.0).heldout(3)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_size_that_is_no_size_is_refused(make, size):
    for ask in (lambda: make().train_batch(0, size), lambda: make().heldout(size)):
        with pytest.raises(InputError, match="size must be a whole number of at least 1"):
            ask()


def test_prompts_are_text_whatever_braces_they_hold(tmp_path):
    path = tmp_path / "braces.jsonl"
    hostile = "{prompt} {0.__class__} %s $x {{}} \\boxed{1}"
    path.write_text(json.dumps({"q": hostile, "a": "{prompt}"}))
    task = task_of_file(
        path, "q", "a", prompt_template="Solve {prompt}. Write \\boxed{answer}. {} {prompt}", heldout_fraction=0.0
    )
    (problem,) = task.train_batch(0, 1)
    assert problem.prompt == f"Solve {hostile}. Write \\boxed{{answer}}. {{}} {hostile}"
    assert problem.answer == "{prompt}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_template": "Solve:"},
            r"prompt_template must contain \{prompt\}, where the prompt goes; got 'Solve:'",
        ),
        ({"prompt_template": ""}, r"prompt_template must contain \{prompt\}"),
        ({"prompt_template": "{prompt} {answer}"}, r"may contain \{prompt\} only, but it has \{answer\}"),
        ({"heldout_fraction": 1.0}, "heldout_fraction must be a number of at least 0 and below 1, got 1.0"),
        ({"heldout_fraction": -0.1}, "heldout_fraction must be"),
        ({"heldout_fraction": float("nan")}, "heldout_fraction must be"),
        ({"heldout_fraction": "0.1"}, "heldout_fraction must be"),
        ({"heldout_fraction": True}, "heldout_fraction must be"),
    ],
)
def test_bad_options_are_refused(make, options, message):
    with pytest.raises(InputError, match=message):
        make(**options)


def test_held_out_problems_are_not_trained_on_however_they_are_spelt():
    train = [Problem(text, "1") for text in ("What is 1?", "what  is 2?", "What is 3?", "WHAT IS\n3?")]
    task = DataTask("mine", train, [Problem("What is 2?", "1"), Problem("what is 3?", "1")])
    assert prompts(task.train_batch(0, 1)) == ["What is 1?"]
    assert prompts(task.heldout(2)) == ["What is 2?", "what is 3?"]
    assert task.notes == ["3 training problems of mine are held out too; they are not trained on."]
    assert not DataTask("mine", train[:1], [Problem("What is 2?", "1")]).notes


def test_only_case_and_runs_of_spaces_make_no_difference():
    train = [Problem(text, "1") for text in ("ab c", "STRASSE 1", "x\u00a0y", "z")]
    task = DataTask("mine", train, [Problem(text, "1") for text in ("a bc", "stra\u00dfe\n1", "X y")])
    assert prompts(task.training) == ["ab c", "z"]


def test_problems_can_be_left_out(make):
    task = make()
    task.drop("even", [row for row, problem in enumerate(task.given) if int(problem.answer) % 2 == 0])
    assert task.notes == ["100 of 200 problems of sums are even; they are left out."]
    assert all(int(problem.answer) % 2 for problem in task.problems)
    task.drop("long", [])
    assert len(task.notes) == 1


def test_the_first_of_the_held_out_problems_given_are_a_fair_sample():
    """Of a file sorted by difficulty, say; the order is theirs alone, whatever else the file holds."""
    problems = [Problem(f"{number}?", "") for number in range(1000)]
    first = DataTask("d", [], problems).heldout(100)
    mean = sum(int(problem.text[:-1]) for problem in first) / 100
    assert abs(mean - 499.5) < 4 * 288.7 / 10
    assert DataTask("d", [], problems[::-1]).heldout(100) == first


def test_a_file_comes_to_the_same_problems_in_every_version(tmp_path):
    """The digest is that of version 9aa78c3: rows, columns, split, order of batches and notes."""
    file = tmp_path / "golden.jsonl"
    rows = [
        {
            "prompt": f"What is {n % 400} + 1?" if n % 7 else [{"role": "user", "content": f"Add 1 to {n} é"}],
            "answer": n + 1,
            "source": "a" * (n % 3),
        }
        for n in range(500)
    ]
    file.write_text("\r\n".join(json.dumps(row) for row in rows))
    digest = hashlib.sha256()
    for options in ({}, {"heldout_fraction": 0.3, "seed": 5}):
        task = task_of_file(file, prompt_template="Q: {prompt}", **options)
        problems = [problem for step in (0, 3, 50) for problem in task.train_batch(step, 8)]
        problems += task.problems
        shown = [[each.prompt, each.answer, dict(each.columns), each.question] for each in problems]
        digest.update(json.dumps([shown, task.notes]).encode())
    assert digest.hexdigest() == "d7748e7a6660688f6bb4fb27120c55fa02fcb2c6e921e2c075989b1d731c9ed3"


def test_rows_of_a_file_are_parsed_when_they_are_taken(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "What is {n} + 1?", "answer": "{n + 1}"}}\n' for n in range(3)))
    rows = read_source([str(file)], "train")
    assert next(iter(rows)) == (f"{file} line 1", {"prompt": "What is 0 + 1?", "answer": "1"})
    problems = problems_of(read_source([str(file)], "train"), "prompt", "answer", "{prompt}")
    file.write_text("another file")
    assert [problem.prompt for problem in problems] == [f"What is {n} + 1?" for n in range(3)]
    assert problems[-1] == problems[2] == problems[1:][1]
    assert problems[2] is not problems[2]
