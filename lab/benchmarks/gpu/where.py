"""Where a forward and backward with score norms spends its time: launches, float32 products, host against device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lab.benchmarks.gpu.page import Page
from oblrpo.scores import ScoreTape, token_logps

COMMON = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, int]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
TINY = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
WEIGHTS = ("autocast", "adapters", "bfloat16")
"""All parameters in float32 under autocast, and adapters on bfloat16, as runs have them; all parameters in bfloat16."""
BATCHES = [(8, 512), (1, 4096)]
METHODS = ("plain", "auto", "look", "look, inner products")
FORETOLD = {
    ("autocast", "8 x 512"): ((1.00, 7100), (1.11, 12200), (0.90, 10700), (1.14, 14100)),
    ("adapters", "8 x 512"): ((1.00, 9400), (0.99, 14500), (0.99, 12400), (1.04, 12900)),
    ("adapters", "1 x 4096"): ((1.00, 9200), (1.02, 14300), (1.01, 12300), (1.01, 12300)),
    ("bfloat16", "8 x 512"): ((1.00, 6200), (1.16, 12000), (0.89, 10000), (1.17, 13500)),
    ("bfloat16", "1 x 4096"): ((1.00, 6000), (1.11, 11600), (1.03, 9400), (1.03, 9400)),
}
"""Time over a plain step, and launches, of every method: derived from the operations at Qwen3-4B's shape, and not
measured (docs/lab_book/h100.md)."""
KNOWN = (
    "Known before this run (docs/lab_book/h100.md): on H100s the tape was exact, and took 2.30 (8 x 512) and 4.34 "
    "(1 x 4096) times a plain step, for its products were taken in float32. They are in bfloat16 since, which no clock "
    "has confirmed: what is foretold is derived from the operations, at 600 TFLOP/s in bfloat16, 52 in float32, 3 TB/s "
    "and 2 us for the smallest launch. Where the host's seconds are near the wall's and the device's far below, "
    "launches are the limit."
)
ROUNDS, KERNELS = 3, 10


def run(page: Page, device: str, small: bool) -> None:
    """What is known; what this card does; every method on every batch; the kernels of `auto` that take longest."""
    page.say(KNOWN)
    _speeds(page, device, small)
    page.table(
        f"{'A tiny' if small else 'Qwen3-4B'} shape, random weights; medians of {ROUNDS} rounds, and one round under "
        "torch's profiler. Norm error: that of the first sequence, against its own backward in the same arithmetic. On "
        "a CPU, operations stand for launches.",
        "weights", "S x T", "method", "seconds", "over plain", "foretold", "host", "device", "launches", "foretold",
        "float32 products", "peak (GB)", "norm error",
    )  # fmt: skip
    slowest: dict[str, tuple[float, int]] = {}
    try:
        for weights in WEIGHTS:
            for S, T in [(4, 8)] if small else BATCHES:
                if weights == "autocast" and T > 512:
                    continue  # 3.5 billion float32 weights, their gradients and these rows do not fit into 80 GB
                try:
                    kernels = _methods(page, weights, _model(weights, device, small), S, T)
                    slowest = slowest or kernels
                except ModuleNotFoundError:
                    page.say("Adapters were skipped: peft is not installed here.")
                except torch.OutOfMemoryError:
                    page.add(weights, f"{S} x {T}", "all", "out of memory", *[""] * 9)
                free(device)
    finally:
        page.table("The kernels with the most device time, of `auto` on the first batch.", "kernel", "ms", "launches")
        for name, (seconds, launches) in sorted(slowest.items(), key=lambda each: -each[1][0])[:KERNELS]:
            page.add(name[:100].replace("|", "/"), f"{1e3 * seconds:.1f}", launches)


def _speeds(page: Page, device: str, small: bool) -> None:
    """What the derived times assume, measured: the copy's bandwidth, products, a launch."""
    page.table("What this card does, and what the derived times assume.", "what", "measured", "assumed")
    n, width = (1 << 16, 64) if small else (1 << 28, 8192)
    one = torch.randn(n, device=device)
    page.add("copy (TB/s)", f"{8 * n / _timed(partial(torch.empty_like(one).copy_, one), device)[0] / 1e12:.3g}", 3)
    del one
    for dtype, assumed in ((torch.bfloat16, 600), (torch.float32, 52)):
        square = torch.randn(width, width, device=device, dtype=dtype)
        seconds = _timed(partial(torch.mm, square, square), device)[0]
        page.add(f"product in {str(dtype)[6:]} (TFLOP/s)", f"{2 * width**3 / seconds / 1e12:.3g}", assumed)
    launch = _timed(partial(torch.zeros(8, device=device).add_, 1), device, 300)[1]
    page.add("a launch, until the host goes on (us)", f"{1e6 * launch:.1f}", 5)


def _timed(work: Callable[[], object], device: str, times: int = 10) -> tuple[float, float]:
    """Seconds of a call, device included, and of the host alone."""
    work()
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    host = time.perf_counter() - began
    _wait(device)
    return (time.perf_counter() - began) / times, host / times


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Give back the memory of what is not used any more."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _model(weights: str, device: str, small: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **COMMON | SIZES["Qwen3-4B"] | (TINY if small else {}))
    with torch.device(device):
        dtype = torch.float32 if weights == "autocast" else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    if weights == "adapters":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).eval()
    return model


