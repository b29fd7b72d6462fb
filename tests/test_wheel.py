"""Wheel and source archive hold what they should; `make test-wheel` installs them."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from oblrpo import __version__
from oblrpo.settings import read_yaml_file

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of both archives."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_the_package_whole_and_no_laboratory(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [file for file in (ROOT / "src" / "oblrpo").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    assert held == {file.relative_to(ROOT / "src").as_posix() for file in files}
    assert {"oblrpo/py.typed", "oblrpo/recipes/demo.yaml"} <= held


def test_the_source_archive_holds_package_laboratory_tests_and_pages(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        names = {name.split("/", 1)[1] for name in held.getnames() if "/" in name}
    assert {"src/oblrpo/__init__.py", "src/oblrpo/recipes/demo.yaml", "README.md", "pyproject.toml"} <= names
    assert {"lab/theory/__main__.py", "lab/comparisons/algorithms.yaml", "examples/trl_oblrpo.py"} <= names
    assert {"tests/test_wheel.py", "CITATION.cff", "constraints.txt"} <= names
    assert not any(name.startswith(("runs/", "models/", ".venv")) for name in names)


def test_the_version_is_a_released_one_only_where_nothing_has_changed_since():
    unreleased = "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
    assert (".dev" in __version__) == unreleased


def test_the_version_that_is_cited_is_this_one():
    cited = read_yaml_file(ROOT / "CITATION.cff")
    assert cited["version"] == __version__
    assert f"version = {{{__version__}}}" in (ROOT / "docs" / "questions.md").read_text()
