"""Every mistake in a spec gets one sentence and exit code 2, before anything starts."""

import pytest

from oblrpo.compare.plan import Plan
from oblrpo.compare.spec import SPECS, Target, read_spec
from oblrpo.errors import InputError
from oblrpo.settings import adjustable, flatten, yaml_text
from tests.cli.conftest import complained
from tests.compare.conftest import plan_of, pretend

TWO = {"a": {}, "b": {"algorithm": "rloo"}}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, ["spec.yaml: variants is missing"]),
        ({"variants": ["a", "b"]}, ["variants is ['a', 'b']; it must be a mapping"]),
        ({"variants": {"a": 3}}, ["variant 'a' is 3; it must be a mapping"]),
        ({"variants": {"a/b": {}}}, ["'a/b' cannot name a variant"]),
        ({"variants": {1: {}}}, ["line 2, column 3, is not valid YAML: the key 1 is not text", "quote it"]),
        ({"variants": {"a": {"learning_rte": 1.0}}}, ["variant 'a': unknown setting", "Did you mean 'learning_rate'?"]),
        ({"variants": {"a": {"steps": "soon"}}}, ["variant 'a': steps is 'soon', but it must be a whole number"]),
        ({"variants": {"a": {"seed": 3}}}, ["variant 'a': seed is not a setting of the runs", "use seeds instead"]),
        ({"variants": {"a": {"output": "x"}}}, ["output is not a setting of the runs", "use --output instead"]),
        ({"variants": {"a": {"recipe": "demo"}}}, ["recipe is not a setting of the runs", "use base instead"]),
        ({"variants": {"a": {"learning_rate": 1.0, "learning_rates": [1.0]}}}, ["learning_rate or learning_rates"]),
        ({"variants": TWO, "varants": {}}, ["unknown key 'varants'", "Did you mean 'variants'?"]),
        ({"variants": TWO, "learning_rates": 1e-3}, ["learning_rates is 0.001; give a list of numbers above 0"]),
        ({"variants": TWO, "learning_rates": [1e-3, 0]}, ["give a list of numbers above 0"]),
        ({"variants": TWO, "learning_rates": []}, ["give a list of numbers above 0"]),
        ({"variants": TWO, "learning_rates": [1e-3, 0.001]}, ["give every rate once"]),
        ({"variants": TWO, "seeds": 0}, ["seeds is 0; give how many, at least 1"]),
        ({"variants": TWO, "seeds": [1, 1]}, ["list of different whole numbers"]),
        ({"variants": TWO, "seeds": True}, ["seeds is True"]),
        ({"variants": TWO, "search_seeds": 4}, ["search_seeds is 4, more than the 3 seeds"]),
        ({"variants": TWO, "search_seeds": -1}, ["search_seeds is -1; it must be a whole number of at least 0"]),
        ({"variants": TWO, "processes": 1.5}, ["processes is 1.5"]),
        ({"variants": TWO, "reference": "c"}, ["reference is 'c'; choose one of: a, b"]),
        ({"variants": TWO, "target": 0.8}, ["target is 0.8; it must be a mapping"]),
        ({"variants": TWO, "target": {"of_best": 1.2}}, ["a share is at most 1"]),
        ({"variants": TWO, "target": {"of_best": 0.5, "accuracy": 0.5}}, ["of_best and accuracy; give one of them"]),
        ({"variants": TWO, "target": {"of_gain": -1}}, ["of_gain is -1; it must be a number above 0"]),
        (
            {"variants": TWO, "target": {"accurcy": 0.5}},
            ["spec.yaml: target has no 'accurcy'", "Did you mean 'accuracy'?"],
        ),
        ({"variants": TWO, "target": {"curve": "loss"}}, ["choose one of: accuracy, reward"]),
        ({"variants": TWO, "target": {"window": 4}}, ["it must be odd"]),
        ({"variants": TWO, "share_warm_start": "maybe"}, ["share_warm_start is 'maybe'; it must be true or false"]),
        ({"variants": TWO, "base": {"recipe": "nosuch"}}, ["no recipe or file 'nosuch'", "demo"]),
        ({"variants": TWO, "base": {"stepz": 3}}, ["base: unknown setting 'stepz'"]),
        ({"variants": TWO, "base": {"seed": 3}}, ["base: seed is not a setting of the runs"]),
    ],
)
def test_mistakes_in_the_file(oblrpo, tmp_path, keys, words):
    (tmp_path / "spec.yaml").write_text(yaml_text(keys))
    complained(oblrpo("compare", tmp_path / "spec.yaml", "--output", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "{algorithm: rloo}"], ["--set algorithm: every variant of spec.yaml has its own"]),
        (["--set", "{learning_rate: 1.0}"], ["--set learning_rate: every variant"]),
        (["--set", "{stepz: 3}"], ["unknown setting 'stepz'", "Did you mean 'steps'?"]),
        (["--set", "{seed: 3}"], ["--set: seed is not a setting of the runs", "use seeds instead"]),
        (["--set", "[1]"], ["--set", "must hold settings as YAML has them"]),
        (["--base", "nosuch"], ["no recipe or file 'nosuch'"]),
        (["--seeds", "-2"], ["must not be negative"]),
        (["--seeds", "1", "--search-seeds", "2"], ["search_seeds is 2, more than the 1 seeds"]),
        (["--learning-rates", "-1"], ["give a list of numbers above 0"]),
        (["--target", "{of_gain: 2}"], ["--target: target of_gain is 2; a share is at most 1"]),
        (["--target", "{curve: [a]}"], ["choose one of: accuracy, reward"]),
        (["--dry-run", "--only-report"], ["give only one of them"]),
        (["--only-report"], ["holds no finished run of this comparison"]),
    ],
)
def test_mistakes_on_the_command_line(oblrpo, tmp_path, flags, words):
    variants = {"a": {"algorithm": "rloo"}, "b": {"algorithm": "js", "learning_rates": [1e-3]}}
    text = yaml_text({"variants": variants, "learning_rates": [1e-4, 1e-3], "seeds": 3, "search_seeds": 2})
    (tmp_path / "spec.yaml").write_text(text)
    complained(oblrpo("compare", tmp_path / "spec.yaml", "--output", tmp_path / "out", *flags), *words)
    assert not (tmp_path / "out").exists()


