"""What shows the door, as it is shown: the page's first lines and the notebook."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]


def test_the_quick_start_is_short():
    """`tests/test_docs.py` runs them."""
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 18
    assert max(map(len, lines)) <= 120


@pytest.mark.slow
def test_the_notebook_runs_and_the_policy_learns(tmp_path):
    """In a kernel, as a reader runs it; executed by a process of its own, for kernels leave warnings behind."""
    done = tmp_path / "done.ipynb"
    code = (
        "import nbformat, sys; from nbclient import NotebookClient; book = nbformat.read(sys.argv[1], 4); "
        "NotebookClient(book, timeout=600, resources={'metadata': {'path': sys.argv[2]}}).execute(); "
        "nbformat.write(book, sys.argv[3])"
    )
    source = ROOT / "examples" / "quick_start.ipynb"
    ran = subprocess.run([sys.executable, "-c", code, source, tmp_path, done], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    outputs = [output for cell in nbformat.read(done, 4).cells for output in cell.get("outputs", ())]
    text = "\n".join(output.get("text") or output.data.get("text/plain", "") for output in outputs)
    first, last = re.search(r"reward (\d\.\d+) -> (\d\.\d+), held-out accuracy", text).groups()
    assert float(last) > float(first) + 0.2
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert len(list((tmp_path / "runs").glob("*/report.html"))) == 1
