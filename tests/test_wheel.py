"""The wheel alone is enough for README's commands, and the source archive holds what builds it."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of both archives, built from a copy, so that the tree stays as it is."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_commands_of_the_readme_run_from_the_wheel(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel]
    subprocess.run(install, check=True, capture_output=True)
    code = "import oblrpo, sys; print(oblrpo.__file__); from oblrpo.cli import main; main()"

    def command(*words):
        environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        ran = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith(str(tmp_path / "site")), "the package of this tree was taken"
        return ran.stdout

    command("train", "demo", "--steps", "2", "--warm-start-steps", "2", "--eval-prompts", "8", "--output", "runs/demo")
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    assert "smollm2-arithmetic" in command("train", "--help")
    assert command("--version")


def test_the_wheel_holds_what_trains_and_no_laboratory(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"oblrpo"}


def test_the_source_archive_holds_package_laboratory_tests_and_pages(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        names = {name.split("/", 1)[1] for name in held.getnames() if "/" in name}
    assert {"src/oblrpo/__init__.py", "src/oblrpo/recipes/demo.yaml", "README.md", "pyproject.toml"} <= names
    assert {"lab/theory/__main__.py", "lab/comparisons/algorithms.yaml", "examples/trl_oblrpo.py"} <= names
    assert any(name.startswith("tests/") for name in names)
    assert not any(name.startswith(("runs/", "models/", ".venv")) for name in names)