def test_files_that_are_none(oblrpo, tmp_path):
    complained(oblrpo("compare", "nosuch"), "no comparison or file 'nosuch'", "against-rloo", "fixed-rates")
    (tmp_path / "twice.yaml").write_text("variants:\n  a: {algorithm: rloo}\n  a: {algorithm: grpo}\n")
    complained(oblrpo("compare", tmp_path / "twice.yaml"), "'a'", "twice")
    (tmp_path / "file").write_text("")
    (tmp_path / "spec.yaml").write_text("variants: {a: {}}")
    complained(oblrpo("compare", tmp_path / "spec.yaml", "--output", tmp_path / "file"), "is a file; give a folder")


def test_rates_of_variants(write_spec, tmp_path):
    """A variant's own rate or rates go before the grid; without a grid the base's rate holds."""
    variants = {"grid": {}, "one": {"learning_rate": 0.5}, "own": {"learning_rates": [3.0, 2.0]}}
    plan = plan_of(
        write_spec(variants=variants, learning_rates=[1e-3, 1e-4], seeds=[7, 9, 8], search_seeds=2), tmp_path
    )
    assert [v.learning_rates for v in plan.spec.variants] == [(1e-4, 1e-3), (0.5,), (2.0, 3.0)]
    assert plan.count() == 5 + 3 + 5
    assert [(r.config.run.seed, r.config.optim.learning_rate) for r in plan.search(plan.spec.variants[0])] == [
        (7, 1e-4), (7, 1e-3), (9, 1e-4), (9, 1e-3),
    ]  # fmt: skip
    assert len(plan.search(plan.spec.variants[1])) == 3
    plain = plan_of(write_spec(variants={"a": None}), tmp_path)
    assert plain.spec.variants[0].learning_rates == (1e-2,)
    other = read_spec(str(write_spec(variants=variants, learning_rates=[1e-3])), {"learning_rates": [4.0]}, {})
    assert [v.learning_rates for v in other.variants] == [(4.0,), (0.5,), (4.0,)]


def test_the_later_runs_are_at_the_rate_that_the_search_chose(write_spec, tmp_path):
    plan = plan_of(write_spec(variants={"a": {}}, learning_rates=[1e-3, 1e-2], seeds=4, search_seeds=2), tmp_path / "o")
    variant = plan.spec.variants[0]
    for run, final in zip(plan.search(variant), (0.3, 0.4, 0.4, 0.2), strict=True):
        assert plan.later(variant) == []
        pretend(run, [0.1, 0.1, 0.1, 0.1, final])
    later = plan.later(variant)  # means 0.35 and 0.30
    assert [(r.config.run.seed, r.config.optim.learning_rate) for r in later] == [(2, 1e-3), (3, 1e-3)]


def test_one_warm_start_a_seed_for_all_that_can_share_it(write_spec, tmp_path):
    """Algorithm and rate do not matter to it; the policy, the task and the demonstrations do."""
    variants = {"a": {}, "b": {"algorithm": "grpo", "num_generations": 4}, "c": {"warm_start_args": {"noise": 0.5}}}
    plan = plan_of(write_spec(variants=variants, learning_rates=[1e-3, 1e-2], seeds=2), tmp_path)
    starts = {v.name: [run.start.config.run.output for run in plan.search(v)] for v in plan.spec.variants}
    assert starts["a"] == starts["b"]
    assert len(set(starts["a"])) == 2
    assert not set(starts["a"]) & set(starts["c"])
    run = plan.search(plan.spec.variants[1])[0]
    assert run.config.policy.model == f"{run.start.config.run.output}/checkpoints/step_0"
    assert (run.config.warm_start.warm_start_steps, run.start.config.warm_start.warm_start_steps) == (0, 3)
    alone = plan_of(write_spec(variants=variants, share_warm_start=False), tmp_path)
    assert {run.start for v in alone.spec.variants for run in alone.search(v)} == {None}


