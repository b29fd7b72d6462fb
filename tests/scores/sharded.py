"""On every rank: scores of models that FSDP2 shards, against loop autograd on a copy that is whole."""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

from oblrpo import estimators
from oblrpo.scores import ScoreTape, Sketch, UnsupportedModelError, oracle
from tests.scores.models import batch, logps
from tests.scores.zoo import build_family

SKETCH = Sketch(seed=3, directions=8, dimensions=512)


def shard(model):
    for layer in model.model.layers:
        fully_shard(layer)
    if not model.config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens)
    fully_shard(model)


def worst(got, expected):
    return ((got - expected).abs() / expected.abs()).max().item()


def errors(name, checkpointing):
    torch.manual_seed(0)
    model = build_family(name)
    whole = copy.deepcopy(model)
    shard(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    torch.manual_seed(1 + dist.get_rank())  # other sequences on each rank
    data = batch(4)
    score_SN = torch.stack([torch.cat([g.flatten() for g in row]) for row in oracle.scores(whole, logps(whole, *data))])
    with ScoreTape(whole) as tape:
        tape.record(logps(whole, *data), sketches=[SKETCH])
    expected_sketch = tape.sketch(*SKETCH)
    result = {}
    for method in ("auto", "streamed"):
        tape = ScoreTape(model, method)
        with tape:
            tape.record(logps(model, *data), gram=2, sketches=[SKETCH])
        result[method] = worst(tape.norm2(), score_SN.square().sum(1))
        score_PGN = score_SN.unflatten(0, (-1, 2))
        result[f"{method} gram"] = worst(tape.gram(), score_PGN @ score_PGN.mT)
        result[f"{method} sketch"] = ((tape.sketch(*SKETCH) - expected_sketch).abs().max()).item()
    result["untouched"] = all(p.grad is None for p in model.parameters())

    (logps(model, *data).sum()).backward()  # FSDP goes on as if nothing had been recorded
    gradient = score_SN.sum(0)
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
    found = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    result["gradient"] = ((found - gradient).norm() / gradient.norm()).item()
    norm2 = estimators.squared_norm(list(model.parameters()))
    result["squared_norm"] = abs(norm2 / gradient.square().sum().item() - 1)
    try:
        tape.accumulate(torch.ones(4))
        result["accumulate"] = "accepted"
    except ValueError as error:
        result["accumulate"] = str(error)
    return result


class Around(torch.nn.Module):
    """Uses its head's weight beside calling the head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.head(self.body(x)) + x @ self.head.weight.T


def refusal():
    """What the tape says of a gathered weight that is used around its module."""
    model = Around()
    fully_shard(model)
    with ScoreTape(model, "streamed") as tape:
        output = model(torch.randn(2, 5, 4))
        try:
            tape.record(output.sum((1, 2)))
        except UnsupportedModelError as error:
            return str(error)
    return "accepted"


def adapters_of_experts():
    """The norms' worst error with adapters of experts and routers, which have no call of their own."""
    torch.manual_seed(0)
    model = get_peft_model(
        build_family("qwen3-moe-normalised"), LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear")
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    whole, data = copy.deepcopy(model), batch(4)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with ScoreTape(model, "streamed") as tape:
        tape.record(logps(model, *data))
    return worst(tape.norm2(), oracle.norm2(whole, logps(whole, *data)))


def main(folder, rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet_{ranks}", rank=rank, world_size=ranks)
    results = {
        f"{name}{', checkpointed' if checkpointing else ''}": errors(name, checkpointing)
        for name in ("qwen3-tied", "qwen3-untied-biased")
        for checkpointing in (False, True)
    }
    found = {"models": results, "refusal": refusal(), "adapters of experts": adapters_of_experts()}
    Path(folder, f"{ranks}_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
