"""Loaders under random input: a value or an `InputError`, nothing else, and in time.

`OBLRPO_FUZZ` says how many inputs a loader gets; `make attack` gives each 10,000.
"""

import decimal
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from oblrpo.checksums import damage
from oblrpo.cli.train import _parse
from oblrpo.compare.spec import read_spec
from oblrpo.diagnosis import CONDITIONS, diagnose
from oblrpo.errors import InputError
from oblrpo.evaluation.evaluate import read_completions
from oblrpo.model_files import base_of
from oblrpo.policy import load_policy
from oblrpo.report.export import export
from oblrpo.rewards import of_rows
from oblrpo.runs import RunFolder, read_rows
from oblrpo.runs.state_files import STATE, TENSORS, load_state, save_state
from oblrpo.settings import PolicyConfig, TrainConfig, flatten, read_yaml, with_settings
from oblrpo.tasks import BENCHMARKS
from oblrpo.tasks.benchmarks import load_benchmark
from oblrpo.tasks.data import problems_of
from oblrpo.tasks.sources import read_source

GIVEN = {True: 0, False: 0}
"""How many inputs were loaded, and how many refused."""

SECONDS = 20
"""How long one input may take; most take less than a millisecond."""

COUNT = int(os.environ.get("OBLRPO_FUZZ", "150"))
PIECES = [
    "a",
    "prompt",
    "answer",
    ": ",
    "\n",
    "- ",
    "[",
    "]",
    "{",
    "}",
    '"',
    "'",
    ",",
    "&a ",
    "*a",
    "!!bool ",
    "!!int ",
    "!!float ",
    "!!timestamp ",
    "!!binary ",
    "!!set ",
    "!!omap ",
    "!!null ",
    "<<: ",
    "? ",
    "|",
    ">",
    "%YAML 1.2\n",
    "---",
    "...",
    "#",
    "1e999",
    "9" * 400,
    "0x",
    "0o9",
    "1:60",
    "2024-13-99",
    ".nan",
    "-.inf",
    "true",
    "null",
    "\\ud800",
    "\\u0000",
    "\\",
    "\t",
    "\r",
    "\0",
    "\u202e",
    "\ufeff",
    "\u2028",
    "\x85",
    "\U0001f600",
    "\udcff",
    "seed",
    "steps",
    "rewards",
    "where",
    "learning_rate",
    '{"prompt": "p", "answer": "1"}\n',
    '{"prompt": [{"role": "user", "content": "x"}], "answer": 2}\n',
    '"role"',
    '"content"',
]


def texts(seed):
    rng = random.Random(seed)
    for _ in range(COUNT):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 25)))
        yield text * rng.choice([1, 1, 1, 2, 50])


@pytest.fixture(scope="module", autouse=True)
def counted():
    yield
    print(f"\nloaders were given {sum(GIVEN.values()):,} inputs, of which they refused {GIVEN[False]:,}")


@contextmanager
def in_time(given):
    """Fail with the input where it takes too long; where there are no alarms (Windows), as soon as it has ended."""
    told, begin = f"no end within {SECONDS} s of: {given!r}"[:2000], time.monotonic()

    def late(*_):
        pytest.fail(told)

    alarm = getattr(signal, "SIGALRM", None)
    before = signal.signal(alarm, late) if alarm else None
    if alarm:
        signal.alarm(SECONDS)
    try:
        yield
    finally:
        if alarm:
            signal.alarm(0)
            signal.signal(alarm, before)
    assert time.monotonic() - begin < SECONDS + 1, told


def accepted(load: Callable[[], object], given: object) -> bool:
    """Whether it was loaded; it may refuse, and do nothing else."""
    try:
        with in_time(given), suppress(InputError):
            load()
            GIVEN[True] += 1
            return True
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}"[:500] + f" of: {given!r}"[:2000]) from error
    GIVEN[False] += 1
    return False


