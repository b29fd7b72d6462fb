"""Norms and gradients of the score tape on the device, beside loop autograd of the same weights in float64."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from lab.benchmarks.gpu.page import Page
from oblrpo.scores import ScoreTape, Sketch, chunked_logps, oracle
from tests.scores.models import batch
from tests.scores.zoo import EXPERTS, build_family

FAMILIES = (
    "llama-tied-biased", "llama-untied", "qwen3-tied", "qwen3-untied-biased", "gpt2-tied", "gpt2-untied",
    "qwen3-moe-normalised",
)  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "auto": {}, "gram": {"method": "gram"}, "instantiate": {"method": "instantiate"},
    "streamed": {"method": "streamed"},
}  # fmt: skip
S, G = 6, 3
DTYPES = torch.float32, torch.bfloat16
LEAST, TIMES = 1e-4, 3.0
"""An error passes below LEAST, or below so many times that of loop autograd in the same type."""


def run(page: Page, device: str, small: bool) -> None:
    """Every method on every family in both types; then log-probabilities in chunks, and what repeats bit by bit."""
    page.table(
        f"Largest relative errors against loop autograd in float64, {S} sequences; beside them those of loop autograd "
        "in the type itself. `streamed` gives no gradient.",
        "model", "type", "method", "norms", "norms by loop", "gradient", "gradient by loop",
    )  # fmt: skip
    methods = {name: METHODS[name] for name in (("auto", "gram") if small else METHODS)}
    for dtype in DTYPES:
        for seed, name in enumerate(FAMILIES[1:2] if small else FAMILIES):
            if dtype == torch.bfloat16 and name in EXPERTS:
                continue  # rounding sends tokens to other experts
            torch.manual_seed(seed)
            model = build_family(name, torch.float32).to(device=device, dtype=dtype)
            _family(page, name, model, methods)
    if importlib.util.find_spec("peft") is None:
        page.say("LoRA was skipped: peft is not installed here.")
    else:
        for dtype in DTYPES:
            _family(page, "qwen3-tied, LoRA", _adapted(device, dtype), methods)
    _chunks(page, device)
    _repeats(page, device)


def _family(page: Page, name: str, model: nn.Module, methods: dict[str, dict[str, Any]]) -> None:
    data = tuple(each.to(_device(model)) if isinstance(each, Tensor) else each for each in batch(S))
    coef_S = torch.randn(S).to(_device(model))
    dtype = next(p.dtype for p in model.parameters())
    known = _loop(copy.deepcopy(model).double(), data, coef_S)
    loop = _errors(_loop(model, data, coef_S), known)
    for method, keywords in methods.items():
        errors = _errors(_taped(model, data, coef_S, keywords), known)
        kind = str(dtype).removeprefix("torch.")
        pairs = [pair for pair in zip(errors, loop, strict=True) if pair[0] is not None]
        page.add(
            name, kind, method, *(f"{error:.1e}" for pair in pairs for error in pair), *([""] * (4 - 2 * len(pairs)))
        )
        for what, (mine, by_loop) in zip(("norms", "gradient"), pairs, strict=False):
            page.check(
                mine < max(LEAST, TIMES * by_loop),
                f"{name} in {kind} by {method}: {what} off by {mine:.1e}, loop autograd's by {by_loop:.1e}.",
            )


def _adapted(device: str, dtype: torch.dtype) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = {"r": 3, "lora_alpha": 5, "lora_dropout": 0.0, "target_modules": "all-linear"}
    model: Any = get_peft_model(
        build_family("qwen3-tied", torch.float32), LoraConfig(task_type="CAUSAL_LM", **settings)
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.3)
    moved: nn.Module = model.eval().to(device=device, dtype=dtype)
    return moved


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _logps(model: nn.Module, ids_ST: Tensor, mask_ST: Tensor, prompt: int) -> Tensor:
    """Log-probability of each completion, (S,), in float32 or wider from the logits on."""
    positions_ST = (mask_ST.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids_ST, attention_mask=mask_ST, position_ids=positions_ST, use_cache=False)
    logits_STV = output.logits[:, prompt - 1 : -1]
    logits_STV = logits_STV.to(torch.promote_types(logits_STV.dtype, torch.float32))
    logp_ST = logits_STV.log_softmax(-1).gather(2, ids_ST[:, prompt:, None])[..., 0]
    return (logp_ST * mask_ST[:, prompt:]).sum(1)


def _taped(model: nn.Module, data: Any, coef_S: Tensor, keywords: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Norms and the gradient as one vector, by the tape."""
    with ScoreTape(model, **keywords) as tape:
        tape.record(_logps(model, *data))
    norm2_S = tape.norm2().double()
    if tape.method == "streamed":
        return norm2_S, None
    tape.accumulate(coef_S, group_size=G)
    gradient_N = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return norm2_S, gradient_N


