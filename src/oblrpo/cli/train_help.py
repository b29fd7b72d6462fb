"""`oblrpo train --help`: the recipes and the settings that most runs need, on one screen."""

import ast
import inspect
import re
from typing import Any

from rich.console import Console
from rich.table import Table

from oblrpo.settings import RECIPES, TrainConfig, flatten, shared, train

COMMON = (
    "model", "data", "task", "rewards", "output", "steps", "seed", "prompts_per_step", "num_generations",
    "max_completion_length", "tokens_per_micro_batch", "lora", "algorithm", "learning_rate", "eval_steps",
    "report_to",
)  # fmt: skip
"""What most runs set."""


def recipes() -> dict[str, str]:
    """Every built-in recipe with the first sentence of its comment."""
    sentences = {}
    for entry in sorted(RECIPES.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".yaml"):
            lines = entry.read_text(encoding="utf-8").splitlines()
            comment = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
            sentences[entry.name.removesuffix(".yaml")] = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", comment, maxsplit=1)[0]
    return sentences


def documented() -> dict[str, str]:
    """Every setting with its docstring, which stands under it in `settings`."""
    sentences = {}
    for section in [*ast.parse(inspect.getsource(shared)).body, *ast.parse(inspect.getsource(train)).body]:
        if isinstance(section, ast.ClassDef):
            for field, text in zip(section.body, section.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    sentences[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return sentences


def print_help(base: TrainConfig, console: Console) -> None:
    """Print usage, recipes and common settings with the defaults of `base`."""
    console.print("usage: oblrpo train [RECIPE|FILE] [--setting VALUE ...]\n")
    console.print(f"{base.__doc__}\n")
    _print_table("Recipes", recipes().items(), console)
    texts, now = documented(), flatten(base)
    defaults = {name: f" [{value}]" if value not in ("", [], {}) else "" for name, value in now.items()}
    rows = [(f"--{name.replace('_', '-')}", f"{texts[name]}{defaults[name]}") for name in COMMON]
    rows += [
        ("--resume", "Go on with the run in --output from its latest checkpoint, under its own settings."),
        ("--accept-changed", "With --resume: go on although data or rewards are not what the run was started with."),
        ("--dry-run", "Print all settings, parameter count, batch sizes and memory; write nothing."),
        ("--help-all", f"Print all {len(now) - 1} settings."),
    ]
    _print_table("What most runs set", rows, console)
    console.print("A YAML file may hold settings by the same names; flags override it.")


def _print_table(title: str, rows: Any, console: Console) -> None:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(f"  {name}", text)
    console.print(title, style="bold")
    console.print(table)
    console.print()