def bitten(good: bytes, seed):
    """Yield a file with a few of its bytes changed, doubled, cut out or cut off."""
    rng = random.Random(seed)
    for _ in range(COUNT):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at, length = rng.randrange(len(data) + 1), rng.choice([1, 2, 8, 64])
            match rng.randrange(4):
                case 0:
                    data[at : at + length] = rng.randbytes(length)
                case 1:
                    data[at:at] = data[at : at + length] * rng.choice([1, 40])
                case 2:
                    del data[at : at + length]
                case 3 if rng.random() < 0.3:
                    del data[at:]
        yield bytes(data)


def test_yaml_and_settings():
    found = [accepted(lambda text=text: read_yaml(text, "f"), text) for text in texts(1)]
    assert any(found)
    assert not all(found)
    for text in texts(5):
        accepted(lambda text=text: with_settings(TrainConfig(), read_yaml(text, "f"), "f"), text)
    settings = random.Random(2)
    values = [None, True, -1, 10**400, float("nan"), "", "\ud800", [], [1], {}, {"a": 1}, object(), b"x", ("a",), "off"]
    names = list(flatten(TrainConfig()))
    for _ in range(COUNT):
        given = {settings.choice(names): settings.choice(values) for _ in range(3)}
        accepted(lambda given=given: with_settings(TrainConfig(), given, "f"), given)


def as_bytes(text):
    return text.encode("utf-8", "surrogateescape" if "\udcff" in text else "strict")


def problems_in(file):
    return problems_of(read_source([str(file)], "train"), "prompt", "answer", "{prompt}")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json"])
def test_rows(tmp_path, suffix):
    file = tmp_path / f"rows.{suffix}"
    for text in texts(suffix):
        file.write_bytes(as_bytes(text))
        accepted(lambda: problems_in(file), text)


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": f"p{n}", "answer": str(n)} for n in range(20)]), file)
    assert len(problems_in(file)) == 20
    for data in bitten(file.read_bytes(), "parquet"):
        file.write_bytes(data)
        accepted(lambda: problems_in(file), data)


def test_rows_of_values():
    rng = random.Random(3)
    values = [
        None,
        True,
        10**400,
        -0.0,
        "x",
        "\ud800",
        "",
        [],
        {},
        [{}],
        [{"role": "user"}],
        [{"role": [], "content": "x"}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "ok"}],
        [{"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": [{"type": "text"}]}],
        float("inf"),
    ]
    names = ["prompt", "answer", "prompts", "x", "tools", "chat_template_kwargs"]
    for _ in range(COUNT):
        row = {rng.choice(names): rng.choice(values) for _ in range(3)}
        text = json.dumps(row)
        rows = [("f", json.loads(text))]
        accepted(lambda rows=rows: problems_of(rows, "prompt", "answer", "{prompt}", of_rows(["numeric"])[1]), text)


def test_metrics(tmp_path):
    for text in texts(4):
        (tmp_path / "metrics.jsonl").write_bytes(text.encode("utf-8", "replace"))
        accepted(lambda: read_rows(tmp_path / "metrics.jsonl"), text)


LOGGED = [{"step": n, "reward": n % 7 / 9, "reward_std": 0.4, "grad_norm": 0.5, "kl": 0.01 * n} for n in range(1, 31)]
VERL = [f"x step:{row['step']} - critic/score/mean:{row['reward']} - actor/grad_norm:0.5" for row in LOGGED]
LINES = [json.dumps(row) for row in LOGGED]
TABLE = [",".join(map(str, row)) for row in [LOGGED[0], *map(dict.values, LOGGED)]]
LOGS = {
    "log.jsonl": "\n".join(LINES), "log.csv": "\n".join(TABLE),
    "log.json": json.dumps(LOGGED), "verl.log": "\n".join(VERL), "mixed.log": "\n".join([*LINES, *TABLE, *VERL]),
    "trainer_state.json": json.dumps({"log_history": LOGGED, "max_steps": 30}),
    "run/metrics.jsonl": "\n".join(LINES), "run/config.yaml": "algorithm: oblrpo\nprompts_per_step: 8\n",
}  # fmt: skip


