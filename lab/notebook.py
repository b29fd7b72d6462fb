"""`python -m lab.notebook`: executes `examples/quick_start.ipynb` in a kernel and stores what its cells show.

Readers of a site that runs nothing see it so. A test says when the cells are no longer those that were executed.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

BOOK = Path(__file__).parents[1] / "examples" / "quick_start.ipynb"
PLAIN = """import sys, warnings
sys.modules["ipywidgets"] = None
warnings.filterwarnings("ignore", "IProgress not found")"""
"""Lines in the place of a live bar, of which a file could not hold more than the end."""


def digest(book: Any) -> str:
    """Return one word for the cells as they stand, without what they show."""
    return hashlib.sha256("\0".join(cell.cell_type + cell.source for cell in book.cells).encode()).hexdigest()[:16]


def executed(path: Path = BOOK) -> Any:
    """Return the notebook with what its cells show; it is executed in a folder of its own, which is removed."""
    book = nbformat.read(path, 4)
    with TemporaryDirectory() as folder:
        first = nbformat.v4.new_code_cell(PLAIN)
        book.cells.insert(0, first)
        NotebookClient(book, timeout=900, resources={"metadata": {"path": folder}}, record_timing=False).execute()
        book.cells.remove(first)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.execution_count, cell.outputs = None, _joined(cell.outputs)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "executed": digest(book)}
    return book


def _joined(outputs: Sequence[Any]) -> list[Any]:
    """Outputs without their number, and what is printed one after the other as one."""
    joined = list[Any]()
    for output in outputs:
        if joined and output.output_type == "stream" == joined[-1].output_type and output.name == joined[-1].name:
            joined[-1].text += output.text
            continue
        joined.append(output)
        if "execution_count" in output:
            output.execution_count = None
    return joined


def main() -> None:
    """Execute the notebook, or another that is named, and store it."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else BOOK
    book = executed(path)
    nbformat.write(book, path)


if __name__ == "__main__":
    main()
