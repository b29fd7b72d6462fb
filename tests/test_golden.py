"""Runs of every algorithm are what they were before the step was rewritten, to the last bit.

`tests/golden/` was written with `OBLRPO_GOLDEN=write`, by the code before, on one machine. Kept while that is done.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

import oblrpo

FOLDER = Path(__file__).parent / "golden"
MACHINE = FOLDER / "machine.txt"  # other processors and other torches round otherwise
REMOVED = {"variance/oblr_crossfit", "signal2/oblr_crossfit"}  # since the runs were written
TIMES, BUILT = {"step_time"}, {"model_args"}
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]

ALGORITHMS = ("oblrpo", "oblrpo_shrunk", "rloo", "grpo", "dr_grpo", "reinforce", "reinforce_pp", "opo", "vcpo", "js")
SCENARIOS = {
    "plain": {},
    "masked": {"on_reward_error": "mask", "eval_data": ROWS[:4]},
    "micro": {"prompts_per_micro_batch": 2},
    "tokens": {"tokens_per_micro_batch": 80},
    "twice": {"num_iterations": 2},
    "resumed": {},
    "lora": {"lora": {"r": 2}},
    "skip": {"train_on": "exact", "calibration_steps": 0},
}
FURTHER = {
    "drawn": {"algorithm": "oblrpo_shrunk", "train_on": "compute-optimal", "score_norms": "calibrated"},
    "drawn-rloo": {"algorithm": "rloo", "train_on": "compute-optimal"},
    "drawn-twice": {"algorithm": "grpo", "train_on": "compute-optimal", "num_iterations": 2},
    "calibrated": {"algorithm": "oblrpo", "score_norms": "calibrated", "calibration_steps": 2},
    "logit": {"algorithm": "oblrpo", "score_norms": "logit"},
    "beta": {"algorithm": "oblrpo_shrunk", "beta": 0.1},
    "beta-skip": {"algorithm": "rloo", "beta": 0.1},
    "ledger": {"algorithm": "oblrpo_shrunk", "ledger_steps": 1},
    "ledger-rloo-micro": {"algorithm": "rloo", "ledger_steps": 2, "prompts_per_micro_batch": 2},
    "dynamic": {"algorithm": "rloo", "dynamic_sampling": 3},
    "kl": {"algorithm": "rloo", "schedule": "kl"},
    "auto-grpo": {"algorithm": "grpo", "schedule": "auto"},
    "plugin": {"algorithm": "oblrpo", "schedule": "plugin"},
    "ppo": {"algorithm": "oblrpo_shrunk", "ratio": "ppo", "num_iterations": 3},
    "gspo": {"algorithm": "rloo", "ratio": "gspo", "num_iterations": 2},
    "cispo": {"algorithm": "oblrpo", "ratio": "cispo", "num_iterations": 2},
    "dppo": {"algorithm": "grpo", "ratio": "dppo", "num_iterations": 2},
    "none-ratio": {"algorithm": "oblrpo", "ratio": "none", "num_iterations": 2},
    "two-pass": {"algorithm": "oblrpo_shrunk", "score_method": "two_pass"},
    "instantiate": {"algorithm": "oblrpo_shrunk", "score_method": "instantiate"},
    "constant": {"algorithm": "oblrpo_shrunk", "weighting": "constant", "normalisation": "group_std"},
    "sgd-clip": {"algorithm": "oblrpo", "optimizer": "SGD", "max_grad_norm": 0.1, "lr_scheduler_type": "cosine"},
    "warmup": {"algorithm": "oblrpo", "warmup_steps": 3},
    "alone": {"algorithm": "oblrpo_shrunk", "num_generations": 1},
    "task": {"algorithm": "oblrpo_shrunk", "data": None, "task": "path"},
    "warm-start": {"algorithm": "rloo", "data": None, "task": "path", "warm_start_steps": 3},
    "checkpointing": {"algorithm": "oblrpo_shrunk", "gradient_checkpointing": True},
    "masked-micro-twice": {
        "algorithm": "oblrpo_shrunk", "on_reward_error": "mask", "eval_data": ROWS[:4], "prompts_per_micro_batch": 2,
        "num_iterations": 2,
    },
    "sampler": {"algorithm": "oblrpo_shrunk", "sampler_correction": "truncated", "ledger_steps": 1},
    "sampler-twice": {"algorithm": "grpo", "sampler_correction": "truncated", "num_iterations": 2},
    "sampler-none": {"algorithm": "rloo", "sampler_correction": "measured"},
}  # fmt: skip
CASES = {f"{name}-{kind}": {"algorithm": name, **given} for name in ALGORITHMS for kind, given in SCENARIOS.items()}
CASES |= FURTHER


def machine():
    """This processor and this torch."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model")]  # number and name
    return f"{names[:2]} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}\n"