def test_logs(tmp_path):
    (tmp_path / "run").mkdir()
    for name, log in LOGS.items():
        (tmp_path / name).write_text(log)
    for name, log in LOGS.items():
        file = tmp_path / name
        given = file.parent if file.parent.name == "run" else file
        assert accepted(lambda given=given: str(diagnose(given)), log)
        for data in [*bitten(log.encode(), name), *map(as_bytes, texts(name))][::4]:
            file.write_bytes(data)
            accepted(lambda given=given: str(diagnose(given)), data)
        file.write_text(log)
    for text in texts("paths"):
        accepted(lambda text=text: diagnose(text), text)


def test_logs_of_values():
    rng = random.Random("log values")
    keys = [key for condition in CONDITIONS for key in condition.columns] + ["step", "data", "eval/accuracy", "x", 3]
    values = [0.0, 1, -1.0, 1e30, 1e300, -(10**400), float("nan"), float("-inf"), True, None, "0.5", "x", b"1", [], {}]
    values += [np.float64(1), np.int64(3), np.bool_(True), np.ones(()), np.ones(1), np.ones(2), object(), 1j]
    values += [torch.ones(()), torch.ones(2), torch.ones((), device="meta"), decimal.Decimal("NaN"), {"reward": 1}]
    values += [decimal.Decimal("sNaN"), decimal.Decimal("1e999")]
    for _ in range(COUNT):
        few = [(rng.choice(keys), rng.choices(values, k=2)) for _ in range(6)]
        rows = [{key: rng.choice(pair) for key, pair in few} | {"reward": n % 2} for n in range(rng.randint(0, 40))]
        for given in (rows, rng.choice([*values, *rows])):
            accepted(lambda given=given: str(diagnose(given)), few)


SPEC = b"""base: {recipe: demo, steps: 20}
seeds: 3
search_seeds: 1
learning_rates: [1e-4, 3e-4]
reference: a
target: {of_best: 0.8, curve: accuracy, window: 3}
variants:
  a: {baseline: rloo}
  b: {baseline: grpo, learning_rates: [1e-3]}
"""


