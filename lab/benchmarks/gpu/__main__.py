"""One command of at most nine minutes on one GPU, without network, with what is there.

    PYTHONPATH=src python3 -m lab.benchmarks.gpu --output runs/gpu [--seconds 540] [--device cuda] [--small] [--parts]

needs torch 2.8 and transformers 5 or later. The first two parts need nothing else; what the others miss is said
(`make gpu-wheels` fetches it). Parts by importance, each with its share of the time (what one leaves the next ones
have): what is known, and where a step with norms spends its time at Qwen3-4B's shape; is the score tape exact on the
device; whole steps at the sizes of Qwen3; the same with vLLM; does the trainer give the same twice; 50 steps of
smollm2-arithmetic, if its model is there. A part is printed when it ends. GPU.md and gpu.json in the folder are written
after every line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lab.benchmarks.gpu.page import OutOfTime, Page

PARTS = {
    # title, module, function, share of the time
    "where": ("Where the time goes", "where", "run", 25),
    "tape": ("The score tape on the device", "exactness", "run", 15),
    "sizes": ("Whole steps at the sizes of Qwen3", "sizes", "run", 30),
    "vllm": ("Sampling with vLLM", "sizes", "with_vllm", 15),
    "trainer": ("The trainer on the device", "training", "two_runs", 10),
    "model": ("A real model", "training", "real_model", 15),
}


def words() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python3 -m lab.benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder of GPU.md and gpu.json")
    parser.add_argument("--seconds", type=float, default=540, help="time for everything")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"), help="of the last part")
    parser.add_argument("--small", action="store_true", help="all of it at tiny sizes, for a try on the CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which parts; all of them")
    return parser.parse_args()


def why_not(device: str) -> str:
    """Why nothing can be measured here, or nothing."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed for {sys.executable}; name another Python with: make gpu PYTHON=..."
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU here; --device cpu --small tries everything at tiny sizes."
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return f"device {device!r} cannot be used: {str(error).splitlines()[0]}"
    return ""


def head_of(device: str) -> dict[str, str]:
    """What the figures depend on."""
    import torch

    head = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    head |= {"Python": platform.python_version(), "device": f"{platform.machine()} CPU"}
    if device.startswith("cuda"):
        known = torch.cuda.get_device_properties(device)
        head |= {"device": f"{known.name}, {known.total_memory / 1e9:.0f} GB", "CUDA": str(torch.version.cuda)}
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
            head["driver"] = driver.splitlines()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            head["driver"] = "unknown: nvidia-smi does not answer"
    return head


def run_part(page: Page, title: str, work: Callable[[], None], deadline: float) -> None:
    """Run one part; whatever happens in it, the page and the next part go on."""
    began = time.monotonic()
    page.begin(title)
    try:
        with page.until(deadline):
            work()
    except OutOfTime:
        page.say("The rest was skipped: the time of this part was up.")
    except ModuleNotFoundError as error:
        page.say(f"Skipped: {error.name} is not installed here.")
    except Exception as error:  # a part that fails must not take the others with it
        page.check(False, f"it ended with {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    page.parts[-1].seconds = time.monotonic() - began
    page.write()
    print(page.parts[-1].text, flush=True)


def main() -> None:
    began, arguments = time.monotonic(), words()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it when it is imported: the profiler's own lines
    if reason := why_not(arguments.device):
        print(reason, file=sys.stderr)
        raise SystemExit(2)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    page = Page(arguments.output, head_of(arguments.device))
    print(page.top, flush=True)
    parts = [PARTS[name] for name in arguments.parts]
    whole, share = sum(part[-1] for part in parts), 0
    for title, module, function, own in parts:
        share += own
        extra: dict[str, Any] = {"model": arguments.model} if function == "real_model" else {}

        def work(module: str = module, function: str = function, extra: dict[str, Any] = extra) -> None:
            run = getattr(importlib.import_module(f"lab.benchmarks.gpu.{module}"), function)
            partial(run, page, arguments.device, arguments.small, **extra)()

        run_part(page, title, work, began + share / whole * arguments.seconds)
    raise SystemExit(1 if any(part.wrong for part in page.parts) else 0)


if __name__ == "__main__":
    main()
