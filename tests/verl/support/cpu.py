"""What verl lacks to run on a CPU: a platform, one process group, and a rollout by transformers' `generate`.

Loaded in every process by VERL_USE_EXTERNAL_MODULES, as any plugin of verl's users is.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


_MEMORY = SimpleNamespace(_record_memory_history=_nothing, _set_allocator_settings=_nothing)
NOTHING = """set_device synchronize empty_cache ipc_collect max_memory_allocated max_memory_reserved memory_allocated
memory_reserved reset_peak_memory_stats manual_seed manual_seed_all current_device"""
_DEVICE = SimpleNamespace(
    **dict.fromkeys(NOTHING.split(), _nothing),
    is_available=lambda: True,
    device_count=lambda: 1,
    get_device_name=lambda *_: "cpu",
    mem_get_info=lambda *_: (1 << 33, 1 << 34),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    memory=_MEMORY,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        pass

    def manual_seed_all(self, seed):
        pass

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"  # pretended to Ray: ray.init(num_gpus=...)

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


_init_process_group = torch.distributed.init_process_group


def _one_backend(*args: Any, backend: str | None = None, **kwargs: Any) -> None:
    # verl asks for "cpu:gloo,<device>:<backend>", which names the CPU twice here.
    _init_process_group(*args, backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs)


torch.distributed.init_process_group = _one_backend


def _load_replica() -> type:
    from tests.verl.support.rollout import TransformersReplica

    return TransformersReplica


_ROLLOUT_REGISTRY["transformers", "async"] = "tests.verl.support.rollout.TransformersRollout"
RolloutReplicaRegistry.register("transformers", _load_replica)
