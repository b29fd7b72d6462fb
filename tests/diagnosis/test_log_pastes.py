"""What pasting, wrapping and cutting make of logs, and what stands between their steps."""

import json
import re
import textwrap

import pytest

from oblrpo.errors import InputError
from oblrpo.runs.logs import read_log

METRICS = {"actor/entropy": "0.11593235284090042", "actor/ppo_kl": "np.float64(-1.2e-05)", "critic/score/mean": "{}",
           "actor/lr": "1e-06", "perf/max_memory_allocated_gb": "np.float64(67.86364221572876)", "training/epoch": "0",
           "actor/grad_norm": "nan", "response_length/mean": "1267.024169921875", "val-core/math/acc/mean@8": "0.5",
           "response_length/clip_ratio": "0.0234375", "perf/throughput": "1234.5"}  # fmt: skip
STEPS = [
    f"step:{n}" + "".join(f" - {key}:{value.format(n / 80)}" for key, value in METRICS.items()) for n in range(1, 7)
]
NOISE = ["Training Progress:   1%|1         | 1/105 [01:00<1:44:00, 60.00s/it]", "[score] 1.0", "Saved.", "12",
         "INFO:2025-08-22 23:08:37,898:[Rank 0] Saved model to /root/x/actor", "INFO - done"]  # fmt: skip


def cut(line, width):
    return [line[place : place + width] for place in range(0, len(line), width)]


WRAPPED = {
    "at spaces": lambda line, width: textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False),
    "at hyphens": textwrap.wrap,
    "anywhere": cut,
    "anywhere, spaces lost": lambda line, width: [part.rstrip() for part in cut(line, width)],
    "before each": lambda line, width: line.replace(" - ", "\n - ").split("\n"),
    "after each": lambda line, width: line.replace(" - ", " - \n").split("\n"),
}
MARKED = {
    "not": lambda lines, count: lines,
    "Ray": lambda lines, count: [f"(TaskRunner pid=123, ip=10.0.0.{count}) {line}" for line in lines],
    "colours": lambda lines, count: [f"\x1b[36m(TaskRunner pid=123)\x1b[0m {line}" for line in lines],
    "numbers": lambda lines, count: [f"{count + n:6d}\t{line}" for n, line in enumerate(lines)],
    "numbers and spaces": lambda lines, count: [f"{count + n} {line}" for n, line in enumerate(lines)],
    "numbers of less": lambda lines, count: [f"{count:7d} {lines[0]}", *(f"        {line}" for line in lines[1:])],
    "times": lambda lines, count: [f"2025-08-22T23:08:{n % 60:02}.898Z {line}" for n, line in enumerate(lines)],
    "indented": lambda lines, count: [lines[0], *(f"        {line}" for line in lines[1:])],
    "quoted": lambda lines, count: [f"> {line}" for line in lines],
    "blank lines": lambda lines, count: [each for line in lines for each in (line, "")],
    "in a frame": lambda lines, count: [f"│ {line} │" for line in lines],
}


def rows_of(path, text):
    (path / "log.txt").write_text(text)
    return list(read_log(path / "log.txt").rows)


@pytest.mark.parametrize("marked", MARKED)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_step_of_verl_is_read_wherever_a_paste_has_wrapped_it(tmp_path, wrapped, marked):
    whole = rows_of(tmp_path, "\n".join(STEPS))
    assert [(row["reward"], row["completions/mean_length"]) for row in whole] == [
        (n / 80, 1267.024169921875) for n in range(1, 7)
    ]
    for width in (60, 80, 117, 200, 5000):
        for noise in ([], NOISE):
            lines: list[str] = []
            for n, step in enumerate(STEPS):
                lines += MARKED[marked](WRAPPED[wrapped](step, width), len(lines) + 1) + noise[n : n + 1]
            assert rows_of(tmp_path, "\n".join(lines) + "\n") == whole, width


def test_what_a_paste_has_lost_is_said(tmp_path):
    (tmp_path / "log").write_text(f"{STEPS[0]}\n{STEPS[1][:60]}\nTraceback (most recent call last):\n{STEPS[2]}\n")
    log = read_log(tmp_path / "log")
    assert [row.get("reward") for row in log.rows] == [1 / 80, None, 3 / 80]
    assert log.source == "what verl prints (metrics without a value: 1; lines not read: 1)"


SAMPLES = [
    "[DEBUG] gen[{n}] reward={r:.4f}", "[DEBUG] gen[2][{n}] prompt_len=12\n[DEBUG] gen[2][{n}] reward={r}",
    "Sample {n}: reward={r}, length=120", "sample_idx={n} reward={r} response_length=33",
    "completion #{n} | reward: {r}",
    "Question 17, generation {n}: reward {r}", "reward: {r}", "Extracted: 5 | Gold: 7 | reward: {r}",
    "final_reward = {r}",
    "Worker {n}: reward {r}", "(RewardManager pid=12{n}) reward: {r}",
    "Rollout:  {n}2%|3  | {n}/8 [00:03<00:02, reward={r}]",
    "{{'reward': {r}, 'answer': '5'}}", "{{'idx': {n}, 'reward': {r}, 'response_length': 120}}", "{{'reward': {r}}}",
    '{{"prompt": "x", "response": "y", "reward": {r}}}', 'Response {n}: {{"answer": 5, "reward": 10}}',
    "[prompt] what\n[response] 5\n[score] {r}",
    "INFO metrics.py:455] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 512 tokens/s, Running: {n}",
    "Processed prompts: 100%|##| 8/8 [00:10<00:00,  1.2s/it, est. speed input: 100 toks/s, output: 2000 toks/s]",
]  # fmt: skip
OF_STEPS = {
    "pairs": "Step {n} | loss: 0.5 | reward: 0.25 | kl: 0.01",
    "TRL": "{{'loss': 0.0, 'grad_norm': 0.5, 'learning_rate': 1e-06, 'reward': 0.25, 'reward_std': 0.1, 'kl': 0.01}}",
    "verl": "(TaskRunner pid=1) step:{n} - actor/grad_norm:0.5 - critic/score/mean:0.25 - actor/kl_loss:0.01",
    "MiniMind": "Epoch:[{epoch}/2]({step}/20), Reward: 0.2500, KL_ref: 0.0010, Adv Std: 0.9999, Actor Loss: -0.0100",
}


