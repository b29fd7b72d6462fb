"""A batch whose rows were recorded in several forwards: norms, group norms and gradient are those of one."""

import pytest
import torch

from oblrpo.scores import ScoreTape, oracle
from oblrpo.scores.tape import Run, Slice, in_slices
from tests.scores.models import batch, gradients, logps
from tests.scores.test_peft import adapt

SLICES = ([1, 4, 5], [0, 3], [2])  # of groups of 3, 1 and 2 rows: none of them is whole, and two slices lack one
SIZES = [3, 1, 2]
FAMILIES = [
    *(("qwen3-tied", method) for method in ("auto", "gram", "instantiate")),
    ("llama-tied-biased", "gram"),
    ("llama-untied", "gram"),
    ("gpt2-untied", "auto"),
    ("qwen3-moe-dense-first", "auto"),
    ("qwen2-moe-shared", "gram"),
    ("mixtral-untied", "instantiate"),
]


def record(tape, model, data, slices=SLICES):
    ids_ST, mask_ST, prompt, *positions = data
    with tape:
        for rows in slices:
            tape.record(logps(model, ids_ST[rows], mask_ST[rows], prompt, *positions), rows_S=torch.tensor(rows))
    return tape


def agrees_with_loop_autograd(model, data, method="auto", slices=SLICES, sizes=SIZES):
    coef_S = torch.randn(sum(sizes), dtype=torch.float64)
    for parameter in model.parameters():  # what is there is added to
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
    tape = record(ScoreTape(model, method), model, data, slices)
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, logps(model, *data)), rtol=1e-9, atol=1e-12)
    group_norm2_P = tape.accumulate(coef_S, sizes)
    ours = gradients(model)
    model.zero_grad()
    expected, start = [], 0
    for size in sizes:
        alone_S = torch.zeros_like(coef_S)
        alone_S[start : start + size] = coef_S[start : start + size]
        expected.append(oracle.accumulate(model, logps(model, *data), alone_S, len(coef_S))[0])
        start += size
    torch.testing.assert_close(group_norm2_P, torch.stack(expected), rtol=1e-9, atol=1e-12)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(ours[name] - 0.5, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "method"), FAMILIES)
def test_any_family_agrees_with_loop_autograd(case, name, method):
    agrees_with_loop_autograd(*case(name), method)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers for it
@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")  # about merging
@pytest.mark.usefixtures("stay_double")
def test_adapters_agree_with_loop_autograd():
    agrees_with_loop_autograd(adapt("gpt2-tied", lora_bias=True, bias="lora_only"), batch())


def test_slices_need_not_be_of_one_width(case):
    """Products are kept of the long slice, and factors of the short ones."""
    model, (ids_ST, mask_ST, prompt, _) = case("qwen2-tied", 6, 3, 40)
    mask_ST[SLICES[1] + SLICES[2], prompt + 2 :] = 0
    coef_S, tape = torch.randn(6, dtype=torch.float64), ScoreTape(model)
    with tape:
        for rows, width in zip(SLICES, (43, 5, 5), strict=True):
            part = ids_ST[rows, :width], mask_ST[rows, :width]
            tape.record(logps(model, *part, prompt), rows_S=torch.tensor(rows))
    norm2_S, group_norm2_P = tape.norm2(), tape.accumulate(coef_S, 2)
    ours = gradients(model)
    model.zero_grad()
    data = (ids_ST, mask_ST, prompt)
    torch.testing.assert_close(norm2_S, oracle.norm2(model, logps(model, *data)), rtol=1e-9, atol=1e-12)
    expected = oracle.accumulate(model, logps(model, *data), coef_S, 2)
    torch.testing.assert_close(group_norm2_P, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours, gradients(model), rtol=1e-9, atol=1e-12)


def test_what_slices_cannot_give_is_refused(case):
    model, data = case("qwen2-tied", dtype=torch.float32)
    for tape in (ScoreTape(model, "two_pass"), ScoreTape(model, "streamed")):
        assert not tape.takes_slices
        with pytest.raises(ValueError, match="records all rows of a batch in one forward"):
            record(tape, model, data)
    tape = ScoreTape(model)
    for slices in (SLICES[:2], (*SLICES, [2])):  # row 2 is missing, and there twice
        record(tape, model, data, slices)
        with pytest.raises(ValueError, match="not each row of a batch once"):
            tape.norm2()
        with pytest.raises(ValueError, match="not each row of a batch once"):
            tape.accumulate(torch.ones(sum(map(len, slices))), 1)
    record(tape, model, data)
    for refused in (tape.gram, lambda: tape.sketch(0)):
        with pytest.raises(ValueError, match="in several forwards"):
            refused()
    with tape:
        tape.record(logps(model, *data), rows_S=torch.arange(6))
        logps_S = logps(model, *data)
        with pytest.raises(ValueError, match="give rows_S each time"):
            tape.record(logps_S)


def test_groups_of_as_many_rows_are_one_run():
    slices = [Slice({}, torch.tensor([0, 4, 8, 1, 2, 3, 5, 6, 7])), Slice({}, torch.tensor([9, 10]))]
    mine, rest = in_slices(slices, [1, 3, 1, 3, 3])
    assert mine.runs == [Run(0, 1, [0, 2, 4]), Run(3, 3, [1, 3])]
    assert rest.runs == [Run(0, 2, [4])]
    assert mine.runs[1].of(slice(1, 4)) == (slice(3, 9), [0, 2])
    assert mine.runs[0].of(slice(1, 4)) == (slice(1, 2), [1])
    assert mine.runs[0].of(slice(3, 4))[1] == []


@pytest.mark.parametrize("elements", [1 << 22, 600, 1])  # all groups at a time, some, and one
@pytest.mark.parametrize(
    ("name", "method"), [("qwen2-tied", "gram"), ("qwen2-tied", "instantiate"), ("qwen3-untied-biased", "gram")]
)
def test_runs_of_several_groups_agree_with_loop_autograd(case, name, method, elements, monkeypatch):
    monkeypatch.setattr("oblrpo.scores.contributions.CHUNK_ELEMENTS", elements)
    slices = [0, 6, 4, 5, 9, 11], [3, 10, 1, 2, 7, 8]  # groups with as many rows in a slice are neighbours there
    agrees_with_loop_autograd(*case(name, 12), method, slices, [3] * 4)


def test_large_parameters_are_summed_group_by_group(case, monkeypatch):
    monkeypatch.setattr("oblrpo.scores.tape.ALONE", 1)
    for method in ("gram", "instantiate"):
        agrees_with_loop_autograd(*case("qwen2-tied"), method)
