"""Runs a module of tests in one process a rank, without Ray."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.verl.support.launch import ROOT, environment


def run_on_ranks(module: str, folder: Path, ranks: int, timeout: float = 1200) -> list[dict]:
    """What `module` writes on every rank to FOLDER/RANKS_RANK.json."""
    folder = folder.resolve()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": 0}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, str(folder)],
            cwd=ROOT,
            env=environment(folder) | {key: str(value) for key, value in (rendezvous | {"RANK": rank}).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(printed)[-6000:]
    return [json.loads((folder / f"{ranks}_{rank}.json").read_text()) for rank in range(ranks)]


def answer(folder: str, result: dict) -> None:
    """Write this rank's result."""
    Path(folder, f"{os.environ['WORLD_SIZE']}_{os.environ['RANK']}.json").write_text(json.dumps(result))
