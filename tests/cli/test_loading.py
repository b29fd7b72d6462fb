"""Loading libraries without the collector of cycles."""

import gc
import subprocess
import sys

import pytest

from oblrpo.cli.loading import loading

CODE = """
import gc
from oblrpo.cli.loading import loading
try:
    with loading():
        assert not gc.isenabled()
        {within}
except ImportError:
    pass
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(
    ("within", "after"), [("import fractions", "True True"), ("import nowhere_at_all", "True False")]
)
def test_the_collector_is_back_afterwards_without_what_was_loaded(within, after):
    done = subprocess.run([sys.executable, "-c", CODE.format(within=within)], capture_output=True, text=True)
    assert done.stdout.split() == after.split(), done.stderr


def test_a_program_that_has_torch_keeps_its_collector():
    import torch  # noqa: F401

    frozen = gc.get_freeze_count()
    with loading():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
