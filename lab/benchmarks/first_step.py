"""What rows of data take before the first step: of short sums, word problems of 300 characters, and conversations.

    python -m lab.benchmarks.first_step [--kinds sums words chat] [--formats jsonl parquet] [--rows 100 1000000]

Parquet needs pyarrow. Each line is three processes, one behind the other: `oblrpo train --dry-run`, a run of one step
of two prompts, and that run resumed for another. Each is counted in CPU seconds and by the peak of its memory, imports
of torch and transformers included. The policy has random weights, two layers and the tokens of bytes.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS = (
    "the of Natalia sold clips to 48 her friends in April and then she half as many May how did altogether Weng earns "
    "$12 an hour for babysitting yesterday just 50 minutes Betty is saving money new wallet which costs only give"
)
SETTINGS = {
    "rewards": "numeric", "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 8, "eval_prompts": 2,
    "eval_steps": 0, "threads": 1,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def rows_of(kind: str, count: int) -> Iterator[dict[str, Any]]:
    rng, words = random.Random(0), WORDS.split()
    for index in range(count):
        if kind == "sums":
            yield {"prompt": f"What is {index} + 1?", "answer": str(index + 1)}
            continue
        text = f"Person {index}: {' '.join(rng.choices(words, k=45))}"[:240] + "?"
        asked = [{"role": "system", "content": "You are a careful assistant."}, {"role": "user", "content": text}]
        yield {
            "prompt": text if kind == "words" else asked,
            "answer": f"{' '.join(rng.choices(words, k=10))}\n#### {index}",
        }


def write(path: Path, kind: str, count: int) -> None:
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows_of(kind, count))
        return
    import pyarrow
    from pyarrow import parquet

    rows, writer = list[dict[str, Any]](), None
    for index, row in enumerate(rows_of(kind, count), start=1):
        rows.append(row)
        if index % 50_000 == 0 or index == count:
            table, rows = pyarrow.Table.from_pylist(rows), []
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    writer.close()


def write_policy(folder: Path) -> None:
    from oblrpo.policy import make_policy
    from oblrpo.settings import PolicyConfig

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 4096}
    policy = make_policy(PolicyConfig(model_args=shape, device="cpu"))
    policy.tokenizer.chat_template = TEMPLATE
    policy.save(folder)


def measure(*words: object) -> str:
    """CPU seconds and peak of a command of ours; of a process of its own, because the peak is that of all children."""
    command = [sys.executable, "-c", "from oblrpo.cli import main; main()", "train", *map(str, words)]
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    said = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True).stdout
    seconds, peak = map(float, said.split())
    return f"{seconds:.1f} s, {peak * 1024 / 1e9:.2f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=("sums", "words", "chat"), default=["sums", "words", "chat"])
    parser.add_argument("--formats", nargs="+", choices=("jsonl", "parquet"), default=["jsonl", "parquet"])
    parser.add_argument("--rows", nargs="+", type=int, default=[100, 1_000_000])
    arguments = parser.parse_args()
    print("| rows | kind | format | dry run | one step | resumed, one more |\n|---|---|---|---|---|---|", flush=True)
    for kind in arguments.kinds:
        for form in arguments.formats:
            for count in arguments.rows:
                with tempfile.TemporaryDirectory() as folder:
                    file, output, model = (Path(folder) / name for name in (f"rows.{form}", "run", "model"))
                    write(file, kind, count)
                    write_policy(model)
                    of_settings = [
                        word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", value)
                    ]
                    start = ["--data", file, "--model", model, "--output", output, "--steps", 1, *of_settings]
                    dry, step = measure(*start, "--dry-run"), measure(*start)
                    again = measure("--resume", "--output", output, "--steps", 2)
                print(f"| {count:,} | {kind} | {form} | {dry} | {step} | {again} |", flush=True)


if __name__ == "__main__":
    main()
