"""The memory meter against sums done by hand."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from oblrpo import memory
from oblrpo.memory import WORTH_IT, WithoutProducts, free_bytes, give_back, machine_bytes, peak_bytes

KIB = 1024


def kib(size: int) -> torch.Tensor:
    return torch.empty(size * KIB, dtype=torch.uint8)


def test_a_known_sequence_of_allocations_and_frees():
    def function():
        a = kib(100)
        b = kib(50)  # 150
        del a  # 50
        c = kib(70)  # 120
        del b, c  # 0
        return kib(140)  # 140

    assert peak_bytes(function, "cpu") == 150 * KIB


@pytest.mark.parametrize("bias", [False, True])
def test_products_that_are_not_computed_have_their_shapes_and_take_their_memory(bias):
    layer = torch.nn.Linear(8, 64, bias=bias)
    input_STC = torch.randn(4, 50, 8, requires_grad=True)

    def function():
        layer.weight.grad = input_STC.grad = None
        out_STC = layer(input_STC)
        (out_STC @ out_STC.mT).sum().backward()
        return out_STC

    peaks, found = [], []
    for mode in (nullcontext, WithoutProducts):
        with mode():
            out_STC = function()
            assert bool(out_STC.any()) == (mode is nullcontext)
            found.append([(each.shape, each.dtype) for each in (out_STC, input_STC.grad, layer.weight.grad)])
            layer.zero_grad(set_to_none=True)
            peaks.append(peak_bytes(function, "cpu"))
        layer.zero_grad(set_to_none=True)
    assert found[0] == found[1]
    # Autograd hands a gradient over or copies it, by who else holds it at that moment.
    gradients = input_STC.nbytes + sum(p.nbytes for p in layer.parameters())
    assert abs(peaks[0] - peaks[1]) <= gradients < out_STC.nbytes / 4


def test_the_last_allocation_may_be_the_peak():
    def function():
        a = kib(100)
        del a
        return kib(101)

    assert peak_bytes(function, "cpu") == 101 * KIB


def test_nothing_allocated_is_zero():
    assert peak_bytes(lambda: None, "cpu") == 0


def test_what_was_live_before_is_not_counted():
    before = [kib(1000)]
    assert peak_bytes(lambda: kib(10), "cpu") == 10 * KIB
    assert len(before) == 1


def test_what_an_earlier_call_left_behind_counts_when_freed():
    kept = []
    peak_bytes(lambda: kept.append(kib(100)), "cpu")

    def swap():
        kept.clear()
        kept.append(kib(100))

    assert peak_bytes(swap, "cpu") == 0


def test_memory_recycled_between_calls_is_no_trouble():
    """The allocator hands out the same addresses again; a stale record of one must not be subtracted."""
    for _ in range(5):
        assert peak_bytes(lambda: [kib(30), kib(40)], "cpu") == 70 * KIB
        assert kib(30).numel() + kib(40).numel() == 70 * KIB


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_chain_of_products_with_its_backward(layers):
    """y = W_n ... W_1 x, counted in tensors of n x n float32."""
    n, unit = 64, 64 * 64 * 4
    weights = [torch.randn(n, n, requires_grad=True) for _ in range(layers)]
    x, upstream = torch.randn(n, n), torch.ones(n, n)

    def forward():
        y = x
        for weight in weights:
            y = weight @ y
        return y

    def both():
        forward().backward(upstream)

    live = []
    for done in range(layers):  # the backward of one layer, from the top
        output, finished, saved, made = 1, done, layers - 1 - done, 1  # y_n is held by the caller
        incoming = done > 0  # at the top it is `upstream`, which was there before
        passed_on = done < layers - 1  # x needs no gradient
        live.append(output + finished + saved + made + incoming + passed_on)
    assert peak_bytes(forward, "cpu") == layers * unit
    assert peak_bytes(both, "cpu") == max(live) * unit


def test_scratch_memory_of_a_backward_is_counted():
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            kib(500)
            return grad

    x = torch.ones(1, requires_grad=True)
    peak = peak_bytes(lambda: Identity.apply(x).sum().backward(), "cpu")
    assert 500 * KIB <= peak <= 501 * KIB


def test_the_figure_is_the_same_every_time():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 8))
    x = torch.randn(16, 32)

    def step():
        model.zero_grad()
        model(x).logsumexp(1).sum().backward()
        model.zero_grad()

    assert len({peak_bytes(step, "cpu") for _ in range(4)}) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_counts_the_same_way():
    def function():
        a = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
        b = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
        del a
        return b

    before = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    assert peak_bytes(function, "cuda") == 6 << 20
    del before


def test_freed_memory_goes_back_only_where_much_is_wanted(monkeypatch):
    asked = []
    library = SimpleNamespace(malloc_trim=asked.append)
    monkeypatch.setattr("oblrpo.memory.ctypes.CDLL", lambda name: library)
    give_back(WORTH_IT - 1)
    assert asked == []
    give_back(WORTH_IT)
    give_back()
    assert asked == [0, 0]


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_is_the_machine(version, tmp_path, monkeypatch):
    """Its own group of version 2 without a name, and a job's of version 1 below a group with a tighter limit."""
    own, root = tmp_path / "cgroup", tmp_path / "groups"
    monkeypatch.setattr(memory, "CGROUPS", root)
    if version == 2:
        own.write_text("0::/\n")
        folder, names, files = root, ("memory.max", "memory.current"), "inactive_file"
    else:
        own.write_text("5:cpu:/job\n4:hugetlb,memory:/tight/job\n")
        folder, names, files = root / "memory" / "tight", memory.LIMITS["memory"][:2], memory.LIMITS["memory"][2]
        (folder / "job").mkdir(parents=True)
        for name, value in zip(("memory.stat", *names), (f"{files} 0", 2**62, 500), strict=True):
            (folder / "job" / name).write_text(str(value))
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(("memory.stat", *names), (f"cache 9\n{files} 200\n", 5000, 1000), strict=True):
        (folder / name).write_text(str(value))
    of_container = memory._container_limits
    monkeypatch.setattr(memory, "_container_limits", lambda: of_container(own))
    assert (machine_bytes("cpu"), free_bytes("cpu")) == (5000, 4200)
    (folder / names[0]).write_text("max")
    assert machine_bytes("cpu") > 5000


def test_a_machine_without_limits_has_what_the_system_says(monkeypatch, tmp_path):
    assert memory._container_limits(tmp_path / "none") == []
    monkeypatch.setattr(memory, "_container_limits", list)
    system = memory.psutil.virtual_memory()
    assert machine_bytes("cpu") == system.total
    assert 0 < free_bytes("cpu") < system.total
