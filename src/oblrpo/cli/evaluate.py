"""`oblrpo evaluate`: a model on benchmarks or on rows of data, or completions made elsewhere, graded."""

import json
import os
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from oblrpo.cli.flags import parse
from oblrpo.commands import check_evaluation, check_kept, evaluate_rows
from oblrpo.errors import InputError
from oblrpo.objects import Objects
from oblrpo.runs import checkpoint_of, run_of
from oblrpo.settings import Positional, RewardsConfig, SamplingConfig, TrainConfig, as_in_run, check_sampling, flags_in


@dataclass(frozen=True)
class EvaluateCommand:
    """avg@k, pass@k and maj@k with 95 % intervals over problems: on mathematical benchmarks, or by rewards on any rows.

    A checkpoint (the newest if a run is named) is evaluated with its run's settings and rewards, and without `--data`
    on the run's held-out problems. On a benchmark only the run's chat settings apply.

    Examples: `oblrpo evaluate runs/demo`; `oblrpo evaluate runs/demo/checkpoints/step_100`;
    `oblrpo evaluate runs/mine/checkpoints/step_100 --data test.jsonl --rewards numeric --samples 8`;
    `oblrpo evaluate Qwen/Qwen3-4B-Base --benchmark math500 amc23 --dtype bfloat16 --output evaluations/base`;
    `oblrpo evaluate --completions out.jsonl --benchmark math500 --data math500.jsonl --json`.
    """

    model: Annotated[str, Positional("[MODEL]")] = ""
    """Folder or hub name of a model, or a run. None: grade `completions`."""
    benchmark: tuple[str, ...] = ()
    """gsm8k, math500, aime24, aime25, amc23, olympiadbench or minerva_math; several with a model. None: by rewards."""
    completions: str = ""
    """JSONL file with rows {"index": row of the data, from 0, "completion": text}; as many for each problem of a
    benchmark as for any other."""
    data: tuple[str, ...] = ()
    """Files, read one after another, or one data set of the hub: rows to evaluate by rewards, or one benchmark as
    published. None: the benchmark from the hub, or else the held-out problems of the model's run."""
    regrade: bool = False
    """Sample nothing; grade the completions in `output` again."""
    k: tuple[int, ...] = ()
    """Values of k for pass@k and maj@k. None: 1, 2, 4,... and the number of completions per problem."""
    json: bool = False
    """Print one JSON object instead of a table."""
    processes: int = 1
    """Worker processes that compare formulas of a benchmark."""
    seconds: float = 5.0
    """Time limit of one comparison; then the answer counts as wrong, and as a timeout."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    grading: RewardsConfig = field(default_factory=RewardsConfig)


def run(argv: list[str]) -> None:
    """`oblrpo evaluate`."""
    command, flags, started = parse(EvaluateCommand(), argv, "oblrpo evaluate"), flags_in(argv), None
    if (model := checkpoint_of(command.model)) and (started := run_of(model)):
        # The model's run has the settings that no flag sets.
        sampling, grading = as_in_run(started, bool(command.benchmark))
        command = parse(EvaluateCommand(sampling=sampling, grading=grading), argv, "oblrpo evaluate")
    _check(command, flags, started)
    sampling = check_sampling(command.sampling, command.k, flags, drawn=bool(model))
    sampling = replace(sampling, output=sampling.output or _folder_of(model))
    command = replace(command, model=model, sampling=sampling)
    if command.benchmark:
        results = _on_benchmarks(command)
    else:
        from oblrpo.report.console import evaluating

        policy, settings = _load(command) if model else None, (sampling, command.grading, Path(sampling.output))
        with evaluating() as show:
            results = [evaluate_rows(policy, command.data, started, *settings, ks=command.k, progress=show)]
    if command.json:
        of_model = None if command.completions else {"model": results[0]["settings"]["model"], "results": results}
        print(json.dumps(of_model or results[0]))
        return
    from oblrpo.evaluation.evaluate import remarks, table
    from oblrpo.report.html import seen

    for result in results:
        for key, value in result.get("settings", {}).items():
            if key != "notes":  # which stood at the start
                print(f"{key:22} {value!r}")
    Console(markup=False).print(table(results))
    print(*map(remarks, results), sep="\n")
    if not command.completions:
        print(f"completions and figures are in {seen(sampling.output)}")


def _folder_of(model: str) -> str:
    """Return where the completions of a model are kept: evaluations/demo-step_100, evaluations/Qwen-Qwen3-4B."""
    path = Path(os.path.normpath(model))
    path = path if path.name not in {"", ".."} else path.resolve()
    parts = [part for part in path.parts if part not in {path.anchor, "..", "runs", "models", "checkpoints"}]
    return str(Path("evaluations", "-".join(parts[-2:]) or "model"))


def _check(command: EvaluateCommand, flags: dict[str, str], started: TrainConfig | None) -> None:
    if command.completions and (command.model or command.regrade):
        raise InputError("--completions grades a file as it is; remove the model and --regrade.")
    if command.regrade and command.model:
        raise InputError("--regrade samples nothing; remove the model, or remove --regrade to sample what is missing.")
    if not command.completions and not command.model and not command.regrade:
        raise InputError("give a model to evaluate, a file with --completions, or --regrade to grade an output again.")
    if command.completions and not command.benchmark:
        raise InputError("--completions needs a benchmark; name it with --benchmark.")
    if (command.data or command.completions) and len(command.benchmark) > 1:
        raise InputError("--data and --completions belong to one benchmark; give each a command of its own.")
    if command.regrade and not command.sampling.output:
        raise InputError("--regrade needs the folder of the completions; name it with --output.")
    check_evaluation(flags, command.model, command.data, started, bool(command.benchmark))
    if started and not command.benchmark:
        check_kept(started, command.data, command.grading.rewards, Objects())
    of_model = {field.name for field in fields(SamplingConfig)} - {"limit" if command.completions else "output"}
    if not command.model and (idle := [flag for name, flag in flags.items() if name in of_model]):
        raise InputError(f"existing completions are graded as they are; remove {', '.join(idle)}.")


def _on_benchmarks(command: EvaluateCommand) -> list[dict[str, Any]]:
    """Grade a file of completions, or draw what is not there yet; what grading needs is there before that."""
    from oblrpo.evaluation.evaluate import BenchmarkGrader, batches_of, evaluate, read_completions
    from oblrpo.tasks.benchmarks import TEMPLATE, load_benchmark
    from oblrpo.tasks.grading import MathVerifier

    sampling = replace(command.sampling, prompt_template=command.sampling.prompt_template or TEMPLATE)
    data = {
        name: load_benchmark(name, command.data, template=sampling.prompt_template)[: sampling.limit or None]
        for name in command.benchmark
    }
    results = []
    with MathVerifier(command.processes, command.seconds) as verifier:
        if command.completions:
            [(name, problems)] = data.items()
            completions, grade = read_completions(Path(command.completions), len(problems)), BenchmarkGrader(verifier)
            batches = batches_of(problems, completions, sampling.problems_per_batch)
            graded = evaluate(batches, len(completions[0]), grade, command.k)
            return [{"benchmark": name} | graded.figures() | grade.figures(graded.ks)]
        from oblrpo.evaluation.sampled import SavedCompletions, evaluate_saved  # needs torch; grading a file does not
        from oblrpo.report.console import evaluating
        from oblrpo.rollout import make_sampler

        policy: Any = None if command.regrade else _load(command)
        sampler = cache(lambda: make_sampler(policy, sampling, sampling.trust_remote_code))
        for name, problems in data.items():
            saved, grade = SavedCompletions(Path(sampling.output), name), BenchmarkGrader(verifier)
            with evaluating(name) as show:
                graded, how_drawn = evaluate_saved(policy, sampler, problems, grade, sampling, saved, command.k, show)
            result = {"benchmark": name} | graded.figures() | grade.figures(graded.ks) | how_drawn
            results.append(result)
            saved.write_result(result)
    return results


def _load(command: EvaluateCommand) -> Any:
    from transformers.utils import logging as transformers_logging

    from oblrpo.policy import load_policy

    transformers_logging.disable_progress_bar()
    return load_policy(command.model, command.sampling.policy(command.model), train=False)
