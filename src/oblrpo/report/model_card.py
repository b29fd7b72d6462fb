"""The card of a trained model, as the hub shows it: what it learned from, how well it does, how to make it again."""

import re
import shlex
from collections.abc import Mapping
from html import escape
from importlib.metadata import version
from typing import Any

from oblrpo.errors import InputError
from oblrpo.intervals import Z95
from oblrpo.objects import PREFIX
from oblrpo.report.html import seen
from oblrpo.report.record import RunRecord
from oblrpo.settings import RECIPES, TrainConfig, flatten, load_recipe, yaml_line, yaml_text
from oblrpo.tasks import BENCHMARKS
from oblrpo.tasks.sources import is_hub_name

OF_A_FOLDER = (
    "The adapters belong to a model in a local folder of the machine that trained them (see `adapter_config.json`). "
    "`oblrpo export RUN --merge` writes a whole model instead.\n"
)
PLACES = {"recipe", "output", "threads", "report_to", "project", "log_completions"}
"""Settings that say where a run was made, and nothing of the model."""


def model_card(record: RunRecord, step: int, name: str, base: str, adapters: bool) -> str:
    """Return the README.md of the model that a run had after a step, in Markdown.

    Args:
        record: the run.
        step: the step of the checkpoint.
        name: what the model is called.
        base: the model that was trained, if the hub has it; else empty.
        adapters: whether the folder holds adapters of the base, and no whole model.
    """
    said = _said(record.settings)
    P, G = record.prompts, record.whole("num_generations")
    whole = f"{record.whole('steps'):,}"
    parts = [
        f"---\n{yaml_text(_front(record.settings, base, adapters))}---\n\n# {_text(name)}\n",
        f"{_began_with(record.settings, base)}, trained by reinforcement learning with oblrpo (algorithm "
        f"{_code(record.settings.get('algorithm'))}, [OBLR-PO](https://arxiv.org/abs/2511.23310)). "
        f"These are {'adapters' if adapters else 'the weights'} after step {step:,} of {whole}. "
        f"Each step used {P} prompts with {G} completions each.\n",
        "## Training data and reward\n",
        *(f"- **{what}**: {words}" for what, words in _learned_from(record.settings).items()),
        "\n## Evaluation\n",
        _accuracies(record, step),
        "\n## Use\n",
        _fenced(_use(record.settings, adapters), "python"),
        "" if base or not adapters else OF_A_FOLDER,
        "## How to reproduce it\n",
        _made_by(record.settings, said),
        "\nSettings that differ from oblrpo's defaults, without those of the machine:\n",
        _fenced(yaml_text(said), "yaml"),
        f"\nThis card was written by oblrpo {version('oblrpo')}.",
    ]
    return seen("\n".join(parts) + "\n")


