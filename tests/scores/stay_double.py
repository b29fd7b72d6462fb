"""A float64 model that computes in float64 throughout, whatever its code asks for."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class StayDouble(TorchDispatchMode):
    """While active, no float64 tensor is cast to float32: `.float()`, `.to(torch.float32)`, `softmax(dtype=...)`.

    transformers takes norms, softmaxes and rotary angles in float32 inside, which hides errors below 1e-7. Below
    autograd, so that backwards and what they recompute stay double too; a TorchFunctionMode is off in there.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32 and any(_is_double(each) for each in args):
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def _is_double(argument):
    return isinstance(argument, torch.Tensor) and argument.dtype == torch.float64