@pytest.mark.parametrize("name", ["against-rloo", "fixed-rates", "uniform-or-weighted"])
def test_built_in_comparisons_can_be_taken_to_another_task(name, tmp_path):
    """With any train setting; and the resolved spec, as --dry-run prints it, is the same comparison."""
    settings = {"data": ["gsm8k.jsonl"], "model": "m", "warm_start_steps": 0, "max_completion_length": 300}
    spec = read_spec(name, {"learning_rates": [1e-6, 3e-6], "seeds": 2}, settings)
    for run in Plan(spec, tmp_path).all_known():
        flat = flatten(run.config)
        assert {key: flat[key] for key in settings} == settings
        assert run.start is None
    (tmp_path / "again.yaml").write_text(yaml_text(spec.as_mapping()))
    again = read_spec(str(tmp_path / "again.yaml"), {}, {})
    assert [r.config for r in Plan(again, tmp_path).all_known()] == [r.config for r in Plan(spec, tmp_path).all_known()]
    assert again.target == spec.target
    assert sorted(entry.name for entry in SPECS.iterdir()) == [
        "against-rloo.yaml", "fixed-rates.yaml", "uniform-or-weighted.yaml"
    ]  # fmt: skip


def test_what_is_asked_of_the_runs_of_a_comparison(tmp_path):
    """What somebody wrote, and nothing of what comes with the package; and all variants are measured on one set."""
    numbers = {"prompts_per_step", "eval_prompts", "heldout_fraction"}
    assert numbers <= adjustable(read_spec("against-rloo", {}, {"steps": 3}).base_config)
    assert "eval_prompts" not in adjustable(read_spec("against-rloo", {}, {"eval_prompts": 9}).base_config)
    for settings, bending in (({}, numbers), ({"prompts_per_step": 8}, numbers - {"heldout_fraction"})):
        (tmp_path / "mine.yaml").write_text(yaml_text({"variants": {"a": {}, "b": settings}}))
        spec = read_spec(str(tmp_path / "mine.yaml"), {}, {})
        assert adjustable(spec.config(spec.variants[0], 1.0, 1, "")) & numbers == bending


def test_a_target_is_laid_over_the_specs(write_spec):
    path = str(write_spec(variants={"a": {}}, target={"of_best": 0.9, "curve": "reward", "window": 9}))
    for changed, expected in (
        ({"of_gain": 0.7}, Target(of_gain=0.7, curve="reward", window=9)),
        ({"window": 5}, Target(of_best=0.9, curve="reward", window=5)),
        ({}, Target(of_best=0.9, curve="reward", window=9)),
    ):
        assert read_spec(path, {"target": changed}, {}).target == expected


def test_another_target_for_runs_that_are_there(write_spec, oblrpo, tmp_path):
    plan = plan_of(write_spec(variants={"a": {}}, seeds=1, base={"warm_start_steps": 0}), tmp_path / "out")
    pretend(plan.all_known()[0], [0.1, 0.1, 0.1, 0.1, 0.5])
    flags = "--only-report", "--target", "{of_gain: 0.5}"
    code, printed, err = oblrpo("compare", tmp_path / "spec.yaml", "--output", tmp_path / "out", *flags)
    assert code == 0, err
    assert "Target: 0.300, 0.5 of the way from the start of the runs" in " ".join(printed.split())


def test_runs_of_other_settings_are_not_mixed_in(write_spec, oblrpo, tmp_path):
    plan = plan_of(write_spec(variants={"a": {}}, seeds=1, base={"warm_start_steps": 0}), tmp_path / "out")
    pretend(plan.all_known()[0], [0.1, 0.1, 0.1, 0.1, 0.4])
    for change in ({"eval_samples": 3}, {"steps": 2}):
        spec = write_spec(variants={"a": {}}, seeds=1, base={"warm_start_steps": 0} | change)
        for flags in ((), ("--only-report",)):
            result = oblrpo("compare", spec, "--output", tmp_path / "out", *flags)
            complained(result, "seed_0", next(iter(change)), "give another --output, or remove that folder")


def test_search_seeds_follow_a_number_of_seeds():
    """What the file says of the one must not make a flag for the other impossible."""
    spec = read_spec("against-rloo", {"seeds": 1}, {})
    assert (spec.seeds, spec.search_seeds) == ((0,), 1)
    assert read_spec("against-rloo", {"seeds": 4}, {}).search_seeds == 2
    with pytest.raises(InputError, match="search_seeds is 3, more than the 2 seeds"):
        read_spec("against-rloo", {"seeds": 2, "search_seeds": 3}, {})
