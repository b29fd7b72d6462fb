"""What is laid out for a GPU, without one: exact on a CPU, and by the operations that fake tensors on CUDA run."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from lab.benchmarks.gpu import exactness
from lab.benchmarks.gpu.page import Page
from oblrpo.scores import ScoreTape, contributions, gram, oracle, rules, token_logps
from oblrpo.scores.trainable_layers import ParameterPiece
from tests.scores.models import compare, logps, relative
from tests.scores.test_gram import flat_scores
from tests.scores.test_methods import packed


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Lay work out as on a GPU; products of short factors, which CUDA alone takes, are those of the same numbers."""

    def short_matmul(first, second, out=None):
        return torch.matmul(first.float(), second.float(), out=out)

    monkeypatch.setattr(contributions, "AS_ON_CUDA", True)
    monkeypatch.setattr(contributions, "short_matmul", short_matmul)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers for it
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # of targets that PEFT converts itself
@pytest.mark.usefixtures("as_on_cuda")
def test_the_cases_of_the_gpu_on_a_cpu(tmp_path):
    """Norms and gradients by every method and in both types are as exact as loop autograd's in that type."""
    page = Page(tmp_path, {})
    page.begin("exactness")
    exactness.run(page, "cpu", small=False)
    assert page.parts[0].tables[0].rows
    assert not page.parts[0].wrong


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("elements", [1, 1 << 26])
@pytest.mark.parametrize("name", ["qwen3-tied", "gpt2-tied", "llama-untied", "qwen3-moe-normalised"])
def test_layout_is_exact_in_float64(case, name, elements, monkeypatch):
    """At every size of a temporary, with sums in one block or many."""
    monkeypatch.setattr(contributions, "CUDA_ELEMENTS", elements)
    monkeypatch.setattr(gram, "BLOCK", 16)
    monkeypatch.setattr(gram, "SLIM", 0 if elements == 1 else gram.SLIM)
    model, data = case(name)
    assert max(compare(model, data, torch.randn(6, dtype=torch.float64), group_size=3)) <= 1e-9
    true_SS = flat_scores(model, logps(model, *data)) @ flat_scores(model, logps(model, *data)).T
    for moved in (0, 10**9):
        monkeypatch.setattr(gram, "MOVED", {"cuda": moved})
        for G in (1, 3, 6):
            with ScoreTape(model, "streamed") as tape:
                tape.record(logps(model, *data), gram=G)
            within = true_SS.view(6 // G, G, 6 // G, G).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            assert relative(tape.gram(), within) <= 1e-9


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("kept", [True, False])
def test_a_head_in_bfloat16_agrees_with_autograd(kept, monkeypatch):
    """With probabilities that are kept in bfloat16 or made again, of targets that are nearly sure."""
    monkeypatch.setattr(contributions, "CHUNK_ELEMENTS", 1 << 22 if kept else 1)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=False, dtype=torch.bfloat16)
    hidden_STC = (20 * torch.randn(8, 5, 16)).to(torch.bfloat16).requires_grad_()
    logits_STV = head(hidden_STC).float()
    target_ST = logits_STV.argmax(-1)
    theirs_ST = logits_STV.log_softmax(-1).gather(-1, target_ST[..., None])[..., 0]
    sure_ST = (theirs_ST.exp() > 0.99) & (theirs_ST.exp() < 0.9999)  # beyond, float32 itself loses 1 - p
    assert sure_ST.sum() > 4
    logp_ST = token_logps(head, hidden_STC, target_ST).logp_ST
    inputs = [hidden_STC, head.weight]
    ours, theirs = (torch.autograd.grad(logps_ST.sum(), inputs) for logps_ST in (logp_ST, theirs_ST))
    assert max(relative(*pair) for pair in zip(ours[0][sure_ST], theirs[0][sure_ST], strict=True)) <= 2**-6
    assert relative(ours[1], theirs[1]) <= 2**-7


@pytest.mark.usefixtures("as_on_cuda")
def test_both_ways_of_inner_products_are_taken(monkeypatch):
    """Many tokens are multiplied out, few are paired."""
    ways = []
    monkeypatch.setattr(gram, "of_dense", lambda parts, G: ways.append("dense") or torch.zeros(1, G, G))
    monkeypatch.setattr(gram, "_of_pairs", lambda part, G: ways.append("pairs") or torch.zeros(1, G, G))
    for T in (64, 2048):
        left, right = torch.zeros(8, 1, 1).expand(8, T, 2560), torch.zeros(8, 1, 1).expand(8, T, 2560)
        gram.gram_of_parts([contributions.Outer(left, right, 2560)], 8)
    assert ways == ["pairs", "dense"]


