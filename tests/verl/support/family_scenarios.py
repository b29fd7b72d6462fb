"""On every rank: verl's FSDP2 engine with our part on experts, hybrids and adapters, against loop autograd."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugins
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from lab.benchmarks.families import build
from oblrpo.errors import InputError
from oblrpo.policy import byte_tokenizer
from tests.verl.support.engine_scenarios import PLUGIN, check, make_engine
from tests.verl.support.ranks import answer
from tests.verl.support.task import qwen_like

HYBRIDS = ("qwen3_next", "falcon_h1", "lfm2")
FAMILIES = ("qwen3_moe", *HYBRIDS)
ROTATES = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
SIZES = {"vocab_size": 264, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
FORWARDS = {
    "attention": {"attention_dropout": 0.1},
    "lengths": {"rope_parameters": ROTATES | {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}},
}
"""What a config of Qwen3 may say by which forwards are random, or follow the longest row."""
ADAPTERS = {"qwen3": "all-linear", "qwen3_moe": "all-linear", "falcon_h1": ["q_proj", "v_proj"]}


def save(folder: Path) -> Path:
    """Tiny models of the families, each in a folder of its own, and adapters that are not zero."""
    tokenizer = qwen_like(byte_tokenizer())
    for family in ("qwen3", *FAMILIES):
        model = build(family, "sdpa").float()
        # As verl will have it: autograd gives the embedding of padding no gradient.
        model.config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder / family / "model")
        tokenizer.save_pretrained(folder / family / "model")
    for name, changes in FORWARDS.items():
        Qwen3ForCausalLM(Qwen3Config(**SIZES, **changes)).save_pretrained(folder / name / "model")
        tokenizer.save_pretrained(folder / name / "model")
    for family, modules in ADAPTERS.items():
        config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=modules)
        model = get_peft_model(build(family, "sdpa").float(), config)
        with torch.no_grad():
            for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                parameter.normal_(std=0.2)
        model.save_pretrained(folder / family / "adapter")
    return folder


def refusal(folder, packed=False, adapter=None):
    """What is said before anything is sampled."""
    try:
        make_engine(f"{folder}/model", PLUGIN, packed, adapter=adapter)
    except InputError as error:
        return str(error)
    return "taken"


def taken_or_refused(folder, adapter):
    """Errors where the tape takes the model, and else what is said."""
    said = refusal(folder, adapter=adapter)
    return check(folder, adapter=adapter) if said == "taken" else said


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    scenarios = {family: partial(check, f"{folder}/{family}") for family in FAMILIES}
    scenarios |= {f"{family}, packed": partial(refusal, f"{folder}/{family}", True) for family in HYBRIDS}
    scenarios |= {name: partial(refusal, f"{folder}/{name}") for name in FORWARDS}
    scenarios["lengths, packed"] = partial(refusal, f"{folder}/lengths", True)
    qwen3, moe, falcon = (f"{folder}/{family}" for family in ADAPTERS)
    scenarios["qwen3_moe, packed"] = partial(check, moe, True)
    scenarios["adapters"] = partial(check, qwen3, adapter=f"{qwen3}/adapter")
    scenarios["adapters of experts"] = partial(taken_or_refused, moe, f"{moe}/adapter")
    scenarios["adapters of a hybrid, packed"] = partial(refusal, falcon, True, f"{falcon}/adapter")
    results = {}
    for name, scenario in scenarios.items():
        began = time.time()
        results[name] = scenario()
        print(os.environ["RANK"], name, f"{time.time() - began:.1f} s", results[name], flush=True)
    answer(folder, results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
