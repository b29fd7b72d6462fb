"""On which families of the installed transformers the score tape is exact, in a table.

    python -m lab.benchmarks.families [FAMILY ...] [--csv FILE] [--markdown FILE] [--attention eager] [--position-ids]
                                  [--seconds 120]

Every causal-LM family, tiny, float64, random weights, against a loop of autograd, each in a process of its own. Norms,
group norms and gradient, on three batches: padded, as many rows as tokens, and one row without a mask. Exact means a
relative error below 1e-9 in all. With --position-ids the model is given every token's position in its own sequence, as
trainers do; families that take none are left out.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import io
import multiprocessing
import resource
import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lab.benchmarks.tiny import PAD, VOCABULARY, config_for, names
from oblrpo.scores import ScoreTape, UnsupportedModelError, oracle
from tests.scores.stay_double import StayDouble

EXACT = 1e-9
GIGABYTES = 6


class Verdict(NamedTuple):
    """What became of one family."""

    family: str
    verdict: str
    """exact, WRONG, refused, crashed, not run (the model alone does not run so), not built, takes no position_ids."""
    error: float | None
    """The worst relative error."""
    why: str


def build(family: str, attention: str) -> nn.Module:
    """The tiny model, with weights large enough that nothing is flat, and no gain, bias or scale at its default."""
    torch.manual_seed(0)
    try:
        model = _from_config(family, attention)
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        model = _from_config(family, "eager")  # no sdpa there
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.nan_to_num_().add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(std=0.1)
    return model


def _from_config(family: str, attention: str) -> nn.Module:
    config = config_for(family)
    config._attn_implementation = attention
    for part in vars(config).values():
        if isinstance(part, transformers.PretrainedConfig):
            part._attn_implementation = attention
            part._experts_implementation = "eager"
    config._experts_implementation = "eager"  # grouped_mm knows no float64
    model: nn.Module = AutoModelForCausalLM.from_config(config).double().eval()
    return model


Batch = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]
"""Tokens, their mask and their positions, as far as the model is given these."""


def logps(model: nn.Module, ids_ST: Tensor, mask_ST: Tensor | None, position_ST: Tensor | None = None) -> Tensor:
    """Log-probabilities of what follows the first three tokens, (S,)."""
    given = {} if mask_ST is None else {"attention_mask": mask_ST}
    given |= {} if position_ST is None else {"position_ids": position_ST}
    output: Any = model(input_ids=ids_ST, **given, use_cache=False)
    logits = output.logits if hasattr(output, "logits") else output[0]
    logp_ST = logits[:, 2:-1, :VOCABULARY].log_softmax(-1).gather(2, ids_ST[:, 3:, None])[..., 0]
    return logp_ST.sum(1) if mask_ST is None else (logp_ST * mask_ST[:, 3:]).sum(1)


def batches() -> dict[str, tuple[Tensor, Tensor | None]]:
    """Tokens and masks: prompts padded on the left, completions on the right."""
    torch.manual_seed(1)
    ids_ST, mask_ST = torch.randint(3, VOCABULARY, (4, 8)), torch.ones(4, 8, dtype=torch.long)
    for s in range(4):
        mask_ST[s, : s % 3] = 0
        mask_ST[s, 8 - s // 2 :] = 0
    square, row = torch.randint(3, VOCABULARY, (5, 5)), torch.randint(3, VOCABULARY, (1, 6))
    return {
        "padded": (ids_ST.masked_fill(mask_ST == 0, PAD), mask_ST),
        "as many rows as tokens": (square, torch.ones_like(square)),
        "one row": (row, None),
    }


def positioned() -> dict[str, Batch]:
    """The same with every token's position in its own sequence; of padding, the first or the last one."""
    found = dict[str, Batch]()
    for name, (ids_ST, mask_ST) in batches().items():
        counted_ST = torch.ones_like(ids_ST) if mask_ST is None else mask_ST
        found[name] = (ids_ST, mask_ST, (counted_ST.cumsum(1) - 1).clamp(min=0))
    return found


