"""Wheel and source archive are each enough for what README shows, and hold what they should."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of both archives."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_each_archive_alone_runs_the_readme_in_a_fresh_environment(built, tmp_path):
    """The source archive brings what it depends on, at the versions of the tests; the wheel then takes its place."""
    bin = tmp_path / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for archive, how in {source: ["-c", ROOT / "constraints.txt"], wheel: ["--force-reinstall", "--no-deps"]}.items():
        there = tmp_path / archive.name.removesuffix(".gz")
        there.mkdir()

        def command(program, *words, there=there):
            ran = subprocess.run([bin / program, *words], cwd=there, env=environment, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            return ran.stdout

        pip = [bin / "pip", "install", "--quiet", "--disable-pip-version-check", *how, archive]
        installed = subprocess.run(pip, cwd=there, capture_output=True, text=True)  # where an index is, pip knows
        assert installed.returncode == 0, installed.stderr
        command("pip", "check")
        assert command("python", "-c", "import oblrpo; print(oblrpo.__file__)").startswith(str(tmp_path))
        assert "smollm2-arithmetic" in command("oblrpo", "train", "--help")
        (there / "readme.py").write_text(block)
        _, n_snr, report = command("python", "readme.py").splitlines()[-1].split()
        assert float(n_snr) > 0.1
        assert Path(report) == there / "runs" / "mine" / "report.html"
    small = ["--steps", "2", "--warm-start-steps", "2", "--eval-prompts", "8"]
    command("oblrpo", "train", "demo", *small, "--output", "runs/demo")
    assert (there / "runs" / "demo" / "report.html").is_file()


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