@pytest.mark.parametrize("printed", OF_STEPS)
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("before", [True, False])
def test_what_single_completions_earned_is_no_step(tmp_path, sample, printed, before):
    lines: list[str] = []
    for n in range(1, 41):
        samples = [sample.format(n=each, r=(n + each) % 3 / 2) for each in range(8)]
        step = OF_STEPS[printed].format(n=n, epoch=(n - 1) // 20 + 1, step=(n - 1) % 20 + 1)
        lines += [*samples, step] if before else [step, *samples]
    assert [(row["step"], row["reward"]) for row in rows_of(tmp_path, "\n".join(lines))] == [
        (n, 0.25) for n in range(1, 41)
    ]


@pytest.mark.parametrize("sample", [*SAMPLES[:6], "✅ reward = {two}", *SAMPLES[12:14], SAMPLES[15]])
def test_a_log_of_single_completions_is_refused_in_a_sentence(tmp_path, sample):
    text = "\n".join(sample.format(n=n % 8, r=n % 5 / 4, two=n % 2) for n in range(40))
    with pytest.raises(
        InputError, match=r"has 40 lines about single completions, and no metrics of steps; give the log"
    ):
        rows_of(tmp_path, text)


HISTORY = [{"step": n, "loss": 0.01, "grad_norm": 0.5, "reward": 0.5 + n / 1000, "kl": 0.01} for n in range(1, 61)]
STATE = {"best_metric": None, "eval_steps": 20, "global_step": 60, "log_history": HISTORY, "logging_steps": 1,
         "max_steps": 60, "stateful_callbacks": {"Control": {"args": {"reward": 3}}}, "total_flos": 0.0}  # fmt: skip
INDENTED, LISTED = json.dumps(STATE, indent=2), json.dumps(HISTORY, indent=2)


@pytest.mark.parametrize("name", ["trainer_state.json", "paste.txt"])
@pytest.mark.parametrize(
    ("text", "steps", "whole"),
    [
        (INDENTED, 60, True), (json.dumps(STATE), 60, True), (LISTED, 60, True), (json.dumps(HISTORY), 60, True),
        (json.dumps({"log_history": HISTORY}), 60, True), (f'"log_history": {LISTED},', 60, False),
        (INDENTED[: INDENTED.index('"reward": 0.53') + 13], 29, False),
        (json.dumps(STATE)[: json.dumps(STATE).index('"reward": 0.53') + 13], 29, False),
        (INDENTED[: INDENTED.index('"logging_steps"')], 60, False), (INDENTED.partition(": [")[2], 60, True),
        (LISTED[: LISTED.index('"reward": 0.53') + 13], 29, True), (f"```json\n{INDENTED}\n```", 60, False),
        (repr(STATE), 60, False), (repr(HISTORY), 60, True),
    ],
)  # fmt: skip
def test_any_part_of_a_state_of_trl_is_read_and_no_number_that_was_cut(tmp_path, name, text, steps, whole):
    (tmp_path / name).write_text(text)
    log = read_log(tmp_path / name)
    rewards = [(row["step"], row["reward"]) for row in log.rows if "reward" in row]
    assert rewards == [(n, 0.5 + n / 1000) for n in range(1, steps + 1)]
    assert ("which is no whole JSON" in log.source) == (not whole)
    assert log.steps == (60 if re.match(r"{.*}$", text, re.DOTALL) and "max_steps" in text and whole else 0)


@pytest.mark.parametrize(
    "line",
    [
        '{{"step": {n}, "loss": 0.1, "reward": 0.5, "grad_norm": 1.0, "prompt": "2+2", "response": "4"}}',
        "{{'loss': 0.1, 'reward': 0.5, 'completion': 'four'}}",
        "step: {n} | sample 512 | reward: 0.5 | loss: 0.1",
        "step {n} prompt 4 reward: 0.5 loss: 0.1",
    ],
)
def test_a_step_that_shows_one_of_its_completions_is_a_step(tmp_path, line):
    log = tmp_path / "train.log"
    log.write_text("".join(line.format(n=n) + "\n" for n in range(1, 31)))
    rows = read_log(log).rows
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert {row["loss"] for row in rows} == {0.1}


def test_a_step_that_is_of_something_else_makes_no_completions_of_steps(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("Loaded checkpoint, step 100\n" + "reward: 0.5 loss: 0.1 grad_norm: 1.0\n" * 30)
    assert len(read_log(log).rows) == 30
