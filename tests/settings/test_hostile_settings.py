"""Settings that somebody wrote to break us: one sentence, at once, before anything is built."""

import time

import pytest

from oblrpo.compare.spec import read_spec
from oblrpo.errors import InputError
from oblrpo.settings import RolloutConfig, RunConfig, TrainConfig, read_yaml, with_settings
from oblrpo.settings.reading import yaml_line, yaml_text
from oblrpo.tasks import data, sources
from oblrpo.trainer.check import check

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))

HOSTILE = {
    "!! tag": ["a: !!bool x", "a: !!int ''"],
    "depth": ["a: " + "[" * 1000, "{" * 1000],
    "its aliases written out": [LAUGHS, "a: &a [*a]", "task_args: &a {b: *a}"],
    "line 1, column 2, .* not text": ["{1: 2}", "{[1]: 2}", "{null: 1}"],
    "line 2, column 3, .* not text": ["where:\n  1: 2"],
    "line 2, column 1, .*the key 'a' appears twice": ["a: 1\n'a': 2"],
    "line 2, column 1, .*'.t' that cannot start": ["a:\n\tb: 1"],
    "line 1, column 4, .*python/object": ["a: !!python/object:os.system x"],
    "of type set": ["a: !!set {b}"],
    "not valid YAML": [
        'output: "\\ud800"',
        "a: \0",
        "{{a: 1}: 2}",
        "<<: 3",
        "a: " + "9" * 5000,
        "%YAML 1.3\n---\na: 1",
    ],
}


@pytest.mark.parametrize(("words", "text"), [(words, text) for words, texts in HOSTILE.items() for text in texts])
def test_hostile_yaml(words, text):
    started = time.process_time()
    with pytest.raises(InputError, match=words) as caught:
        read_yaml(text, "mine.yaml")
    assert len(str(caught.value)) < 700
    assert time.process_time() - started < 5


def test_values_are_those_of_yaml_1_2():
    words = ["017", "0o17", "0x1f", "1e-4", ".5", "2024-01-01", "12:30:45", "yes", "no", "on", "off", "=", "true", "~"]
    values = [17, 15, 31, 1e-4, 0.5, "2024-01-01", "12:30:45", "yes", "no", "on", "off", "=", True, None]
    assert read_yaml(f"a: [{', '.join(words)}]", "f")["a"] == values


@pytest.mark.parametrize(
    "value",
    ["12345678e9012345", "1e5", "017", "2024-01-01", "off", "true", "3", "0x1f", "~", "a\nb", 3e-4, 1e-7, True, 7],
)
def test_what_is_written_is_read_again_as_it_was(value):
    """A run's own word may look like a number; read as one, none of its checkpoints were its own any more."""
    for text in (yaml_text({"run": value}), yaml_line({"run": value})):
        found = read_yaml(text, "f")["run"]
        assert (found, type(found)) == (value, type(value))
        assert len(text.splitlines()) == 1


def test_aliases_and_merges_that_are_meant_well():
    assert read_yaml("a: &a {b: 1}\nc: {<<: *a, d: *a}", "f")["c"] == {"b": 1, "d": {"b": 1}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 10**30}, "steps is beyond"),
        ({"threads": 100_000}, "threads is 100000"),
        ({"output": "runs/\udcff"}, "output is .* half a surrogate"),
        ({"rewards": ["\ud800.f"]}, "rewards is .* half a surrogate"),
        ({"learning_rate": 10**400}, "learning_rate is too large"),
    ],
)
def test_sizes_and_text_that_nothing_holds(settings, words):
    with pytest.raises(InputError, match=words):
        check(with_settings(TrainConfig(), settings, "mine.yaml"))


def test_the_defaults_are_not_hostile():
    check(TrainConfig(run=RunConfig(threads=64, seed=2**62), rollout=RolloutConfig(prompts_per_step=4096)))


def test_more_seeds_than_anybody_runs(tmp_path):
    (tmp_path / "c.yaml").write_text(
        f"base: demo\nseeds: {10**30}\nlearning_rates: [1]\nvariants: {{a: {{}}, b: {{}}}}\n"
    )
    with pytest.raises(InputError, match="seeds is more than"):
        read_spec(str(tmp_path / "c.yaml"), {}, {})


def test_rows_with_two_columns_of_a_name_or_half_a_character(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer,answer\na,1,2\n")
    with pytest.raises(InputError, match="two columns 'answer'"):
        list(sources.read_source([str(tmp_path / "rows.csv")], "train"))
    (tmp_path / "rows.csv").write_text("\ufeff")
    with pytest.raises(InputError, match="holds no rows"):
        list(sources.read_source([str(tmp_path / "rows.csv")], "train"))
    row = ("here", {"prompt": [{"role": "user", "content": "\ud800"}], "answer": "1"})
    with pytest.raises(InputError, match="half a surrogate"):
        data.problems_of([row], "prompt", "answer", "{prompt}")
    with pytest.raises(InputError, match="no column"):
        sources.keep_rows([("here", {1: 2, "a": 3})], {"b": 2})
