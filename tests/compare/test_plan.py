"""Which runs a comparison takes, how many at a time, and how far each is."""

import os
from dataclasses import replace

import pytest

from oblrpo.compare.summary import summarise
from oblrpo.errors import InputError
from oblrpo.settings import with_settings
from tests.compare.conftest import plan_of, pretend


def test_trainings_at_a_time(write_spec, tmp_path, monkeypatch):
    """One a core, of which macOS does not say how many a process may use; one in all for a named model; as printed."""
    variants = dict.fromkeys("abcdefghi")

    def processes(**keys):
        return plan_of(write_spec(variants=variants, seeds=1, **keys), tmp_path / "out").processes()

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert processes() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processes() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processes() == 1
    assert processes(processes=4) == 4
    assert processes(processes=20) == 9  # there are no more runs
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert processes(base={"model": "some/model"}) == 1


def test_the_last_row_of_a_run_that_goes_on(write_spec, tmp_path):
    (run,) = plan_of(write_spec(variants={"a": None}, seeds=1, base={"warm_start_steps": 0}), tmp_path).all_known()
    assert run.last_row() is None
    pretend(run, [0.1] * 5)
    assert run.last_row()["step"] == 4
    with run.folder.metrics_file.open("a") as file:
        file.write('{"step": 5, "rew')
    assert run.last_row()["step"] == 4
    run.folder.metrics_file.write_text("")
    assert run.last_row() is None
    for step in range(3):  # more than is read
        run.folder.write_metrics({"step": step, "long": "x" * 60_000})
        assert run.last_row()["step"] == step


def test_a_run_that_was_fitted_to_its_rows_is_still_the_planned_one(write_spec, tmp_path):
    plan = plan_of(write_spec(variants={"a": None}, seeds=1, base={"warm_start_steps": 0}), tmp_path)
    (run,) = plan.all_known()
    planned = replace(run.config, given=())
    run.config = with_settings(planned, {"eval_prompts": 3, "prompts_per_step": 2}, "a test", ())
    pretend(run, [0.1] * 5)
    run.config = planned
    run.check_same()
    assert run.as_saved().run.eval_prompts == 3
    assert summarise(plan).outcomes[0].results[0].per_step == 2 * 3
    run.config = replace(run.config, given=("eval_prompts",))
    with pytest.raises(InputError, match=r"made with other settings: eval_prompts \(was 3, now 5\)"):
        run.check_same()
