"""The ledger's prediction of the batch gradient's variance against brute force: many independent batches.

    python -m lab.benchmarks.ledger MODEL [--task path] [--batches 200] [--prompts 16] [--outputs 4] [--projected]

Each batch has an entry of every baseline. The mean entry is set against the variance of the gradients of all
batches, sum_b ||g_b - mean||^2 / (B - 1); 95 % intervals over batches, and the paired difference in standard errors.
Prompts differ from batch to batch. The last line is the ledger's time over that of a plain gradient (forward and
backward) of the same batch, median over batches. With --projected inner products come from sketches, as in runs.
"""

import statistics
import time

import torch

from lab.benchmarks.pool import LONGEST, arguments_of
from oblrpo import estimators
from oblrpo.estimators import BASELINES, NORMALISATIONS, Prior
from oblrpo.intervals import Z95
from oblrpo.policy import load_policy
from oblrpo.policy.sequences import MicroBatches
from oblrpo.rewards import Rewards
from oblrpo.rollout import sample
from oblrpo.scores import ScoreTape
from oblrpo.settings import PolicyConfig
from oblrpo.step import Batch
from oblrpo.step.flow import ImportanceWeights
from oblrpo.step.look import Looks
from oblrpo.tables.algorithms import RATIOS
from oblrpo.tasks import make_task


def gradient(policy) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in policy.parameters]).double()
    policy.model.zero_grad()
    return flat


def gradients(policy, sequences, rewards_PG: torch.Tensor, names: list[str]) -> dict[str, torch.Tensor]:
    """The batch gradient under each baseline."""
    P, G = rewards_PG.shape
    tape, token_tape, found = ScoreTape(policy.model), ScoreTape(policy.model), {}
    with tape:
        out = policy.logps(sequences)
        tape.record(out.logps_S)
    mask_SC = sequences.own_SC
    inputs = {
        "norm2_PG": tape.norm2().view(P, G),
        "length_PG": sequences.lengths_S.view(P, G),
        "logit_norm2_PGT": out.logit_norm2_SC.view(P, G, -1),
        "token_mask_PGT": mask_SC.view(P, G, -1),
    }
    for name in names:
        baseline = estimators.baseline(name, rewards_PG, prior=Prior(), **inputs)
        scale_PG = 1 / NORMALISATIONS[BASELINES[name].normalisation](rewards_PG) / (P * G)
        if BASELINES[name].by_token:
            with token_tape:
                token_logps_SC = policy.logps(sequences).token_logps_SC
                token_tape.record((token_logps_SC * (rewards_PG[..., None] - baseline).flatten(0, 1) * mask_SC).sum(1))
            token_tape.accumulate(scale_PG.flatten())
        else:
            tape.accumulate(((rewards_PG - baseline) * scale_PG).flatten())
        found[name] = gradient(policy)
    return found


def main() -> None:
    arguments = arguments_of(__doc__, batches=200, prompts=16, outputs=4, projected=False)
    started = time.perf_counter()
    policy = load_policy(arguments.model, PolicyConfig(device="cpu"))
    task = make_task(arguments.task, arguments.seed, **arguments.task_args)
    pay = Rewards(task)
    torch.manual_seed(arguments.seed)
    looks = Looks(policy, 1.0, MicroBatches(), exact=not arguments.projected)
    P, G, B = arguments.prompts, arguments.outputs, arguments.batches
    predicted, seen, costs, on_policy = {}, {}, [], ImportanceWeights(RATIOS["none"])
    for batch in range(B):
        problems = task.train_batch(20_000 + batch, P)
        rollouts = sample(policy, [problem.prompt for problem in problems], G, LONGEST[task.name], 1.0)
        rewards_PG = torch.tensor(pay(problems, rollouts.completions)[0])
        begun = time.perf_counter()
        policy.logps(rollouts.sequences).logps_S.sum().backward()
        policy.model.zero_grad()
        between = time.perf_counter()
        looked = looks.at(of := Batch.of(rollouts.sequences, rewards_PG), torch.arange(P), batch)
        ledger = looks.ledger(looked, of, Prior(), on_policy)
        costs.append((time.perf_counter() - between) / (between - begun))
        for name, entry in ledger.entries.items():
            predicted.setdefault(name, []).append(entry.variance)
        for name, flat in gradients(policy, rollouts.sequences, rewards_PG, list(ledger.entries)).items():
            seen.setdefault(name, []).append(flat.float())
    print(f"{arguments.model}: {B} batches of {P} prompts x {G} outputs, seed {arguments.seed}\n")
    print("| baseline | predicted | brute force | difference (standard errors) |\n|---|---|---|---|")
    for name, values in predicted.items():
        ours = torch.tensor(values, dtype=torch.float64)
        rows = torch.stack(seen.pop(name))
        deviation_B = (rows - rows.mean(0)).double().square().sum(1) * B / (B - 1)
        mean, error = ours.mean(), ours.std() / B**0.5
        brute, brute_error = deviation_B.mean(), deviation_B.std() / B**0.5
        difference_B = ours - deviation_B
        z = difference_B.mean() / (difference_B.std() / B**0.5)
        print(f"| {name} | {mean:.3f} +- {Z95 * error:.3f} | {brute:.3f} +- {Z95 * brute_error:.3f} | {z:+.1f} |")
    print(f"\na ledger takes {statistics.median(costs):.1f} times as long as a gradient")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
