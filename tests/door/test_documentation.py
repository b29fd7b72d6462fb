"""What shows the door, as it is shown: the page's first lines and the notebook."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from lab.notebook import BOOK, digest

ROOT = Path(__file__).parents[2]


def test_the_quick_start_is_short():
    """`tests/test_docs.py` runs them."""
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 18
    assert max(map(len, lines)) <= 120


def kinds(book):
    """What each cell shows, by its kind."""
    return [[sorted(output.get("data", {"text": 0})) for output in cell.get("outputs", ())] for cell in book.cells]


def test_the_notebook_has_stored_what_its_cells_show():
    """As they stand: `python -m lab.notebook` executes them. No rate is set, and nothing names this machine."""
    book, text = nbformat.read(BOOK, 4), BOOK.read_text()
    assert book.metadata.executed == digest(book)
    assert len(text) < 400_000
    assert {"image/png", "text/html", "text"} <= {kind for cell in kinds(book) for shown in cell for kind in shown}
    assert "learning_rate=" not in "".join(cell.source for cell in book.cells)
    assert not re.search(r"/(tmp|home|work|root)/|stderr", text)


@pytest.mark.slow
def test_the_notebook_runs_and_the_policy_learns(tmp_path):
    """In a kernel, as a reader runs it; executed by a process of its own, for kernels leave warnings behind."""
    done = tmp_path / "done.ipynb"
    shutil.copy(BOOK, done)
    ran = subprocess.run([sys.executable, "-m", "lab.notebook", done], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    book = nbformat.read(done, 4)
    assert kinds(book) == kinds(nbformat.read(BOOK, 4))
    text = "\n".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", ()))
    first, last = re.search(r"^reward +(\d\.\d+) -> (\d\.\d+)$", text, re.MULTILINE).groups()
    assert float(last) > float(first) + 0.2
