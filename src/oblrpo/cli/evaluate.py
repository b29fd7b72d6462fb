"""`oblrpo evaluate`: a model on benchmarks, or completions made elsewhere, graded."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from oblrpo.config import Mapping, PolicyConfig
from oblrpo.errors import InputError
from oblrpo.settings import flags_in


@dataclass(frozen=True)
class SamplingConfig:
    """How a model is asked, and its completions drawn."""

    samples: int = 1
    """Completions a problem."""
    prompt_template: str = ""
    """What is asked; {prompt} stands for the question. Empty: it and a request to put the answer in \\\\boxed{}."""
    chat: bool = False
    """Ask in the model's chat template, as a user."""
    system_prompt: str = ""
    """First message of the conversation."""
    chat_template_args: Mapping = field(default_factory=dict)
    """Further arguments of the chat template, such as '{enable_thinking: false}'."""
    temperature: float = 1.0
    """Sampling temperature; 0: the most probable token, always."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this probability."""
    max_completion_length: int = 2048
    """Longest completion, in tokens."""
    problems_per_batch: int = 16
    """Problems whose completions are drawn together."""
    seed: int = 0
    """Of the samples."""
    limit: int = 0
    """Take only the first so many problems of each benchmark; 0: all."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: the first GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights."""
    bf16: bool = False
    """Do arithmetic in bfloat16, as a policy trained with it has it."""
    attn_implementation: str = ""
    """Of transformers: sdpa, eager, flash_attention_2 ... Empty: its own choice."""
    trust_remote_code: bool = False
    """Let transformers run Python code that comes with the model."""
    output: str = "evaluations/latest"
    """Folder that keeps every completion. An evaluation that was stopped goes on there."""


