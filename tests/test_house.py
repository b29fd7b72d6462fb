"""The house rules that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "oblrpo"
FILES = {file: ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))}
LABORATORY = {
    file: ast.parse(file.read_text())
    for file in sorted((ROOT / "lab").rglob("*.py"))
    if "benchmarks" not in file.parts  # scripts, each read by itself
}


MOST_LINES = 34_255
"""Lines of Python in the package, with docstrings and blank lines: what comes in has to send something out."""


def room_of(path):
    """`("adapters", "verl", "engine")` lies in the room `adapters/verl`."""
    return "/".join(path[:2]) if path[0] == "adapters" else path[0]


def drawn_floors():
    """Room -> floor, from the top, and the modules that lie beside the house, as docs/architecture.md has them."""
    _, drawing, text, *_ = (ROOT / "docs" / "architecture.md").read_text().split("```")
    lines = [re.findall(r"(?:^|\s{4,})([a-z_]+(?:/[a-z]+)?)\s{2,}", line) for line in drawing.splitlines() if line]
    floors = {room: floor for floor, rooms in enumerate(lines) for room in rooms}
    beside = {file.stem for file in SOURCE.glob("*.py") if f"`{file.stem}`" in text.split("##")[0]}
    return {room: floor for room, floor in floors.items() if room not in beside}


def arrows():
    """(file, its room, the room that it imports from), imports within functions too."""
    for file, tree in FILES.items():
        inside = file.relative_to(SOURCE).with_suffix("").parts
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            assert not any(name.split(".")[0] == "lab" for name in names), f"{file} uses the laboratory"
            for first, *path in (name.split(".") for name in names):
                if first == "oblrpo" and (path[0] != "__version__" or inside[0] != "cli"):
                    yield file, room_of(inside), room_of(path)


def test_arrows_point_down():
    """Modules that are not drawn lie beside the house: every room may use them, and they use no room."""
    floors, rooms = drawn_floors(), {room_of(file.relative_to(SOURCE).with_suffix("").parts) for file in FILES}
    assert len(floors) > 10
    assert set(floors) <= rooms, "drawn, but not there"
    assert {room for room in rooms if (SOURCE / room).is_dir()} <= set(floors), "there, but not drawn"
    door, ground = {"__init__": -1}, max(floors.values()) + 1  # what is not drawn is under all
    level = dict.fromkeys(rooms, ground) | floors | door
    wrong = {
        f"{file.relative_to(ROOT)} of {here} imports {there}"
        for file, here, there in arrows()
        if here != there
        if level[here] >= level.get(there, -1) and not (here not in floors and there not in floors)
    }
    assert not wrong


@pytest.mark.parametrize("room", ["estimators", "scores"])
def test_estimators_and_scores_import_torch_and_the_tables_only(room):
    """No other library, and no other room of ours, gets loaded; the tables import the standard library only."""
    code = (
        f"import sys, torch; before = set(sys.modules); import oblrpo.{room}; "
        "print(*{name.split('.')[0] if not name.startswith('oblrpo') else '.'.join(name.split('.')[:2]) "
        "for name in set(sys.modules) - before})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    foreign = {name for name in out if name not in sys.stdlib_module_names} - {
        "oblrpo",
        "oblrpo.tables",
        f"oblrpo.{room}",
        "torch",
    }
    assert not foreign


def test_tasks_import_psutil_and_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules); import oblrpo.tasks, oblrpo.tasks.benchmarks, oblrpo.tasks.grading; "
        "print(*{'.'.join(name.split('.')[:2]) if name.startswith('oblrpo') else name.split('.')[0] "
        "for name in set(sys.modules) - before})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rooms = ("errors", "regular_files", "streams", "tasks", "user_code", "workers")
    ours = {"oblrpo", "psutil", *(f"oblrpo.{room}" for room in rooms)}
    assert {name for name in out if name not in sys.stdlib_module_names} <= ours


def test_the_config_and_the_tables_need_no_torch():
    code = "import sys, oblrpo.settings, oblrpo.cli, oblrpo.algorithms; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_and_functions_are_short():
    """A file has up to 600 lines, a function up to 80 without its docstring."""
    for file, tree in (FILES | LABORATORY).items():
        assert len(file.read_text().splitlines()) <= 600, file
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False) or ""
                lines = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
                assert lines <= 80, f"{file}: {node.name}"


def test_the_house_does_not_grow():
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= MOST_LINES


def bases_of(node):
    """The names of a class's bases, without their modules and what they are generic in."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def test_no_class_inherits_from_a_concrete_one_of_ours():
    """A base is an exception, a protocol or, in three of the rooms, never made by itself and without a base of ours."""
    nodes = [(file, node) for file, tree in FILES.items() for node in ast.walk(tree)]
    classes = [(file, node) for file, node in nodes if isinstance(node, ast.ClassDef)]
    names = {node.name for _, node in classes}
    called = [node.func for _, node in nodes if isinstance(node, ast.Call)]
    made = {getattr(function, "id", getattr(function, "attr", "")) for function in called}

    def concrete(file, node):
        if any(base == "Protocol" or base.endswith(("Error", "Exception")) for base in bases_of(node)):
            return False
        room = file.relative_to(SOURCE).parts[0]
        return room not in {"scores", "settings", "tasks"} or node.name in made or not names.isdisjoint(bases_of(node))

    wrong = {node.name for file, node in classes if concrete(file, node)}
    heirs = {f"{file.relative_to(ROOT)}: {node.name}" for file, node in classes if not wrong.isdisjoint(bases_of(node))}
    assert not heirs


def test_nothing_is_unpickled():
    for file, tree in (FILES | LABORATORY).items():
        for node in ast.walk(tree):
            names = {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            names |= {getattr(node, "module", None)} if isinstance(node, ast.ImportFrom) else set()
            assert not names & {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}, file
            assert not isinstance(node, ast.Attribute) or ast.unparse(node) not in {"torch.load", "numpy.load"}, file
