"""Rewards that say nothing, in TRL: M3b and M3d. Needs TRL (`make env-trl`); its trainer has its defaults."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import PrinterCallback, TrainerCallback
from trl import RLOOConfig, RLOOTrainer

from lab.moving.outage import CONSTANTS, DOWN
from lab.moving.place import Figures, Place, drift, mean, rows
from oblrpo.adapters.trl import OBLRPOConfig, OBLRPOTrainer
from oblrpo.policy import Policy, make_policy
from oblrpo.settings import PolicyConfig

Reward = Callable[[int, list[str]], list[float]]
"""f(step, completions) -> rewards, steps from 1."""


class Keep(TrainerCallback):  # type: ignore[misc]
    """The weights after some steps."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps, self.kept = steps, dict[int, dict[str, Any]]()

    def on_step_end(self, _: Any, state: Any, *__: Any, model: Any = None, **___: Any) -> None:
        """Copy them."""
        if state.global_step in self.steps:
            self.kept[state.global_step] = copy.deepcopy(model.state_dict())


def built(seed: int, weights: dict[str, Any] | None = None) -> Policy:
    """The policy that a run begins with, or one of other weights; TRL wraps the forward of the model that it trains."""
    torch.manual_seed(seed)
    policy = make_policy(PolicyConfig(device="cpu"))
    policy.model.load_state_dict(weights or {}, strict=weights is not None)
    return policy


def train(
    at: Place, name: str, reward: Reward, steps: int, keep: tuple[int, ...], rloo: bool = False
) -> tuple[list[dict[str, Any]], dict[int, Policy]]:
    """The log of a run, step by step, and the policies that were kept."""
    output = at.folder / name
    shutil.rmtree(output, ignore_errors=True)
    policy, keeper = built(at.seed), Keep(keep)

    def rewarded(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        return reward(trainer_state.global_step + 1, completions)

    make_trainer, make_config = (RLOOTrainer, RLOOConfig) if rloo else (OBLRPOTrainer, OBLRPOConfig)
    # TRL's RLOO has its rate said; ours begins at TRL's default, and finds its own
    given: dict[str, Any] = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "beta": 0.0} if rloo else {}
    trainer = make_trainer(
        policy.model, rewarded, processing_class=policy.tokenizer, callbacks=[keeper],
        train_dataset=Dataset.from_dict({"prompt": [row["prompt"] for row in rows(500)]}),
        args=make_config(
            output_dir=str(output), seed=at.seed, max_steps=steps, num_generations=4, max_completion_length=16,
            gradient_accumulation_steps=8, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            logging_steps=1, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, **given,
        ),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [row for row in trainer.state.log_history if "reward" in row], {
        step: built(at.seed, weights) for step, weights in keeper.kept.items()
    }


def binary(completions: list[str]) -> list[float]:
    """1 for three lowercase letters or more; of a policy with random weights a fifth succeed."""
    return [float(sum(letter.islower() for letter in text) >= 3) for text in completions]


def upper(completions: list[str]) -> list[float]:
    """The number of characters beyond digits and signs, three of four at first; 13 of 16 earn the most, .65."""
    return [min(13, sum(letter > "@" for letter in text)) / 20 for text in completions]


def outage(at: Place) -> Figures:
    """M3b: every completion earns the same in steps 10 to 39, for three constants."""
    found: Figures = {}
    for constant in CONSTANTS:

        def reward(step: int, completions: list[str], constant: float = constant) -> list[float]:
            return [constant] * len(completions) if step in DOWN else binary(completions)

        log, kept = train(at, f"{constant:g}", reward, 60, (9, 39))
        rates = [float(row["learning_rate"]) for row in log]
        entropies = [float(row.get("entropy") or math.nan) for row in log]
        found |= {
            f"{constant:g}: updates": sum(rate > 0 for rate in rates[9:39]),
            f"{constant:g}: rate x": max(rates[9:39]) / rates[8],
            f"{constant:g}: nats a token": drift(kept[9], kept[39], at.seed),
            f"({constant:g}: rate after / before)": rates[41] / rates[8],
            f"({constant:g}: entropy before)": entropies[8],
            f"({constant:g}: entropy after)": entropies[40],
            f"({constant:g}: reward before)": mean([row["reward"] for row in log[6:9]]),
            f"({constant:g}: reward after)": mean([row["reward"] for row in log[55:60]]),
        }
    return found


def solved(at: Place) -> Figures:
    """M3d: a dense reward that is solved, so that all completions of a step earn alike from some step on."""
    found: Figures = {}
    for name in ("ours", "rloo"):
        log, kept = train(at, name, lambda _, completions: upper(completions), 80, (80,), rloo=name == "rloo")
        rates = [float(row["learning_rate"]) for row in log]
        alike = [row["frac_reward_zero_std"] == 1 for row in log]
        found |= {
            f"{name}: nats a completion from the start": 16 * drift(kept[80], built(at.seed), at.seed),
            f"({name}: reward)": mean([row["reward"] for row in log[-5:]]),
        }
        if name == "ours":
            found |= {
                "ours: steps in which all earn alike": sum(alike),
                "ours: updates in them": sum(same and rate > 0 for same, rate in zip(alike, rates, strict=True)),
                "ours: rate at step 10": rates[9],
                "ours: largest rate": max(rates),
            }
    return found
