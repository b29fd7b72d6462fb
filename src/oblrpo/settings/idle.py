"""When a setting has no effect: the conditions that annotate the fields of `train`."""

from __future__ import annotations

from typing import Any

from oblrpo.settings.annotations import Idle


def _benchmark(config: Any) -> bool:
    from oblrpo.tasks import BENCHMARKS

    return config.task.task in BENCHMARKS


def _generated(config: Any) -> bool:
    return not config.task.data and not _benchmark(config)


LOADED = Idle("a model that is loaded has its own sizes", lambda c: bool(c.policy.model))
BUILT = Idle("no model is loaded", lambda c: not c.policy.model)
NO_WARM_START = Idle("warm_start_steps is 0", lambda c: not c.warm_start.begins)
FROM_ROWS = Idle("sft_data are learned as they are", lambda c: bool(c.warm_start.sft_data))
OWN_DATA = Idle("the problems come from data", lambda c: bool(c.task.data) and not _benchmark(c))
BENCHMARK = Idle("{task} names its columns itself", _benchmark)
GENERATED = Idle("the task '{task}' generates its problems", _generated)
BENCHMARK_PROMPT = Idle(BENCHMARK.why, lambda c: _benchmark(c) and not c.warm_start.sft_data)
GENERATED_PROMPT = Idle(GENERATED.why, lambda c: _generated(c) and not c.warm_start.sft_data)
OWN_TEST = Idle(  # eval_data, or the splits of a benchmark on the hub
    "held-out problems have a source of their own",
    lambda c: not _generated(c) and bool(c.task.eval_data or not c.task.data),
)
NO_PROJECTS = Idle(
    "neither wandb nor trackio is in report_to", lambda c: not {"wandb", "trackio"} & set(c.run.report_to)
)
ONE_UPDATE = Idle("every batch gets one update (num_iterations)", lambda c: c.algorithm.num_iterations == 1)
NO_VLLM = Idle("the sampler is transformers", lambda c: c.rollout.sampler != "vllm")