@dataclass(frozen=True)
class EvaluateCommand:
    """avg@k, pass@k and maj@k on mathematical benchmarks, with 95 % intervals over problems.

    Examples: `oblrpo evaluate runs/demo/checkpoints/step_100 --benchmark gsm8k --data test.jsonl --samples 4`;
    `oblrpo evaluate Qwen/Qwen3-4B-Base --benchmark math500 amc23 --dtype bfloat16 --output evaluations/base`;
    `oblrpo evaluate --completions out.jsonl --benchmark math500 --data math500.jsonl --json`.
    """

    benchmark: tuple[str, ...]
    """gsm8k, math500, aime24, aime25, amc23, olympiadbench or minerva_math; several with a model."""
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = ""
    """Folder or hub name. None: grade `completions`."""
    completions: str = ""
    """JSONL file with rows {"index": row of the data, from 0, "completion": text}; equally many of every problem."""
    data: tuple[str, ...] = ()
    """One benchmark as published, JSONL; several files are read one after the other. None: from the hub."""
    regrade: bool = False
    """Draw nothing; grade again what `output` holds."""
    k: tuple[int, ...] = ()
    """Sizes for pass@k and maj@k. None: 1, 2, 4, ... and all completions of a problem."""
    json: bool = False
    """Print one JSON object instead of a table."""
    processes: int = 1
    """Worker processes that compare formulas."""
    seconds: float = 5.0
    """Longest time for one comparison; after it the answer counts as wrong, and as a timeout."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


def run(argv: list[str]) -> None:
    """`oblrpo evaluate`.

    Raises:
        InputError: settings that do not go together, or as what it calls raises.
    """
    command = tyro.cli(
        EvaluateCommand,
        args=argv,
        prog="oblrpo evaluate",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    _check(command, flags_in(argv))
    if command.completions:
        (result,) = results = [_grade(command, command.benchmark[0], Path(command.completions))]
        shown: dict[str, Any] = result
    else:
        results = _evaluate(command)
        shown = {"model": results[0]["settings"]["model"], "results": results}
    if command.json:
        print(json.dumps(shown))
        return
    from oblrpo.evaluation.completions import remarks, table

    for result in results:
        for key, value in result.get("settings", {}).items():
            print(f"{key:22} {value!r}")
    Console(markup=False).print(table(results))
    print(*map(remarks, results), sep="\n")


def _check(command: EvaluateCommand, flags: dict[str, str]) -> None:
    if command.completions and (command.model or command.regrade):
        raise InputError("completions are graded as they are; leave out the model and --regrade.")
    if command.regrade and command.model:
        raise InputError("--regrade draws nothing; leave out the model, or --regrade to draw what is missing.")
    if not command.completions and not command.model and not command.regrade:
        raise InputError("give a model to evaluate, a file with --completions, or --regrade to grade an output again.")
    if (command.data and len(command.benchmark) > 1) or (command.completions and len(command.benchmark) > 1):
        raise InputError(f"data and completions are of one benchmark, but {len(command.benchmark)} are named.")
    of_model = {each.name for each in fields(SamplingConfig)} - {"limit" if command.completions else "output"}
    if not command.model and (idle := [flag for name, flag in flags.items() if name in of_model]):
        raise InputError(f"completions that are there are graded as they are; leave out {', '.join(idle)}.")
    asked = command.sampling
    for key, value, least in (
        ("samples", asked.samples, 1),
        ("max_completion_length", asked.max_completion_length, 1),
        ("problems_per_batch", asked.problems_per_batch, 1),
        ("limit", asked.limit, 0),
        ("seed", asked.seed, 0),
        ("k", min(command.k, default=1), 1),
    ):
        if not least <= value < 2**31:
            raise InputError(f"{key} is {value}; it must be at least {least}.")
    if asked.temperature != 0 and not 1e-3 <= asked.temperature < float("inf"):
        raise InputError(f"temperature is {asked.temperature}; it must be 0 or at least 0.001.")
    if not 0 < asked.top_p <= 1:
        raise InputError("top_p must be above 0 and at most 1.")
    if command.model and max(command.k, default=1) > asked.samples:
        raise InputError(f"--k {max(command.k)}: with --samples {asked.samples} k must be from 1 to {asked.samples}.")


def _grade(command: EvaluateCommand, name: str, file: Path) -> dict[str, Any]:
    """Of a file of completions."""
    from oblrpo.evaluation.completions import evaluate_completions, read_completions
    from oblrpo.tasks.benchmarks import load_benchmark
    from oblrpo.tasks.grading import MathVerifier

    problems = load_benchmark(name, command.data)[: command.sampling.limit or None]
    completions = read_completions(file, len(problems))
    with MathVerifier(command.processes, command.seconds) as verifier:
        return evaluate_completions(name, problems, completions, verifier, command.k)


def _evaluate(command: EvaluateCommand) -> list[dict[str, Any]]:
    """Draw what is not there yet, and grade it; what is needed for that is there before anything is drawn.

    Raises:
        InputError: there is nothing to grade, or as what it calls raises.
    """
    from oblrpo.evaluation.completions import evaluate_completions, read_completions
    from oblrpo.evaluation.sampled import SavedCompletions, lengths
    from oblrpo.tasks.benchmarks import load_benchmark
    from oblrpo.tasks.grading import MathVerifier

    data = {name: load_benchmark(name, command.data) for name in command.benchmark}
    results = []
    with MathVerifier(command.processes, command.seconds) as verifier:
        policy = None if command.regrade else _load(command)
        for name, problems in data.items():
            saved = SavedCompletions(Path(command.sampling.output), name)
            if policy is not None:
                problems = problems[: command.sampling.limit or None]
                _draw(command, policy, name, problems, saved)
            rows = saved.rows()
            if not rows:
                raise InputError(f"{saved.file} holds no completions to grade; check --output.")
            settings = saved.settings()
            problems = problems[: settings.get("problems")]
            saved.check_questions(problems)
            completions = read_completions(saved.file, len(problems))
            result = evaluate_completions(name, problems, completions, verifier, command.k)
            results.append(result | lengths(rows) | {"settings": settings})
            saved.write_result(results[-1])
    return results


def _load(command: EvaluateCommand) -> Any:
    from transformers.utils import logging as transformers_logging

    from oblrpo.policy import load_policy

    transformers_logging.disable_progress_bar()
    asked = command.sampling
    config = PolicyConfig(
        model=command.model,
        chat=asked.chat,
        system_prompt=asked.system_prompt,
        chat_template_args=asked.chat_template_args,
        bf16=asked.bf16,
        dtype=asked.dtype,
        attn_implementation=asked.attn_implementation,
        device=asked.device,
        trust_remote_code=asked.trust_remote_code,
    )
    return load_policy(command.model, config, train=False)


def _draw(command: EvaluateCommand, policy: Any, name: str, problems: list[Any], saved: Any) -> None:
    from oblrpo.evaluation.sampled import Sampling, collect
    from oblrpo.tasks.benchmarks import TEMPLATE

    asked = command.sampling
    sampling = Sampling(
        asked.samples, asked.temperature, asked.top_p, asked.max_completion_length, asked.problems_per_batch, asked.seed
    )
    console = Console(stderr=True, markup=False, highlight=False)
    with console.status(name) as status:
        collect(
            policy,
            problems,
            asked.prompt_template or TEMPLATE,
            sampling,
            saved,
            lambda done, total: status.update(f"{name}: {done} of {total} problems"),
        )
