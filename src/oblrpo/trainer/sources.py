"""Digests of what a run learns from, by which a change is noticed before the run resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oblrpo.checksums import sum_of, sum_of_texts
from oblrpo.objects import PREFIX, as_stable_json
from oblrpo.rewards import Rewards
from oblrpo.settings import TrainConfig
from oblrpo.tasks import BENCHMARKS, DataTask, Task
from oblrpo.tasks.sources import is_hub_name, path_of
from oblrpo.trainer.demonstrations import Demonstration


def sources_of(config: TrainConfig, task: Task, rows: Sequence[Demonstration], rewards: Rewards) -> dict[str, str]:
    """Return the SHA-256 of all data, rewards and baselines that the settings name, by setting and name.

    Of a file it is that of its bytes, of a data set of the hub that of the problems and rows made of it, of a reward
    or a baseline that of the file it is written in. Rows of a Python program have theirs in the settings, in their
    word.
    """
    parts: dict[str, Sequence[Any]] = {"sft_data": rows}
    names = {"data": config.task.data, "eval_data": config.task.eval_data, "sft_data": config.warm_start.sft_data}
    if isinstance(task, DataTask):
        own_test = config.task.eval_data or (config.task.task in BENCHMARKS and not config.task.data)
        parts |= {"data": task.given, "eval_data": task.own}
        if config.task.task in BENCHMARKS:  # what is not named is the benchmark's own, from the hub
            names |= {name: names[name] or (config.task.task,) for name in ("data", "eval_data") if own_test}
    digests: dict[str, str] = {}
    files: dict[str, str] = {}
    for setting, given in names.items():
        for name in given:
            if name.startswith(PREFIX):
                continue
            if name in BENCHMARKS or (len(given) == 1 and is_hub_name(name)):
                rows_as_text = (json.dumps(as_stable_json(vars(row)), sort_keys=True) for row in parts[setting])
                digests[f"{setting} {name}"] = sum_of_texts(rows_as_text)
            else:
                digests[f"{setting} {name}"] = files[name] = files.get(name) or sum_of(path_of(name))
    baseline = config.algorithm.baseline
    if ":" in baseline:  # of the user's own
        digests[f"baseline {baseline}"] = sum_of(Path(baseline.rpartition(":")[0]))
    return digests | rewards.digests()
