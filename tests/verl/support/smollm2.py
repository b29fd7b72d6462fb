"""A few steps on a real model with Ray on the CPU: `python -m tests.verl.support.smollm2 FOLDER [STEPS]` (about 6 GB).

Sums of two numbers below ten, 4 prompts x 4 outputs of up to 12 tokens, calibrated weights, the measured rate.
"""

import json
import random
import sys
import time
from pathlib import Path

from tests.verl.support import launch
from tests.verl.support.learning import SHRUNK

MODEL = launch.ROOT / "models" / "smollm2-135m-instruct"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SHOWN = [
    "critic/score/mean",
    "response_length/mean",
    "actor/lr_used",
    "actor/step_kl",
    "actor/n_snr",
    "actor/trace_cov",
    "critic/score_norm2/agreement_calibrated",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/old_log_prob",
    "timing_s/update_actor",
]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **unused):
    """1 where the answer stands in the text, less a little for every character beside it."""
    return float(ground_truth in solution_str) - 0.01 * len(solution_str.strip())


def make_sums(folder: Path, rows: int) -> None:
    """Questions, the same every time."""
    import pandas

    rng = random.Random("sums")
    records = []
    for index in range(rows):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        records.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number alone."}],
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": index},
            }
        )
    pandas.DataFrame(records).to_parquet(folder / "train.parquet")


def main(folder: Path, steps: int, model: Path) -> None:
    """Run and print what verl logged of every step."""
    folder.mkdir(parents=True, exist_ok=True)
    make_sums(folder, 4 * steps)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    changes = SHRUNK | {
        "+oblrpo.calibration_steps": 4,
        "+oblrpo.calibration_share": 0.5,
        "actor_rollout_ref.model.path": model,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 12,
        f"{ROLLOUT}.n": 4,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4,
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
        f"{ACTOR}.optim.lr": 1e-6,
        "reward.custom_reward_function.path": Path(__file__).resolve(),
    }
    began = time.time()
    code, printed = launch.run(folder, 1, steps, timeout=3600, **changes)
    print(f"exit code {code} after {time.time() - began:.0f} s")
    if code:
        print(printed[-3000:])
    for step, line in sorted(launch.metrics(folder).items()):
        print(json.dumps({"step": step} | {key: float(f"{line[key]:.3g}") for key in SHOWN if key in line}))


if __name__ == "__main__":
    found = Path(sys.argv[3]) if len(sys.argv) > 3 else MODEL
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 6, found)
