"""What the settings of a run say of it, which decides how its metrics are read."""

import pytest

from oblrpo.diagnosis import Facts, diagnose, facts_of


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({}, Facts(corrects_sampler=True)),
        ({"algorithm": "rloo", "prompts_per_step": 32}, Facts(corrects_sampler=True, prompts=32)),
        ({"algorithm": "oblrpo_shrunk"}, Facts(looks_across=True, measured_rate=True, corrects_sampler=True)),
        ({"algorithm": "oblrpo_shrunk", "schedule": "off"}, Facts(looks_across=True, corrects_sampler=True)),
        ({"algorithm": "rloo", "baseline": "reinforce_pp"}, Facts(looks_across=True, corrects_sampler=True)),
        ({"schedule": "auto", "sampler_correction": "measured"}, Facts(measured_rate=True, corrects_sampler=False)),
    ],
)
def test_settings_come_before_the_algorithms(settings, facts):
    assert facts_of(settings) == facts


@pytest.mark.parametrize(("rows", "counted"), [(1, "1 step;"), (2, "2 steps;")])
def test_steps_are_counted(rows, counted):
    assert f": {counted} " in str(diagnose([{"step": step + 1, "reward": 0.5} for step in range(rows)])).splitlines()[0]
