"""A type checker takes what users write, and finds their mistakes; `make lint` has filled its cache."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIGHT = """
from pathlib import Path

import oblrpo
import torch
from oblrpo.estimators import Moments, moments


def vowels(completions: list[str], **columns: object) -> list[float]:
    return [float("a" in text) for text in completions]


run: oblrpo.Run = oblrpo.train(
    "demo", reward=vowels, steps=3, output=Path("runs/mine"), lora={"r": 16}, schedule_kl=None, sampler="vllm",
    report_to=["tensorboard"], optimizer_args={"betas": [0.9, 0.99]},
)
reward: float = run.metrics[-1]["reward"]
folder: Path = run.export("there", merge=True)
accuracy: float = run.evaluate(samples=8)["avg@k"]["value"] + oblrpo.evaluate("x", k=[1, 4])["avg@k"]["value"]
found: oblrpo.diagnosis.Diagnosis = oblrpo.diagnose(run.output)
again: oblrpo.Run = oblrpo.load(Path("runs/mine"))
said: str = again.samples(held_out=True)[0]["completion"] + again.plot("reward").get_title() + again.report.name
found = again.diagnose()
baseline: torch.Tensor = oblrpo.baseline("rloo", torch.rand(4, 4))
measured: Moments = moments(torch.rand(4), 0.5)
try:
    oblrpo.SNRSchedule(torch.optim.SGD([torch.zeros(1)], lr=0.1)).step(measured)
except oblrpo.InputError as error:
    print(error)
"""
WRONG = {
    'oblrpo.train("demo", steps="three")': 'incompatible type "str"; expected "int"',
    'oblrpo.train("demo", stepz=3)': 'Unexpected keyword argument "stepz" for "train"; did you mean "steps"?',
    'oblrpo.train("demo", sampler="vlmm")': "Literal['vlmm']",
    'oblrpo.evaluate("x", sample=8)': 'Unexpected keyword argument "sample"',
    "oblrpo.train().metric": '"Run" has no attribute "metric"',
}


@pytest.mark.slow
def test_mypy_takes_what_is_right_and_finds_what_is_wrong(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    readme = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "readme.py").write_text(readme)
    (tmp_path / "wrong.py").write_text("import oblrpo\n" + "\n".join(WRONG))
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml"]
    files = [tmp_path / name for name in ("right.py", "readme.py", "wrong.py")]
    ran = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in ran.stdout.splitlines() if ": error: " in line]
    assert not [line for line in lines if "right.py" in line], ran.stdout
    assert not [line for line in lines if "readme.py" in line and "type annotation" not in line], ran.stdout
    for number, words in enumerate(WRONG.values(), start=2):
        assert any(f"wrong.py:{number}: " in line and words in line for line in lines), (words, ran.stdout)
