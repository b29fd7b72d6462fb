"""The command line: parse, call, print."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
import yaml
from rich.console import Console

from oblrpo import __version__
from oblrpo.config import BenchConfig, PolicyConfig, RolloutConfig, TaskConfig, TrainConfig
from oblrpo.errors import InputError, did_you_mean
from oblrpo.settings import flatten, load_recipe, with_settings

USAGE = """\
oblrpo: post-training of language models with the variance-optimal baseline and a signal-to-noise learning rate

  oblrpo train [RECIPE|FILE] [--any-setting VALUE ...]   train a policy; `oblrpo train --help` explains every setting
  oblrpo report RUN                                      write RUN/report.html anew from what the run left behind
  oblrpo bench scores [--shape NAME ...]                 what score norms cost, beside every other way to have them
  oblrpo theory [--output FILE]                          every theorem on policies that can be enumerated
  oblrpo probe RUN|MODEL                                 local smoothness of a real objective, and what rate it supports
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


@dataclass(frozen=True)
class TheoryCommand:
    """Compute every assumption and theorem of the paper on policies small enough to enumerate, in about a minute.

    Prints what is claimed, what comes out, and the verdict; writes a page with the plots.
    """

    output: str = "theory.html"
    """The page."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class ProbeModelConfig:
    """Where the target is a model: what it is probed on. A run knows its own, and refuses these."""

    task: TaskConfig = field(default_factory=TaskConfig)
    max_completion_length: int = 512
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature."""
    prompts_per_micro_batch: int = 0
    """Prompts whose completions are scored at a time; 0: all."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: the first GPU if there is one."""
    trust_remote_code: bool = False
    """Let transformers run Python code that comes with the model."""


@dataclass(frozen=True)
class ProbeCommand:
    """Measure the local smoothness of the objective around a run's checkpoints, or around any model.

    For each checkpoint: the largest curvature of J (Hessian-vector products), the learning rate 1 / c that it implies,
    and, along the update that the run makes next, curvature, secant, and predicted against realised improvement.
    Examples: `oblrpo probe runs/demo`; `oblrpo probe path/to/model --task path --max-completion-length 12`.
    """

    target: Annotated[str, tyro.conf.Positional]
    """Folder of a run, or a model: folder or hub name."""
    prompts: int = 128
    """Prompts of each of two independent batches."""
    outputs: int = 8
    """Completions a prompt."""
    iterations: int = 12
    """Hessian-vector products to find the direction of largest curvature."""
    probe_seed: int = 0
    """Of samples and the first direction."""
    of_model: ProbeModelConfig = field(default_factory=ProbeModelConfig)


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
        "train": train, "report": report, "bench": bench, "theory": theory, "probe": probe
    }  # fmt: skip
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


def theory(argv: list[str]) -> None:
    """`oblrpo theory`.

    Raises:
        InputError: the page cannot be written.
    """
    command = tyro.cli(TheoryCommand, args=argv, prog="oblrpo theory")
    output = Path(command.output)
    if command.threads < 1:
        raise InputError(f"threads is {command.threads}; it must be at least 1.")
    if output.is_dir() or not output.parent.is_dir():
        raise InputError(f"cannot write the page to {output}; give a file in a folder that is there.")
    import torch

    from oblrpo.theory import run_all
    from oblrpo.theory.page import print_table, write_page

    torch.set_num_threads(command.threads)
    started = time.perf_counter()
    progress = Console(stderr=True, markup=False, highlight=False)
    findings = run_all(lambda text: progress.print(f"{time.perf_counter() - started:5.1f} s  {text}"))
    seconds = time.perf_counter() - started
    print_table(findings.claims, Console(markup=False, highlight=False))
    write_page(findings, output, seconds)
    held = sum(claim.holds for claim in findings.claims)
    count = len(findings.claims)
    print(f"\n{count} statements, {held} hold, {count - held} do not; {seconds:.0f} s; {output}")


def probe(argv: list[str]) -> None:
    """`oblrpo probe`.

    Raises:
        InputError: settings of a model given for a run, or as `probe_run` and `probe_model` raise.
    """
    command = tyro.cli(
        ProbeCommand,
        args=argv,
        prog="oblrpo probe",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    from transformers.utils import logging as transformers_logging

    from oblrpo.probe import Effort, print_place, probe_model, probe_run

    transformers_logging.disable_progress_bar()
    effort = Effort(command.prompts, command.outputs, command.iterations, command.probe_seed)
    target = Path(command.target)
    asked = command.of_model
    if (target / "config.yaml").is_file():
        if asked != ProbeModelConfig():
            raise InputError(
                f"{target} is a run, which knows its task, model and sampling; leave out settings of them."
            )
        places = probe_run(target, effort)
    else:
        config = TrainConfig(
            task=asked.task,
            policy=PolicyConfig(model=command.target, device=asked.device, trust_remote_code=asked.trust_remote_code),
            rollout=RolloutConfig(
                num_generations=command.outputs,
                max_completion_length=asked.max_completion_length,
                temperature=asked.temperature,
                prompts_per_micro_batch=asked.prompts_per_micro_batch,
            ),
        )
        places = iter([probe_model(config, effort)])
    for place in places:
        print_place(place)


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