def _said(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from the defaults, places left out."""
    usual = flatten(TrainConfig())
    return {key: value for key, value in settings.items() if key in usual and value != usual[key] and key not in PLACES}


def _front(settings: Mapping[str, Any], base: str, adapters: bool) -> dict[str, Any]:
    """What the hub reads of a card. A licence is not among it: only its owner can name one."""
    data = [
        source.split(":")[0].split("[")[0]
        for source in settings.get("data") or []
        if is_hub_name(source) and not source.startswith(PREFIX)
    ]
    front = {
        "base_model": base,
        "library_name": "peft" if adapters else "transformers",
        "pipeline_tag": "text-generation",
        "datasets": data,
        "tags": ["reinforcement-learning", "oblrpo", str(settings.get("algorithm"))],
    }
    return {key: value for key, value in front.items() if value}


def _began_with(settings: Mapping[str, Any], base: str) -> str:
    """The model that was trained, by a link if the hub has it."""
    if base:
        return f"[{_text(base)}](https://huggingface.co/{base})"
    model = str(settings.get("model") or "")
    if not model:
        return "A small Qwen3 model with random weights"
    return f"The {'loaded ' if model.startswith(PREFIX) else ''}model {_code(model.removeprefix(PREFIX))}"


def _learned_from(settings: Mapping[str, Any]) -> dict[str, str]:
    """Prompts, reward and what was put around prompts, in words."""

    def listed(names: Any) -> str:
        return ", ".join(_code(str(name).removeprefix(PREFIX)) for name in names)

    data, task = settings.get("data") or [], settings.get("task")
    said = {"Prompts": listed(data) if data else f"the task {_code(task)}" + _with(settings.get("task_args"))}
    if settings.get("sft_data"):
        said["Supervised learning before RL"] = listed(settings["sft_data"])
    elif settings.get("warm_start_steps"):
        said["Supervised learning before RL"] = f"{settings['warm_start_steps']} steps of the task's own demonstrations"
    rewards = settings.get("rewards") or []
    unsaid = "`numeric`" if data else "`math`" if task in BENCHMARKS else "the task's own"
    said["Reward"] = listed(rewards) if rewards else unsaid
    around = {"prompt_template": "a template", "chat": "the chat template", "system_prompt": "a system prompt"}
    if put := [words for key, words in around.items() if settings.get(key)]:
        said["Prompt format"] = f"{' and '.join(put)}, as in the settings below"
    said["Completions"] = (
        f"at most {settings.get('max_completion_length')} tokens, temperature {settings.get('temperature')}"
    )
    return said


def _with(arguments: Any) -> str:
    return f" with {_code(yaml_line(arguments))}" if arguments else ""


def _accuracies(record: RunRecord, step: int) -> str:
    """The table of held-out accuracy before and after, with intervals."""
    measured = [row for row in record.measured if row["step"] <= step]
    if not measured:
        return "The run's metrics hold no held-out accuracy."
    before = record.rows[0].get("eval/accuracy_before_warm_start")
    lines = [] if before is None else [f"| as loaded | {before:.3f} | |"]
    for row, what in zip([measured[0], measured[-1]][: len(measured)], ("before RL", "last measured"), strict=False):
        error = row.get("eval/accuracy_stderr")
        margin = "" if error is None else f"± {Z95 * error:.3f}"
        lines.append(f"| {what} (step {row['step']}) | {row['eval/accuracy']:.3f} | {margin} |")
    return "\n".join(
        [
            "| | held-out accuracy | 95 % interval |",
            "|---|---|---|",
            *lines,
            "",
            f"Measured on {record.whole('eval_prompts')} held-out prompts at most, {record.whole('eval_samples')} "
            f"completions each, sampled as in training. The interval is over prompts. This is one run, with seed "
            f"{record.whole('seed')}: other seeds give other results.",
        ]
    )


def _use(settings: Mapping[str, Any], adapters: bool) -> str:
    kind = "AutoPeftModelForCausalLM" if adapters else "AutoModelForCausalLM"
    imports = f"from transformers import {kind}, AutoTokenizer"
    if adapters:
        imports = f"from peft import {kind}\nfrom transformers import AutoTokenizer"
    foreign = ", trust_remote_code=True" if settings.get("trust_remote_code") else ""
    return (
        f'{imports}\n\nfolder = "."  # this folder, or its name on the hub\n'
        f"model = {kind}.from_pretrained(folder{foreign})\ntokenizer = AutoTokenizer.from_pretrained(folder{foreign})\n"
    )


def _text(name: str) -> str:
    """A name on a line of Markdown, without what Markdown and HTML would make of its characters."""
    return escape(re.sub(r"([\\`*\[\]!|~])", r"\\\1", " ".join(name.split())), quote=False)


def _code(value: Any) -> str:
    """A word or a few as code in a line, between more backticks than stand in a row in it."""
    words = " ".join(str(value).split())
    mark = "`" * (1 + max(map(len, re.findall("`+", words)), default=0))
    return f"{mark} {words} {mark}" if "`" in words else f"{mark}{words}{mark}"


def _fenced(text: str, language: str = "") -> str:
    """A block of code, fenced by more backticks than stand in a row in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _made_by(settings: Mapping[str, Any], said: Mapping[str, Any]) -> str:
    """The command, from the recipe if it is one that everybody has; or that a program of Python made it."""
    objects = [key for key, value in said.items() for word in _words(value) if word.startswith(PREFIX)]
    if objects:
        return (
            f"By `oblrpo.train(...)` in a Python program, which passed {' and '.join(dict.fromkeys(objects))} as "
            "objects. Below, they are listed by name and digest."
        )
    recipe, changed = str(settings.get("recipe") or ""), dict(said)
    if recipe and (RECIPES / f"{recipe}.yaml").is_file():
        try:
            of_recipe = flatten(load_recipe(recipe, TrainConfig()))
        except InputError:  # a recipe of another version
            of_recipe = {}
        changed = {
            key: value
            for key, value in settings.items()
            if key in of_recipe and value != of_recipe[key] and key not in PLACES
        }
    else:
        recipe = ""
    return _fenced(shlex.join(["oblrpo", "train", *([recipe] if recipe else []), *flags_of(changed)]))


def _words(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else [str(value)]


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
