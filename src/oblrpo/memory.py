"""Memory: the peak of live tensors, the process's own, and what is returned to the system."""

import ctypes
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WORTH_IT = 1 << 26
"""The system zeroes memory that it hands out again: that took a quarter of a step of a small model (measured)."""


def peak_bytes(function: Callable[[], object], device: torch.device | str) -> int:
    """Peak of live tensor memory while `function` runs, less what was live when it started; in bytes.

    On CUDA the caching allocator's own count. Elsewhere every allocation and free of torch's CPU allocator, in order,
    backward included: the sizes of the tensors, without the allocator's slack, the same in every run. What a library
    allocates behind torch's back (packing buffers of a matrix product) is not in it. On the CPU, freeing memory that
    was live before counts only if an earlier call of this function saw it allocated; drop it before, not within.
    """
    collects = gc.isenabled()
    gc.disable()  # cycles left by earlier work would otherwise be freed within
    try:
        return _peak_bytes(function, device)
    finally:
        if collects:
            gc.enable()


def _peak_bytes(function: Callable[[], object], device: torch.device | str) -> int:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports its start and its end on stderr
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # Allocations are recorded all the same; the operators would take gigabytes. Switching off one kind of
        # activity alone is warned about on stderr.
        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU]
        profiler.toggle_collection_dynamic(False, kinds)
        function()
    assert profiler.profiler is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    changes: list[tuple[int, int]] = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate((nbytes for _, nbytes in changes), initial=0))


class WithoutProducts(TorchDispatchMode):
    """Matrix products are zeros of the right size: a model takes its memory in a small share of its time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return zeros for a product, and for anything else what it gives."""
        if func is torch.ops.aten.addmm_.default:
            return args[0]
        if func in PRODUCTS:
            left, right = args[-2:]
            return left.new_zeros((*left.shape[:-1], right.shape[-1]))
        return func(*args, **(kwargs or {}))


PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}


def resident_bytes() -> int:
    """Return the memory that this process occupies now."""
    return int(psutil.Process().memory_info().rss)


def machine_bytes(device: torch.device | str) -> int:
    """Return the memory that the machine, or the GPU, has."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _container_limits())])


def free_bytes(device: torch.device | str) -> int:
    """Return the memory that this process may still take, with what its GPU's allocator holds and does not use."""
    if torch.device(device).type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    give_back()
    free = [limit - used for limit, used in _container_limits()]
    return max(0, min([int(psutil.virtual_memory().available), *free]))


CGROUPS = Path("/sys/fs/cgroup")
LIMITS = {"": ("memory.max", "memory.current", "inactive_file"),
          "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}  # fmt: skip
"""The files of Linux's control groups, of version 2 and 1: the limit, what is used, and what of that is a file's."""


def _container_limits(own: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """The bytes that a container, or a job of a cluster, may take, and those that it has taken; none without either.

    The system's own figures are those of the whole machine, and who takes more than the limit is killed.
    """
    found = []
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            for kind in {"memory", ""} & {*kinds.split(",")}:
                root, (limit, used, files) = CGROUPS / kind, LIMITS[kind]
                inner = root / path.lstrip("/")  # a container sees its own group as the root
                for folder in {root, *(each for each in (inner, *inner.parents) if root in each.parents)}:
                    with suppress(OSError, ValueError):
                        text = (folder / "memory.stat").read_text().split()
                        spare = int(dict(zip(text[::2], text[1::2], strict=True)).get(files, 0))
                        taken = int((folder / used).read_text()) - spare
                        found.append((int((folder / limit).read_text()), taken))  # `max` where there is no limit
    return found


def heap_is_kept() -> bool:
    """Whether large tensors live in glibc's heap: not where the user has set malloc's own variable for them."""
    return "MALLOC_MMAP_THRESHOLD_" not in os.environ


def keep_freed(keep: bool = True) -> None:
    """Let the C library keep what is freed for later, where it can (glibc); or no longer, and give it back.

    Tensors of megabytes would otherwise come from the system and go back to it one by one, and the system fills what it
    gives with zeros: a sixth of a gradient's time (measured, 135 M parameters). The heap may take several times what
    the tensors in it do, so malloc is left alone where the user has set it (`heap_is_kept`). This affects the whole
    process.
    """
    if not heap_is_kept():
        return
    with suppress(OSError, AttributeError):  # another C library, which has its own ways
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2**31 - 1 if keep else 1 << 17)  # M_TRIM_THRESHOLD; glibc's own is 128 KiB
        libc.mallopt(-4, 0 if keep else 1 << 16)  # M_MMAP_MAX
        libc.malloc_trim(0)


def give_back(wanted: int = WORTH_IT) -> None:
    """Return to the system what was freed and kept, if at least WORTH_IT bytes are wanted for something else."""
    if wanted >= WORTH_IT:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