def reward(prompts, completions, **columns):
    """Of the bytes of a completion, so that most outputs differ; some have no reward where that is asked for."""
    return [sum(map(ord, text)) % 5 / 4 for text in completions]


def sparse(prompts, completions, **columns):
    """Mostly 0, so that whole groups have nothing to teach."""
    return [float(sum(map(ord, text)) % 7 == 0) for text in completions]


def patchy(prompts, completions, **columns):
    """Every third is without a reward."""
    return [None if sum(map(ord, text)) % 3 == 0 else sum(map(ord, text)) % 5 / 4 for text in completions]


def result(name, folder):
    torch.set_num_threads(1)
    given = {"data": ROWS, "learning_rate": 3e-3, "prompts_per_step": 6, "num_generations": 4, "eval_prompts": 4,
             "max_completion_length": 8, "eval_samples": 1, "threads": 1, "calibration_steps": 2, "reward": reward,
             "model_args": {"hidden_size": 32, "num_hidden_layers": 2}} | CASES[name]  # fmt: skip
    if "on_reward_error" in given:
        given["reward"] = patchy
    if name.endswith("-skip"):
        given["reward"] = sparse
    if given["data"] is None:
        del given["data"], given["reward"]
    if "lora" in given:
        made = oblrpo.train(**given | {"lora": {}}, steps=0, output=str(folder / "base"), progress=False)
        made.policy.save(folder / "model")
        given = {key: value for key, value in given.items() if key not in BUILT} | {"model": str(folder / "model")}
    output = str(folder / "run")
    for steps, resume in ((2, False), (4, True)) if name.endswith("-resumed") else ((3, False),):
        run = oblrpo.train(**given, steps=steps, resume=resume, output=output, progress=False)
    weights = hashlib.sha256()
    for _, tensor in sorted(run.policy.model.state_dict().items()):
        weights.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    rows = [{key: value for key, value in row.items() if key not in TIMES} for row in run.metrics]
    texts = b"".join(file.read_bytes() for file in sorted((Path(output) / "completions").iterdir()))
    return {"weights": weights.hexdigest(), "completions": hashlib.sha256(texts).hexdigest(), "metrics": rows}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_what_it_was(name, tmp_path):
    if os.environ.get("OBLRPO_GOLDEN") != "write" and MACHINE.read_text() != machine():
        pytest.skip(f"the runs were made on another machine: {MACHINE.read_text().strip()}")
    now = json.loads(json.dumps(result(name, tmp_path)))
    if os.environ.get("OBLRPO_GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        MACHINE.write_text(machine())
        (FOLDER / f"{name}.json").write_text(json.dumps(now))
        return
    before = json.loads((FOLDER / f"{name}.json").read_text())
    expected = [{key: value for key, value in row.items() if key not in REMOVED} for row in before["metrics"]]
    assert now["metrics"] == expected
    assert now["completions"] == before["completions"]
    assert now["weights"] == before["weights"]
