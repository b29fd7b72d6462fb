"""Memory: the peak of live tensors, the process's own, and what is returned to the system."""

import ctypes
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
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
    gc.collect()  # cycles left by earlier work would otherwise be freed within
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
    return int(psutil.virtual_memory().total)


def keep_freed(keep: bool = True) -> None:
    """Let the C library keep what is freed for later, where it can (glibc); or no longer, and give it back.

    Tensors of megabytes would otherwise come from the system and go back to it one by one, and the system fills what it
    gives with zeros: a sixth of a gradient's time (measured, 135 M parameters). This affects the entire process.
    """
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
