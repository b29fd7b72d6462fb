"""Outputs of many prompts from one policy, with everything the statistics benchmarks ask of them."""

import argparse
from dataclasses import dataclass

import torch

from oblrpo import estimators
from oblrpo.estimators import BASELINES, NORMALISATIONS, Prior
from oblrpo.policy import load_policy
from oblrpo.rewards import Rewards
from oblrpo.rollout import sample
from oblrpo.scores import ScoreTape, Sketch
from oblrpo.settings import PolicyConfig, read_yaml
from oblrpo.tasks import make_task

LONGEST = {"path": 12, "addition": 24, "countdown": 24}
SKETCH = 4096


def arguments_of(description: str, **defaults: int | list[int]) -> argparse.Namespace:
    """The command line of a benchmark on one policy: MODEL, its task, a seed, and further ones with these defaults."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--task", default="path")
    parser.add_argument("--task-args", type=lambda text: read_yaml(text, "--task-args"), default={})
    parser.add_argument("--seed", type=int, default=0)
    for name, value in defaults.items():
        if value is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=int, default=value, nargs="+" if isinstance(value, list) else None)
    torch.set_num_threads(1)
    return parser.parse_args()


@dataclass
class Pool:
    """Q prompts with M outputs each; axes (Q, M, ...)."""

    policy: object
    sequences: list  # one `Sequences` of M rows a prompt
    rewards: torch.Tensor
    norm2: torch.Tensor
    length: torch.Tensor
    logit_norm2: torch.Tensor
    token_mask: torch.Tensor
    gram: torch.Tensor  # exact, within the prompt
    sketch: torch.Tensor


def draw(
    model: str, task_name: str, task_args: dict, prompts: int, outputs: int, seed: int, longest: int | None = None
) -> Pool:
    """Sample at most `longest` tokens, score, and take within-prompt Gram matrices and sketches of the scores."""
    longest = longest or LONGEST[task_name]
    policy = load_policy(model, PolicyConfig(device="cpu"))
    task = make_task(task_name, seed, **task_args)
    pay = Rewards(task)
    torch.manual_seed(seed)
    problems = [problem for step in range(1 + prompts // 32) for problem in task.train_batch(10_000 + step, 32)][
        :prompts
    ]
    rows, columns = [], []
    tape, spec = ScoreTape(policy.model, "streamed"), Sketch(seed, dimensions=SKETCH)
    for problem in problems:
        rollouts = sample(policy, [problem.prompt], outputs, longest, 1.0)
        ((rewards,), _) = pay([problem], rollouts.completions)
        with tape:
            out = policy.logps(rollouts.sequences, 1.0)
            tape.record(out.logps_S, gram=outputs, sketches=[spec])
        pad = (0, longest - out.token_logps_SC.shape[1])
        rows.append(rollouts.sequences)
        columns.append(
            (
                torch.tensor(rewards).double(),
                tape.norm2().double(),
                rollouts.sequences.lengths_S.double(),
                torch.nn.functional.pad(out.logit_norm2_SC, pad).double(),
                torch.nn.functional.pad(rollouts.sequences.own_SC, pad).double(),
                tape.gram()[0].double(),
                tape.sketch(*spec),
            )
        )
    return Pool(policy, rows, *(torch.stack(column) for column in zip(*columns, strict=True)))


def advantages(pool: Pool, name: str, part: slice, prior: Prior | None = None) -> torch.Tensor:
    """(F - b) over the normalisation, of the outputs `part` of every prompt as one batch; (Q, G) or (Q, G, T)."""
    entry, rewards = BASELINES[name], pool.rewards[:, part]
    inputs = {
        "norm2_PG": pool.norm2[:, part],
        "length_PG": pool.length[:, part],
        "logit_norm2_PGT": pool.logit_norm2[:, part],
        "token_mask_PGT": pool.token_mask[:, part],
    }
    baseline = estimators.baseline(name, rewards, prior=prior, **inputs)
    scale = 1 / NORMALISATIONS[entry.normalisation](rewards)
    return (rewards[..., None] - baseline) * scale[..., None] if entry.by_token else (rewards - baseline) * scale


def token_weighted(pool: Pool, weight: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Within-prompt Gram matrices and sketches of sum_t A_t grad log pi(o_t), weight (Q, M, T)."""
    tape, spec, grams, sketches = ScoreTape(pool.policy.model, "streamed"), Sketch(seed, dimensions=SKETCH), [], []
    for sequences, weight_MT in zip(pool.sequences, weight, strict=True):
        with tape:
            token_logps_SC = pool.policy.logps(sequences).token_logps_SC
            mask = sequences.own_SC
            weighted_SC = token_logps_SC * weight_MT[:, : token_logps_SC.shape[1]].to(token_logps_SC) * mask
            tape.record(weighted_SC.sum(1), gram=len(weighted_SC), sketches=[spec])
        grams.append(tape.gram()[0].double())
        sketches.append(tape.sketch(*spec))
    return torch.stack(grams), torch.stack(sketches)


def prior_of(pool: Pool, part: slice, strength: float | None) -> Prior:
    """A prior that has seen the outputs `part` of all prompts as two earlier steps (other prompts' too)."""
    prior = Prior(strength)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        prior.observe(pool.rewards[half, part], pool.norm2[half, part])
        prior.next_step()
    return prior