def _logps(model: Any, weights: str, ids_ST: Tensor) -> Tensor:
    """Log-probabilities as a run takes them, without all logits, (S,)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.autocast(ids_ST.device.type, torch.bfloat16, enabled=weights == "autocast"):
        hidden_STC = base.model(input_ids=ids_ST, use_cache=False).last_hidden_state
        return token_logps(base.lm_head, hidden_STC[:, :-1], ids_ST[:, 1:]).logp_ST.sum(1)


def _step(method: str, model: Any, weights: str, ids_ST: Tensor) -> float:
    """One forward and backward; the squared norm of the first sequence's score, 0 of a plain step."""
    S = len(ids_ST)
    coef_S = torch.linspace(-1, 1, S, device=ids_ST.device) if S > 1 else torch.ones(1, device=ids_ST.device)
    if method == "plain":
        (_logps(model, weights, ids_ST) * coef_S).sum().backward()
        return 0.0
    looks = method.startswith("look")
    with ScoreTape(model, "streamed" if looks else "auto") as tape:
        tape.record(_logps(model, weights, ids_ST), gram=S if "inner" in method else 0)
    norm2_S = tape.norm2()
    if not looks:
        tape.accumulate(coef_S, group_size=S)
    return float(norm2_S[0])


def _methods(page: Page, weights: str, model: Any, S: int, T: int) -> dict[str, tuple[float, int]]:
    """A line for every method; the kernels of `auto`."""
    device = str(next(model.parameters()).device)
    ids_ST = torch.randint(model.config.vocab_size, (S, T), device=device)
    expected = _norm2_of_first(model, weights, ids_ST)
    plain, kernels_of_auto = 0.0, dict[str, tuple[float, int]]()
    foretold = FORETOLD.get((weights, f"{S} x {T}"), ((None, None),) * len(METHODS))
    for method, (ratio, launches) in zip(METHODS, foretold, strict=True):
        try:
            seconds, host, peak, norm2 = _measure(method, model, weights, ids_ST)
            kernels = _kernels(partial(_step, method, model, weights, ids_ST), device)
        except torch.OutOfMemoryError:
            page.add(weights, f"{S} x {T}", method, "out of memory", *[""] * 9)
            continue
        finally:
            model.zero_grad(set_to_none=True)
            free(device)
        plain = plain or seconds
        busy, count = sum(each[0] for each in kernels.values()), sum(each[1] for each in kernels.values())
        products = sum(each[0] for name, each in kernels.items() if is_float32_product(name))
        error = abs(norm2 / expected - 1)
        page.add(
            weights, f"{S} x {T}", method, f"{seconds:.3f}", f"{seconds / plain:.2f}", ratio or "", f"{host:.3f}",
            f"{busy:.3f}", count, launches or "", f"{products:.3f}", f"{peak:.1f}" if peak else "",
            "" if method == "plain" else f"{error:.1e}",
        )  # fmt: skip
        page.check(method == "plain" or error < 0.05, f"{method} with {weights}: a norm is off by {error:.1e}.")
        kernels_of_auto = kernels if method == "auto" else kernels_of_auto
    return kernels_of_auto


def _norm2_of_first(model: Any, weights: str, ids_ST: Tensor) -> float:
    _logps(model, weights, ids_ST[:1]).sum().backward()
    norm2 = sum(float(p.grad.float().square().sum()) for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    return norm2


def _measure(method: str, model: Any, weights: str, ids_ST: Tensor) -> tuple[float, float, float, float]:
    """Median seconds, those of the host alone, peak GB (0 on a CPU), and the first squared norm."""
    device = str(ids_ST.device)
    norm2 = _step(method, model, weights, ids_ST)  # a model's first tape checks its rows
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    wall, host = [], []
    for _ in range(ROUNDS):
        model.zero_grad(set_to_none=True)
        _wait(device)
        began = time.perf_counter()
        _step(method, model, weights, ids_ST)
        host.append(time.perf_counter() - began)
        _wait(device)
        wall.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.startswith("cuda") else 0.0
    return statistics.median(wall), statistics.median(host), peak, norm2


def _kernels(work: Callable[[], object], device: str) -> dict[str, tuple[float, int]]:
    """Device seconds and launches of every kernel of one call; on a CPU those of every operation."""
    cuda = device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])) as record:
        work()
        _wait(device)
    kind, time_of = ("CUDA", "self_device_time_total") if cuda else ("CPU", "self_cpu_time_total")
    events = [event for event in record.key_averages() if event.device_type.name == kind]
    return {event.key: (getattr(event, time_of) / 1e6, event.count) for event in events}


def is_float32_product(kernel: str) -> bool:
    """Whether a kernel is a matrix product in float32, which no tensor core takes."""
    name = kernel.lower()
    product = any(word in name for word in ("gemm", "cutlass", "xmma", "nvjet"))
    in_float32 = any(word in name for word in ("sgemm", "f32f32_f32f32", "simt", "ffma", "_sss_"))
    return product and in_float32 and "bf16" not in name and "tf32" not in name