def compare(model: nn.Module, batch: Batch) -> float:
    """The largest relative error of norms, group norms and the gradient."""
    S = len(batch[0])
    coef_S, group = torch.randn(S, dtype=torch.float64), 2 if S % 2 == 0 else 1
    parameters = [p for p in model.parameters() if p.requires_grad]
    with ScoreTape(model) as tape:
        tape.record(logps(model, *batch))
    norm2_S, group_norm2 = tape.norm2(), tape.accumulate(coef_S, group)
    got = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    model.zero_grad()
    scores = oracle.scores(model, logps(model, *batch))
    errors, pairs = [], zip(got, zip(*scores, strict=True), strict=True)
    expected_S, expected_group = torch.zeros_like(norm2_S), torch.zeros_like(group_norm2)
    for ours, each in pairs:
        score_SN = torch.stack(each).flatten(1)
        weighted_SN = coef_S[:, None] * score_SN
        expected_S += score_SN.square().sum(1)
        expected_group += weighted_SN.unflatten(0, (-1, group)).sum(1).square().sum(1)
        errors.append((ours.flatten() - weighted_SN.sum(0), weighted_SN.sum(0)))
    floor = 1e-6 * max(float(expected.abs().max()) for _, expected in errors)  # of parameters that do not matter
    errors += [(norm2_S - expected_S, expected_S), (group_norm2 - expected_group, expected_group)]
    worst = [float(wrong.abs().max() / right.abs().max().clamp(min=floor)) for wrong, right in errors]
    return max(each if each == each else float("inf") for each in worst)


def judge(family: str, attention: str, position_ids: bool = False) -> Verdict:
    """Build the family and compare."""
    try:
        model = build(family, attention)
    except Exception as error:
        return Verdict(family, "not built", None, _sentence(error))
    if position_ids and "position_ids" not in inspect.signature(model.forward).parameters:
        return Verdict(family, "takes no position_ids", None, "")
    cases: dict[str, Any] = positioned() if position_ids else batches()
    with StayDouble():
        for batch in cases.values():
            try:
                value = logps(model, *batch)
                if not bool(value.isfinite().all()):
                    return Verdict(family, "not run", None, "the model gives NaN")
            except Exception as error:
                return Verdict(family, "not run", None, _sentence(error))
        worst = 0.0
        for name, batch in cases.items():
            try:
                worst = max(worst, compare(model, batch))
            except UnsupportedModelError as error:
                return Verdict(family, "refused", None, _sentence(error))
            except Exception as error:
                return Verdict(family, "crashed", None, f"{name}: {_sentence(error)}")
    return Verdict(family, "exact" if worst <= EXACT else "WRONG", worst, "")


def _sentence(error: Exception) -> str:
    return f"{'' if isinstance(error, UnsupportedModelError) else type(error).__name__ + ': '}{error}".split("\n")[0]


def _child(family: str, attention: str, position_ids: bool, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
    torch.set_num_threads(1)
    pipe.send(judge(family, attention, position_ids))


def in_a_process(family: str, attention: str, position_ids: bool, seconds: float) -> Verdict:
    """`judge` in a process that may end as it likes."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(family, attention, position_ids, its))
    process.start()
    its.close()
    try:
        if mine.poll(seconds):
            return mine.recv()  # type: ignore[no-any-return]
        return Verdict(family, "crashed", None, f"took more than {seconds:.0f} s")
    except EOFError:
        return Verdict(family, "crashed", None, "its process died")
    finally:
        process.kill()
        process.join()


def line(verdict: Verdict) -> str:
    """One family in a line."""
    error = "" if verdict.error is None else f"{verdict.error:.0e}"
    return f"{verdict.family}: {verdict.verdict} {error} {verdict.why}".strip()


def markdown(verdicts: list[Verdict]) -> str:
    """Two tables: how many and which, and why not."""
    lines = ["| tape | families | which |", "|---|---|---|"]
    for name, count in Counter(each.verdict for each in verdicts).most_common():
        which = ", ".join(each.family for each in verdicts if each.verdict == name)
        worst = max((each.error for each in verdicts if each.verdict == name and each.error is not None), default=None)
        lines.append(f"| {name}{'' if worst is None else f', to {worst:.0e}'} | {count} | {which} |")
    lines += ["", "| family | why not |", "|---|---|"]
    lines += [f"| {each.family} | {each.why.replace('|', '/')[:160]} |" for each in verdicts if each.why]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Sweep, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--csv")
    parser.add_argument("--markdown")
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--position-ids", action="store_true", help="give every token its position")
    parser.add_argument("--seconds", type=float, default=120.0, help="for one family")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    verdicts = []
    for family in args.families or names():
        verdicts.append(in_a_process(family, args.attention, args.position_ids, args.seconds))
        print(line(verdicts[-1]), file=sys.stderr, flush=True)
    print(markdown(verdicts))
    if args.markdown:
        with open(args.markdown, "w") as file:
            file.write(markdown(verdicts))
    if args.csv:
        table = io.StringIO()
        csv.writer(table).writerows([Verdict._fields, *verdicts])
        with open(args.csv, "w") as file:
            file.write(table.getvalue())


if __name__ == "__main__":
    main()