def _loop(model: nn.Module, data: Any, coef_S: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same by one backward a sequence."""
    scores = oracle.scores(model, _logps(model, *data))
    score_SN = torch.stack([torch.cat([each.double().flatten() for each in score]) for score in scores])
    return score_SN.square().sum(1), coef_S.double() @ score_SN


def _errors(got: tuple[Tensor, Tensor | None], known: tuple[Tensor, Tensor | None]) -> list[Any]:
    """Largest relative error of a norm, relative error of the gradient, None of one that is not there."""
    (norm2_S, gradient_N), (known_S, known_N) = got, known
    error = float(((norm2_S - known_S) / known_S).abs().max())
    if gradient_N is None or known_N is None:
        return [error, None]
    return [error, float((gradient_N - known_N).norm() / known_N.norm())]


def _chunks(page: Page, device: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=False).to(device)
    hidden_STC, target_ST = torch.randn(4, 5, 16).to(device), torch.randint(50, (4, 5)).to(device)
    ours_ST = chunked_logps(head, hidden_STC, target_ST, 0.7)
    plain_ST = (head(hidden_STC) / 0.7).log_softmax(-1).gather(2, target_ST[..., None])[..., 0]
    pairs = zip(*(torch.autograd.grad(each.sum(), head.weight) for each in (ours_ST, plain_ST)), strict=True)
    off = max([float((ours_ST - plain_ST).detach().abs().max()), *(float((a - b).norm() / b.norm()) for a, b in pairs)])
    page.say(f"Log-probabilities in chunks, and their gradient, differ from the plain ones by {off:.1e}.")
    page.check(off < 1e-4, f"log-probabilities in chunks are off by {off:.1e}.")


def _repeats(page: Page, device: str) -> None:
    """Sketches come from a generator on the CPU: one seed gives the same numbers, another seed others."""
    torch.manual_seed(0)
    model = build_family("qwen3-tied", torch.float32).to(device)
    data = tuple(each.to(device) if isinstance(each, Tensor) else each for each in batch(S))
    sketches = []
    for seed in (1, 1, 2):
        with ScoreTape(model, "streamed") as tape:
            tape.record(_logps(model, *data), sketches=[Sketch(seed)])
        sketches.append(tape.sketch(seed))
    one, again, other = sketches
    page.check(bool((one - again).abs().max() <= 1e-4 * one.abs().max()), "two sketches from one seed differ.")
    page.check(not torch.allclose(one, other, rtol=1e-4), "sketches from two seeds are the same.")
    (norm2_S, gradient_N), (again_S, again_N) = (_taped(model, data, torch.ones(S, device=device), {}) for _ in "ab")
    assert gradient_N is not None
    assert again_N is not None
    bitwise = torch.equal(norm2_S, again_S) and torch.equal(gradient_N, again_N)
    page.say(f"One batch taken twice has {'the same' if bitwise else 'not the same'} norms and gradient bit by bit.")
