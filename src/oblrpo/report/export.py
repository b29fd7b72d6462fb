"""A folder to share: the model of a run with its card, and nothing that only training needs."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError

from oblrpo.checksums import SUMS, read_sums
from oblrpo.errors import InputError
from oblrpo.objects import PREFIX
from oblrpo.report.html import seen
from oblrpo.report.record import PLACES, RunRecord, accuracy_margin, before_and_after, changed_settings, read_run
from oblrpo.runs import RunFolder, check_name, locked, sync_folder, write_atomically
from oblrpo.settings import RECIPES, PolicyConfig, TrainConfig, flatten, load_recipe, yaml_line, yaml_text
from oblrpo.tasks import BENCHMARKS
from oblrpo.tasks.sources import is_hub_name

AROUND = {"prompt_template": "a template", "chat": "the chat template", "system_prompt": "a system prompt"}
"""Settings that put something around a prompt."""


def model_card(record: RunRecord, step: int, name: str, base: str, adapters: bool) -> str:
    """Return the README.md of the model that a run had after a step, in Markdown.

    `base` is the model that was trained, if the hub has it, else empty; with `adapters` the folder holds its adapters.
    """
    settings = record.settings
    changed = {key: value for key, (value, _) in changed_settings(settings).items() if key not in PLACES}
    words = {key: value if isinstance(value, list) else [value] for key, value in changed.items()}
    objects = [key for key, of_key in words.items() for word in of_key if str(word).startswith(PREFIX)]
    card = ModelCard.from_template(
        _front(settings, base, adapters),
        template_str=(files("oblrpo.report") / "templates" / "card.md").read_text("utf-8"),
        name=name,
        base=base,
        adapters=adapters,
        settings=settings,
        model=str(settings.get("model") or ""),
        step=step,
        steps=record.integer("steps"),
        prompts=record.prompts,
        completions=record.integer("num_generations"),
        task_args=yaml_line(settings.get("task_args")),
        around=[words for key, words in AROUND.items() if settings.get(key)],
        is_benchmark=settings.get("task") in BENCHMARKS,
        about=record.about,
        measured=_accuracies(record, step),
        pairs=before_and_after(record.folder, [row for row in record.measured if row["step"] <= step]),
        objects=list(dict.fromkeys(objects)),
        command=_command(settings, changed),
        changed=yaml_text(changed),
        version=version("oblrpo"),
        PREFIX=PREFIX,
        text=_text,
        code=_code,
        cell=_cell,
        fenced=_fenced,
    )
    return seen(f"{card}\n")


def _front(settings: Mapping[str, Any], base: str, adapters: bool) -> ModelCardData:
    """What the hub reads of a card. A licence is not among it: only its owner can name one."""
    data = [
        source.split(":")[0].split("[")[0]
        for source in settings.get("data") or []
        if is_hub_name(source) and not source.startswith(PREFIX)
    ]
    return ModelCardData(
        base_model=base or None,
        datasets=data or None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "oblrpo", str(settings.get("algorithm"))],
    )


def _accuracies(record: RunRecord, step: int) -> list[tuple[str, float, float | None]]:
    """What was measured, the held-out accuracy and the margin of its 95 % interval, before and after."""
    measured = [row for row in record.measured if row["step"] <= step]
    before = record.rows[0].get("eval/accuracy_before_warm_start")
    lines: list[tuple[str, float, float | None]] = [("as loaded", before, None)] if before is not None else []
    for row, what in zip([*measured[:1], *measured[1:][-1:]], ("before RL", "last measured"), strict=False):
        lines.append((f"{what} (step {row['step']})", row["eval/accuracy"], accuracy_margin(row)))
    return lines if measured else []


def _text(name: str) -> str:
    """A name on a line of Markdown, without what Markdown and HTML would make of its characters."""
    return escape(re.sub(r"([\\`*\[\]!|~])", r"\\\1", " ".join(name.split())), quote=False)


def _code(value: Any) -> str:
    """A word or a few as code in a line, between more backticks than stand in a row in it."""
    words = " ".join(str(value).removeprefix(PREFIX).split())
    mark = "`" * (1 + max(map(len, re.findall("`+", words)), default=0))
    return f"{mark} {words} {mark}" if "`" in words else f"{mark}{words}{mark}"


LONGEST_CELL = 200  # the most characters of a text in a table


def _cell(text: str) -> str:
    """A text of anybody's as code in a table; of a long one both ends."""
    half = LONGEST_CELL // 2
    short = text if len(text) <= LONGEST_CELL else f"{text[:half]} … {text[-half:]}"
    return _code(short).replace("|", "\\|") if short.strip() else "(empty)"


