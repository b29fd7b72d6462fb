"""A task from a file in one call."""

from pathlib import Path

from oblrpo.rewards import of_rows
from oblrpo.tasks import DataTask
from oblrpo.tasks.data import problems_of
from oblrpo.tasks.sources import read_source


def task_of_file(path, prompt="prompt", answer="answer", prompt_template="{prompt}", numbers=False, **options):
    rows = read_source([str(path)], "train")
    _, faults = of_rows(["numeric"] * numbers)
    return DataTask(Path(path).stem, problems_of(rows, prompt, answer, prompt_template, faults), **options)