@pytest.mark.usefixtures("as_on_cuda")
def test_packed_rows(case):
    model, _ = case("qwen3-tied")
    sequence_BL, forward = packed()
    with ScoreTape(model) as tape:
        tape.record(forward(model), sequence_ids=sequence_BL)
    assert relative(tape.norm2(), oracle.norm2(model, forward(model))) <= 1e-10


def test_keys_that_repeat():
    keys_N = torch.tensor([7, 3, 7, 0, 3])
    key_N, slot_N = contributions.equal(keys_N)
    assert key_N.tolist() == [0, 3, 7, 0, 0]
    assert key_N[slot_N].equal(keys_N)


class Products(TorchDispatchMode):
    """Notes the products that run, by type and with their multiplications, and what makes the host wait."""

    def __init__(self):
        super().__init__()
        self.products, self.waits = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in {"_local_scalar_dense", "_unique2", "nonzero", "equal"}:
            self.waits.append(name)
            if name == "_local_scalar_dense":
                return False  # no gain is too small to divide by
        if name in {"mm", "bmm", "addmm", "baddbmm"}:
            first, second = args[-2:] if name.startswith(("add", "badd")) else args[:2]
            self.products.append((first.dtype, math.prod(first.shape) * second.shape[-1]))
            if func._overloadname.startswith("dtype"):  # a CPU has no such product
                return args[0].new_empty(*first.shape[:-1], second.shape[-1], dtype=torch.float32)
        return func(*args, **kwargs)

    def largest(self, dtype):
        return max((count for kind, count in self.products if kind == dtype), default=0)


S, T, WIDTH, VOCABULARY = 4, 64, 256, 2048


def fake(mode, run):
    """The products of a tape's or a plain step on fake tensors that claim to be on CUDA."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.float32 if mode == "autocast" else torch.bfloat16)
        model.eval()
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                rules._GAIN_OFFSETS[module] = 0.0  # found by looking at what it computes
        ids_ST = torch.zeros(S, T, dtype=torch.int64)

        def logps_S():
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                hidden = model.model(input_ids=ids_ST, use_cache=False).last_hidden_state
                return token_logps(model.lm_head, hidden[:, :-1], ids_ST[:, 1:]).logp_ST.sum(1)

        with Products() as seen:
            run(model, logps_S, seen)
    return seen


def taped(method):
    def run(model, logps_S, seen):
        with ScoreTape(model, method, check_rows=False) as tape:
            seen.waits.clear()  # one look at all gains
            tape.record(logps_S(), **({"gram": S} if method == "streamed" else {}))
        tape.norm2()
        if method == "streamed":
            tape.gram()
        else:
            tape.accumulate(torch.ones(S), S)

    return run


@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
@pytest.mark.parametrize("method", ["plain", "auto", "gram", "instantiate", "streamed"])
def test_products_are_of_the_type_that_autograd_would_take(method, mode, monkeypatch):
    """No float32 product is as large as a tenth of a layer's smallest; they are few; nothing waits for the device."""
    monkeypatch.setattr(FakeTensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata)

    def plain(model, logps_S, seen):
        logps_S().sum().backward()

    seen = fake(mode, plain if method == "plain" else taped(method))
    smallest = S * T * WIDTH * 128  # of the key projection
    assert seen.largest(torch.bfloat16) > smallest
    assert seen.largest(torch.float32) < smallest / 10
    assert len(seen.products) <= 6 * 8  # of seven matrices and the head: forward, backward, norms (3), gradient
    assert not seen.waits


def test_the_gradient_is_written_once(case, monkeypatch):
    """Where there is no `.grad`, the sum becomes it: it is no second tensor."""
    model, data = case("llama-untied")
    kept, add = [], ParameterPiece.add
    monkeypatch.setattr(ParameterPiece, "add", lambda piece, total: kept.append(total) or add(piece, total))
    with ScoreTape(model) as tape:
        tape.record(logps(model, *data))
    tape.accumulate(torch.ones(6, dtype=torch.float64), 3)
    totals = {total.data_ptr() for total in kept}
    assert totals == {parameter.grad.data_ptr() for parameter in model.parameters()}
