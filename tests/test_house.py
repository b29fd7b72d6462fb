"""The house rules that a machine can check."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "oblrpo"


@pytest.mark.parametrize("room", ["estimators", "scores"])
def test_estimators_and_scores_import_torch_only(room):
    """No other library, and no other room of ours, gets loaded."""
    code = (
        f"import sys, torch; before = set(sys.modules); import oblrpo.{room}; "
        "print(*{name.split('.')[0] if not name.startswith('oblrpo') else '.'.join(name.split('.')[:2]) "
        "for name in set(sys.modules) - before})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    foreign = {name for name in out if name not in sys.stdlib_module_names} - {"oblrpo", f"oblrpo.{room}", "torch"}
    assert not foreign


def test_tasks_import_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules); import oblrpo.tasks, oblrpo.tasks.benchmarks, oblrpo.tasks.grading; "
        "print(*{'.'.join(name.split('.')[:2]) if name.startswith('oblrpo') else name.split('.')[0] "
        "for name in set(sys.modules) - before})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in out if name not in sys.stdlib_module_names} <= {
        "oblrpo",
        "oblrpo.tasks",
        "oblrpo.errors",
        "oblrpo.workers",
    }


def test_the_config_needs_no_torch():
    code = "import sys, oblrpo.config, oblrpo.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_hold_one_idea():
    for file in SOURCE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 350, file


def test_nothing_is_unpickled():
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        assert "torch.load(" not in text, file
        assert "import pickle" not in text, file