def test_compare_specs(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_bytes(SPEC)
    assert [variant.name for variant in read_spec(str(file), {}, {}).variants] == ["a", "b"]
    inputs = [*bitten(file.read_bytes(), "spec"), *map(as_bytes, texts("spec"))]
    for data in inputs[::2]:
        file.write_bytes(data)
        accepted(lambda: read_spec(str(file), {}, {}), data)
    rng = random.Random("spec values")
    values = [None, True, -1, 10**400, float("nan"), "", "\ud800", [], [1], [[]], {}, {"a": 1}, {"a": {"b": 1}}, "off"]
    for _ in range(COUNT):
        given = {rng.choice(["seeds", "target", "learning_rates", "variants", "base"]): rng.choice(values)}
        file.write_bytes(SPEC)
        accepted(lambda given=given: read_spec(str(file), given, {}), given)


def test_flags():
    """Of `train`: a word that is wrong ends with a sentence, as settings that are wrong do."""
    rng = random.Random("flags")
    names = [f"--{name.replace('_', '-')}" for name in flatten(TrainConfig())] + ["--resume", "--dry-run", "--", "-x"]
    values = ["1", "-1", "1e999", "nan", "9" * 500, "", " ", "\ud800", "true", "{a: 1}", "[", "demo", "\0", "--x=1"]

    for _ in range(COUNT):
        argv = [rng.choice(rng.choice([names, values, PIECES])) for _ in range(rng.randint(1, 6))]
        accepted(lambda argv=argv: _parse(argv, TrainConfig()), argv)


def test_completions(tmp_path):
    file = tmp_path / "completions.jsonl"
    good = "".join(json.dumps({"index": n // 2, "sample": n % 2, "completion": f"it is {n}"}) + "\n" for n in range(8))
    file.write_text(good)
    assert len(read_completions(file, 4)) == 4
    for data in [*bitten(good.encode(), "completions"), *map(as_bytes, texts("completions"))][::2]:
        file.write_bytes(data)
        accepted(lambda: read_completions(file, 4), data)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks(tmp_path, name):
    file = tmp_path / "rows.jsonl"
    rng = random.Random(name)
    columns = ["question", "problem", "answer", "solution", "final_answer", "is_multiple_answer"]
    values = ["x", "\\boxed{3}", "#### 4", "1,2", "", "\ud800", "\\boxed{" * 200, 3, -0.0, float("inf"), None, True]
    values += [False, [], ["$1$, $2$"], [""], [None], {}, 10**400]
    for _ in range(COUNT):
        data = "".join(json.dumps({each: rng.choice(values) for each in columns}) + "\n" for _ in range(2))
        file.write_text(data)
        accepted(lambda: load_benchmark(name, [str(file)]), data)


def test_state_of_a_checkpoint(tmp_path):
    save_state(tmp_path, {"step": 3, "optimizer": {0: {"exp_avg": torch.ones(3)}, 1: [1.5, None, "x"]}, "told": "é"})
    assert load_state(tmp_path)["step"] == 3
    for name in (STATE, TENSORS):
        good = (tmp_path / name).read_bytes()
        for data in bitten(good, name):
            (tmp_path / name).write_bytes(data)
            accepted(lambda: load_state(tmp_path), data)
        (tmp_path / name).write_bytes(good)


def test_export(tmp_path):
    """Of a run of which one file is damaged, or to any name: what is exported all the same is what the run wrote."""
    run = RunFolder(tmp_path / "run")
    run.create(TrainConfig())
    run.write_metrics({"step": 0, "eval/accuracy": 0.5})

    def save(folder):
        folder.mkdir()
        save_file({"x": torch.ones(1)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    run.save_checkpoint(0, save, {"run": run.identity().run, "step": 0}, keep=1)
    checkpoint, output, rng = run.checkpoint(0), tmp_path / "out", random.Random("export")
    written = {name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "config.json")}

    def exported(target, *given):
        if accepted(lambda: export(run.path, target), given):
            assert {name: (target / name).read_bytes() for name in written} == written
            shutil.rmtree(target)

    for file in (run.config_file, run.metrics_file, *sorted(checkpoint.iterdir())):
        good = file.read_bytes()
        for data in [*bitten(good, file.name)][::5]:
            file.write_bytes(data)
            exported(output, file.name, data)
        file.write_bytes(good)
    for _ in range(COUNT // 5):
        name = "".join(rng.choices([*PIECES, "\ud800", "..", "x" * 200], k=rng.randint(1, 4)))
        exported(tmp_path / name, name)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_checksums(tmp_path):
    """They say what is wrong and refuse nothing."""
    (tmp_path / "a").write_text("a")
    good = b"ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb  a\n"
    (tmp_path / "SHA256SUMS").write_bytes(good)
    assert damage(tmp_path) == ""
    for data in bitten(good, "sums"):
        (tmp_path / "SHA256SUMS").write_bytes(data)
        assert accepted(lambda: damage(tmp_path), data)


def test_adapters_and_gguf(tmp_path):
    """What we read of them ourselves: whose adapters they are, and whether a file is a GGUF at all."""
    adapter, gguf = tmp_path / "adapter_config.json", tmp_path / "model.gguf"
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    good = b'{"base_model_name_or_path": "base", "r": 8}'
    for data in [*bitten(good, "adapter"), *map(as_bytes, texts("adapter"))][::2]:
        adapter.write_bytes(data)
        accepted(lambda: base_of(str(tmp_path)), data)
    for data in [*bitten(b"GGUF" + bytes(60), "gguf")][: COUNT // 10]:  # each goes through transformers
        gguf.write_bytes(data)
        assert not accepted(lambda: load_policy(str(gguf), PolicyConfig(device="cpu")), data)
