"""The card of a trained model, as the hub shows it: what it learned from, how well it does, how to make it again."""

import re
import shlex
from collections.abc import Mapping
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from oblrpo.errors import InputError
from oblrpo.objects import PREFIX
from oblrpo.report.html import seen
from oblrpo.report.record import RunRecord, accuracy_margin, changed_settings
from oblrpo.settings import RECIPES, TrainConfig, flatten, load_recipe, yaml_line, yaml_text
from oblrpo.tasks import BENCHMARKS
from oblrpo.tasks.sources import is_hub_name

PLACES = {"recipe", "output", "threads", "report_to", "project", "log_completions"}
"""Settings that say where a run was made, and nothing of the model."""

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
        measured=_accuracies(record, step),
        objects=list(dict.fromkeys(objects)),
        command=_command(settings, changed),
        changed=yaml_text(changed),
        version=version("oblrpo"),
        PREFIX=PREFIX,
        text=_text,
        code=_code,
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
