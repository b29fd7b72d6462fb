"""The command line: parse, call, print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
import yaml
from rich.console import Console

from oblrpo import __version__
from oblrpo.config import BenchConfig, EvaluateConfig, TrainConfig
from oblrpo.errors import InputError, did_you_mean
from oblrpo.settings import flatten, load_recipe, with_settings

USAGE = """\
oblrpo: post-training of language models with the variance-optimal baseline and a signal-to-noise learning rate

  oblrpo train [RECIPE|FILE] [--any-setting VALUE ...]   train a policy; `oblrpo train --help` explains every setting
  oblrpo evaluate --completions FILE --benchmark NAME    grade completions of a benchmark: avg@k, pass@k, maj@k
  oblrpo report RUN                                      write RUN/report.html anew from what the run left behind
  oblrpo bench scores [--shape NAME ...]                 what score norms cost, beside every other way to have them
  oblrpo --version

Try `oblrpo train demo --output runs/demo`: in two minutes a small policy learns to find routes in graphs."""


@dataclass(frozen=True)
class TrainCommand:
    """Post-train a language model with reinforcement learning on verifiable rewards.

    Examples: `oblrpo train demo --output runs/demo`; `oblrpo train demo --algorithm grpo --seed 1 --output runs/grpo`;
    `oblrpo train my.yaml --dry-run`; `oblrpo train --resume --output runs/demo --steps 200`.
    """

    config: TrainConfig
    resume: bool = False
    """Go on with the run in `--output` from its latest checkpoint, under the settings it was started with."""
    dry_run: bool = False
    """Print the resolved settings, the parameter count and the batch sizes; write nothing."""


@dataclass(frozen=True)
class ReportCommand:
    """Write RUN/report.html from metrics.jsonl and completions/."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a run."""


def main() -> None:
    """Entry point of `oblrpo`.

    Raises:
        SystemExit: 2 after one sentence about what the user can mend, 130 when interrupted, 1 when nobody reads.
        RuntimeError: a fault of ours, or of a library.
    """
    try:
        dispatch(sys.argv[1:])
    except InputError as error:
        Console(stderr=True, soft_wrap=True).print(f"oblrpo: {error}", style="bold red", markup=False, highlight=False)
        raise SystemExit(2) from None
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        print(
            f"oblrpo: out of memory ({str(error).splitlines()[0][:200]}); lower prompts_per_micro_batch, "
            "prompts_per_step, max_completion_length or the model's size.",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except BrokenPipeError:  # `oblrpo train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt as stop:
        print(f"oblrpo: {stop or 'interrupted.'}", file=sys.stderr)
        raise SystemExit(130) from None


def dispatch(argv: list[str]) -> None:
    """Run one command.

    Raises:
        InputError: the command is unknown, or as the command raises.
    """
    commands: dict[str, Callable[[list[str]], None]] = {
        "train": train,
        "evaluate": evaluate,
        "report": report,
        "bench": bench,
    }
    if not argv or argv[0] in {"-h", "--help"}:
        print(USAGE)
    elif argv[0] == "--version":
        print(__version__)
    elif argv[0] in commands:
        commands[argv[0]](argv[1:])
    else:
        raise InputError(f"unknown command {argv[0]!r}; choose one of: {', '.join(commands)}.")


def train(argv: list[str]) -> None:
    """`oblrpo train`."""
    command = _parse_train(argv, TrainConfig())
    # What the flags override comes from the recipe, or from the run to be resumed; then the flags are read again.
    if command.config.recipe:
        command = _parse_train(argv, load_recipe(command.config.recipe, TrainConfig()))
    if command.resume:
        from oblrpo.runs import RunFolder

        output = command.config.run.output
        saved = RunFolder(Path(output)).saved_config()
        command = _parse_train(argv, with_settings(saved, {"output": output}, "--output"))
    from transformers.utils import logging as transformers_logging

    from oblrpo.trainer.loop import Trainer  # torch and transformers load only now: --help is instant
    from oblrpo.trainer.progress import Progress, summary

    transformers_logging.disable_progress_bar()
    console = Console(soft_wrap=True, markup=False)
    trainer = Trainer(command.config, command.resume)
    if command.dry_run:
        print(yaml.safe_dump(flatten(command.config), sort_keys=False) + "\n" + trainer.describe())
        return
    with Progress(console) as progress:
        trainer.run(progress)
    _write_report(trainer.folder.path)
    rows, config = trainer.folder.read_metrics(), command.config
    print(summary(rows, config.run.output, config.rollout.prompts_per_step))


def evaluate(argv: list[str]) -> None:
    """`oblrpo evaluate`."""
    config = tyro.cli(EvaluateConfig, args=argv, prog="oblrpo evaluate")
    from oblrpo.evaluate.completions import evaluate_completions, read_completions, table
    from oblrpo.tasks.benchmarks import load_benchmark
    from oblrpo.tasks.grading import MathVerifier

    problems = load_benchmark(config.benchmark, config.data)
    completions = read_completions(Path(config.completions), len(problems))
    with MathVerifier(config.processes, config.seconds) as verifier:
        result = evaluate_completions(config.benchmark, problems, completions, verifier, config.k)
    if config.json:
        print(json.dumps(result))
    else:
        Console(markup=False).print(table(result))


def report(argv: list[str]) -> None:
    """`oblrpo report`."""
    command = tyro.cli(ReportCommand, args=argv, prog="oblrpo report")
    print(_write_report(Path(command.run)))


def bench(argv: list[str]) -> None:
    """`oblrpo bench`."""
    config = tyro.cli(BenchConfig, args=argv, prog="oblrpo bench")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the memory meter's profiler is talkative
    from oblrpo.bench.tables import print_tables

    print_tables(config)


def _write_report(run: Path) -> Path:
    from oblrpo.report import write_report

    return write_report(run)


def _parse_train(argv: list[str], base: TrainConfig) -> TrainCommand:
    flat = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    command, unknown = tyro.cli(
        TrainCommand,
        args=argv,
        prog="oblrpo train",
        default=TrainCommand(config=base),
        config=flat,
        return_unknown_args=True,
    )
    if unknown:
        flags = [f"--{key.replace('_', '-')}" for key in flatten(base)]
        raise InputError(
            f"unknown argument {unknown[0]!r}; see `oblrpo train --help`.{did_you_mean(unknown[0], flags)}"
        )
    return command
