"""Other ways to squared score norms and the weighted gradient, each as good as someone who knows it would write it.

Every one leaves sum_s a_s grad_theta log pi(o_s|q_s) in `.grad`, which must be None before, and returns
w_s = || grad_theta log pi(o_s|q_s) ||^2, shape (S,), float32 or wider; `plain` has no norms and returns None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from lab.bench import opacus_ghost
from lab.bench.workload import Workload, sequence_logps

VMAP_ELEMENTS = 1 << 26
"""`torch.func` holds as many whole groups of per-sequence gradients as fit this many elements, or one group."""

Run: TypeAlias = Callable[[], Tensor | None]


def _never_missing() -> str | None:
    return None


@dataclass(frozen=True)
class Rival:
    """One method; what it has to set up, and to undo for those who come after it, is outside of what is timed.

    Use::

        with rival.prepared(workload) as run:
            norm2_S = run()   # time this

    Args:
        prepared: readies the model, yields the method, leaves the model as it was. One at a time.
        missing: why this rival cannot run on this machine, or None.
    """

    prepared: Callable[[Workload], AbstractContextManager[Run]]
    missing: Callable[[], str | None] = _never_missing

    def __call__(self, workload: Workload) -> Tensor | None:
        """Prepare the model, run once, and undo the preparation."""
        with self.prepared(workload) as run:
            return run()


def plain(workload: Workload) -> None:
    """One forward and one backward, coefficients known beforehand, no norms: the 1.00 of the table."""
    (workload.logps() * workload.coef_S).sum().backward()


def loop(workload: Workload) -> Tensor:
    """One forward, then a backward of the whole batch for each sequence, then one for the weighted sum."""
    logps_S = workload.logps()
    parameters = workload.parameters
    norm2_S = torch.stack([_norm2(torch.autograd.grad(logp, parameters, retain_graph=True)) for logp in logps_S])
    (logps_S * workload.coef_S).sum().backward()
    return norm2_S


def one_trajectory_per_backward(workload: Workload) -> Tensor:
    """Each sequence its own forward and backward (VCPO, arXiv 2602.17616).

    sum_s (F_s - b_p) g_s with b_p known only when the norms of group p are: sum_s F_s g_s over all sequences is kept
    in `.grad`, sum_s g_s of the current group in one more buffer of a gradient's size, and b_p times it subtracted.
    """
    parameters, G = workload.parameters, workload.group_size
    rewards, baselines = workload.rewards_S.tolist(), workload.baseline_P.tolist()
    norm2 = []
    total: tuple[Tensor, ...] = ()
    group: tuple[Tensor, ...] = ()
    for s, reward in enumerate(rewards):
        score = torch.autograd.grad(workload.logps_of(slice(s, s + 1)).sum(), parameters)
        norm2.append(_norm2(score))
        if total:
            torch._foreach_add_(total, score, alpha=reward)
        else:
            total = torch._foreach_mul(score, reward)
        if s % G == 0:
            group = score  # the buffer is the first gradient itself: neither zeroed nor copied
        else:
            torch._foreach_add_(group, score)
        del score  # or it would still be there when the next one is made
        if s % G == G - 1:
            torch._foreach_add_(total, group, alpha=-baselines[s // G])
            group = ()
    for parameter, gradient in zip(parameters, total, strict=True):
        parameter.grad = gradient
    return torch.stack(norm2)


def func_vmap(workload: Workload) -> Tensor:
    """`torch.func`: per-sequence gradients of whole groups at once, kept until their norms are known, then combined."""
    trainable = {name: p for name, p in workload.model.named_parameters() if p.requires_grad}
    detached = {name: p.detach() for name, p in trainable.items()}

    def logp(parameters: dict[str, Tensor], ids_T: Tensor) -> Tensor:
        def call(**kwargs: Tensor) -> object:
            return functional_call(workload.model, parameters, (), kwargs)

        return sequence_logps(call, ids_T[None])[0]

    S, G = workload.ids_ST.shape[0], workload.group_size
    at_once = G * max(1, VMAP_ELEMENTS // (G * sum(p.numel() for p in detached.values())))
    norm2 = []
    for start in range(0, S, at_once):
        rows = slice(start, start + at_once)
        scores = vmap(grad(logp), in_dims=(None, 0))(detached, workload.ids_ST[rows])
        norm2.append(_norm2_rows(list(scores.values())))
        for name, parameter in trainable.items():
            score_SN = scores.pop(name).flatten(1)  # popped: freed as soon as it is combined
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.view(-1).addmv_(score_SN.mT, workload.coef_S[rows].to(score_SN.dtype))
            del score_SN
    return torch.cat(norm2)


def _norm2(score: tuple[Tensor, ...]) -> Tensor:
    """Squared norm ||g||^2 over all parameters in one fused pass; short types are summed in float32."""
    wide = torch.promote_types(score[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(score, 2, dtype=wide)).square().sum()


def _norm2_rows(score_SN: Sequence[Tensor]) -> Tensor:
    """Squared norms ||g_s||^2 of stacked per-sequence gradients, (S,)."""
    wide = torch.promote_types(score_SN[0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(score.flatten(1), dim=1, dtype=wide) for score in score_SN]
    return torch.stack(norms).square().sum(0)


def _as_is(method: Callable[[Workload], Tensor | None]) -> Rival:
    @contextmanager
    def prepared(workload: Workload) -> Iterator[Run]:
        yield partial(method, workload)

    return Rival(prepared)


@contextmanager
def _with_eager_attention(workload: Workload) -> Iterator[Run]:
    """Attention written out: for the fused ones, vmap has no batching rule on some devices and loops over rows."""
    before = workload.model.config._attn_implementation
    workload.model.set_attn_implementation("eager")
    try:
        yield partial(func_vmap, workload)
    finally:
        workload.model.set_attn_implementation(before)


@contextmanager
def _with_opacus(workload: Workload, ghost: bool) -> Iterator[Run]:
    with warnings.catch_warnings(), opacus_ghost.hooked(workload.model, ghost) as hooks:
        # Token ids need no gradient, which torch remarks on whenever Opacus hooks an embedding.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield partial(opacus_ghost.run, workload, hooks)


RIVALS: dict[str, Rival] = {
    "plain": _as_is(plain),
    "torch.func vmap": Rival(_with_eager_attention),
    "Opacus ghost norms": Rival(partial(_with_opacus, ghost=True), opacus_ghost.missing),
    "Opacus fast gradient clipping": Rival(partial(_with_opacus, ghost=False), opacus_ghost.missing),
    "one trajectory per backward": _as_is(one_trajectory_per_backward),
    "loop": _as_is(loop),
}
"""Other ways, by the name of their row, the slowest last."""