def _fenced(text: str, language: str = "") -> str:
    """A block of code, fenced by more backticks than stand in a row in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _command(settings: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    """The command, from the recipe if it is one that everybody has."""
    recipe = str(settings.get("recipe") or "")
    if not (recipe and (RECIPES / f"{recipe}.yaml").is_file()):
        return shlex.join(["oblrpo", "train", *flags_of(changed)])
    try:
        of_recipe = flatten(load_recipe(recipe, TrainConfig()))
    except InputError:  # a recipe of another version
        of_recipe = {}
    differing = {
        key: value
        for key, value in settings.items()
        if key in of_recipe and value != of_recipe[key] and key not in PLACES
    }
    return shlex.join(["oblrpo", "train", recipe, *flags_of(differing)])


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the flags of `oblrpo train`."""
    flags = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        else:
            flags += [f"--{name}", yaml_line(value) if isinstance(value, dict) else str(value)]
    return flags


ADAPTERS = "adapter_config.json"
OF_LOADING = ("dtype", "load_in_4bit", "trust_remote_code")
"""The settings of a run under which the model beneath its adapters is loaded again."""
TRIES = 5  # how many checkpoints a run in progress may remove while they are copied


def export(run: Path, output: Path | None = None, step: int | None = None, merge: bool = False) -> Path:
    """Write the model of a run into a folder that transformers and the hub take as it is, with a model card.

    Return that folder, by default RUN/export, which must not be there yet. `step` is that of the checkpoint, the newest
    for None; `merge` adds adapters to the weights of their model.
    """
    record = read_run(run)
    if record is None:
        raise InputError(
            f"{run} holds no config.yaml and metrics.jsonl with a finished step; give the folder of a run."
        )
    checkpoint = record.folder.checkpoint(record.folder.reached(step))
    if merge and not (checkpoint / ADAPTERS).is_file() and checkpoint.is_dir():
        raise InputError(f"{checkpoint} holds a whole model, and no adapters to merge; leave out --merge.")
    output = run / "export" if output is None else output
    check_name(output)
    if os.path.lexists(output):
        raise InputError(f"{output} already exists; give another --output, or remove it.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with (
            locked(output, keep=False),
            TemporaryDirectory(prefix=".", suffix=".partial", dir=output.parent, ignore_cleanup_errors=True) as side,
        ):
            model, merged = Path(side) / "model", Path(side) / "merged"
            reached = _copy(record.folder, step, model)
            adapters = (model / ADAPTERS).is_file()
            base = _base(str(record.settings.get("model") or ""), model)
            if merge:
                from oblrpo.policy import load_policy  # torch and transformers load only now

                of_loading = {name: record.settings[name] for name in OF_LOADING if name in record.settings}
                whole = load_policy(str(model), PolicyConfig(**of_loading), train=False, dequantise=True)
                whole.save_merged(merged)
            shared, name = merged if merge else model, record.folder.path.resolve().name
            write_atomically(shared / "README.md", model_card(record, reached, name, base, adapters and not merge))
            sync_folder(shared)
            shared.rename(output)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", "") or error
        raise InputError(f"cannot export {run} to {output}: {reason}.") from None
    return output


def _copy(folder: RunFolder, step: int | None, target: Path) -> int:
    """Copy the model of a checkpoint, as its checksums have it, and return the step.

    A run in progress may remove the checkpoint meanwhile: the newest is then another.
    """
    from oblrpo.runs.state_files import STATE, TENSORS

    for _ in range(TRIES):
        reached = folder.reached(step)
        checkpoint, wrong = folder.checkpoint(reached), ""
        try:
            for name in {SUMS, *read_sums(checkpoint)} - {TENSORS}:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checkpoint / name, target / name)
            wrong = folder.wrong_with(reached, target)
        except FileNotFoundError as error:
            wrong = f"{Path(error.filename).name} is missing"
        except InputError as error:
            wrong = str(error)
        if not wrong:
            for name in (SUMS, STATE):
                (target / name).unlink()
            return reached
        if checkpoint.is_dir():  # it has not been removed: it is damaged
            raise InputError(f"{checkpoint} is damaged ({wrong}); give another --step.")
        shutil.rmtree(target, ignore_errors=True)
    raise InputError(
        f"{folder.path} has removed {TRIES} checkpoints while they were being copied; raise its save_total_limit, or "
        "export after it has ended."
    )


def _base(model: str, checkpoint: Path) -> str:
    """The name on the hub of the model that was trained; empty if it was a folder, a file or an object."""
    from oblrpo.model_files import LOCAL, is_gguf

    adapters = checkpoint / ADAPTERS
    known = json.loads(adapters.read_text("utf-8")).get("base_model_name_or_path") if adapters.is_file() else model
    name = str(known or "")
    named = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII)
    here = name.startswith(LOCAL) or is_gguf(name) or Path(name).exists()
    return name if named and not here else ""
