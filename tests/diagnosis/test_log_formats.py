"""Logs as people post them: what trainers print, and tables of notebooks, W&B and TensorBoard."""

import json
import math

import numpy as np
import pytest

from oblrpo.diagnosis import diagnose, facts_of_log
from oblrpo.errors import InputError
from oblrpo.runs.log_rows import Rows
from oblrpo.runs.logs import read_log

TRL = "{{'loss': 0.0, 'grad_norm': {}, 'learning_rate': 1e-06, 'rewards/fits': 0.5, 'reward': {}, 'epoch': 0.01}}"
TABLE = [["Step", "Training Loss", "reward", "rewards / fits", "entropy"],
         ["10", "-0.1", "0.25", "0.5", "1"], ["20", "0.2", "0.5", "0.75", "No Log"]]  # fmt: skip
ROWS = {"step": [10, 20], "reward": [0.25, 0.5], "loss": [-0.1, 0.2], "rewards/fits/mean": [0.5, 0.75]}


def read(path, text, name="log.txt"):
    (path / name).write_text(text)
    return read_log(path / name)


def columns(log, *names):
    return {name: [row.get(name) for row in log.rows] for name in names}


@pytest.mark.parametrize(
    "text",
    [
        TRL.format(0.5, 0.25) + "\n\n" + TRL.format("nan", 0.5),
        TRL.format("'0.5'", "'0.25'") + "\r" + TRL.format("'nan'", "'0.5'"),  # transformers 5
        "  9%|▉ | 1/11 [00:10<03:00, 2.1s/it]" + TRL.format("tensor(0.5, device='cuda:0')", "np.float64(0.25)")
        + "\n[rank0] 2025-01-02 INFO " + TRL.format("tensor([[nan]])", "0.5, 'kl': tensor([1., 2.])") + " 18%|█ | 2/11",
        TRL.format(0.5, 0.25) + TRL.format("NaN", 0.5),
        TRL.format(0.5, 0.25).replace("'rewards", "\n'rewards").replace("epo", "ep\no") + TRL.format("nan", 0.5),
        TRL.format(0.5, 0.25)[1:] + "\nSaving model checkpoint\n" + TRL.format("nan", 0.5)[:-1],
        json.dumps({"reward": 0.25, "grad_norm": 0.5, "rewards/fits": 0.5}, indent=1)
        + '\n{"reward": 0.5, "grad_norm": NaN, "rewards/fits": 0.5}',
    ],
    ids=["dicts", "strings", "bars and arrays", "one line", "wrapped", "without braces", "over lines"],
)  # fmt: skip
def test_what_trl_prints(tmp_path, text):
    log = read(tmp_path, text)
    assert columns(log, "kl") == {"kl": [None, None]}
    found = columns(log, "step", "reward", "grad_norm", "rewards/fits/mean")
    assert found == {"step": [1, 2], "reward": [0.25, 0.5], "grad_norm": [0.5, None], "rewards/fits/mean": [0.5] * 2}
    assert [row["skipped"] for row in log.rows] == [0, 1]
    facts = facts_of_log(log.rows)
    assert (facts.unit, facts.every) == ("step" if "1/11" in text and "rank0" not in text else "row", 1)


def test_the_steps_of_progress_bars_count_where_every_row_has_one(tmp_path):
    text = "".join(f"  {n}%|█ | {n}/100 [00:10<03:00, 2.1s/it]\n{TRL.format(0.5, n)}\n" for n in range(5, 30, 5))
    log = read(tmp_path, text)
    assert columns(log, "step", "reward") == {"step": [5, 10, 15, 20, 25], "reward": [5, 10, 15, 20, 25]}
    facts = facts_of_log(log.rows)
    assert (facts.unit, facts.every) == ("step", 5)
    torn = read(tmp_path, f"  1%|█ | 1/100 [00:10<03:00, 2.1s/it]{TRL.format(0.5, 9)[:40]}\n{text}")
    assert columns(torn, "step", "reward") == {"step": [1, 5, 10, 15, 20, 25], "reward": [None, 5, 10, 15, 20, 25]}
    evaluated = "\n100%|█| 8/8 [00:10<00:00, 2it/s]\n{'eval_loss': 0.3, 'eval_reward': 0.75}\n  "
    beside = read(tmp_path, text.replace("}\n  ", "}" + evaluated))
    assert columns(beside, "step", "eval/accuracy") == {
        "step": [5, 10, 15, 20, 25],
        "eval/accuracy": [0.75] * 4 + [None],
    }
    other = read(tmp_path, text.replace("25/100", "3/100"))  # a bar of something else
    assert columns(other, "step") == {"step": [1, 2, 3, 4, 5]}
    assert diagnose(tmp_path / "log.txt").steps == 5


def test_an_evaluation_is_no_row_of_its_own(tmp_path):
    text = TRL.format(0.5, 0.25) + "\n{'eval_loss': 0.1, 'eval_reward': 0.75, 'reward': 0.0}\n" + TRL.format(0.5, 0.5)
    found = columns(read(tmp_path, text + "\n{'train_runtime': 7.5, 'train_loss': 0.1}"), "reward", "eval/accuracy")
    assert found == {"reward": [0.25, 0.5], "eval/accuracy": [0.75, None]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"reward": 0.5, "entropy/mean": 0.75, "entropy/max": 2, "global_step/max_steps": "5/1000"}',
         {"step": [5], "reward": [0.5], "entropy": [0.75]}),  # ms-swift
        ("Episode [1/2]:  5%|▌ | 1/20 [1:02<3:00, policy_loss=-0.1, kl=1e-3, reward=0.5, response_length=64.0]\n"
         "Episode [1/2]: 10%|▌ | 2/20 [1:02<3:00, policy_loss=0.1, kl=nan, reward=0.75, response_length=65.0]",
         {"step": [1, 2], "reward": [0.5, 0.75], "kl": [1e-3, None], "completions/mean_length": [64, 65]}),  # OpenRLHF
        ("INFO ✨ Global step 7: {'policy_loss': 0.1, 'actor_lr': 5e-07, 'reward': 0.5, 'response_length': 64.5}",
         {"step": [7], "reward": [0.5], "loss": [0.1], "learning_rate": [5e-7], "completions/mean_length": [64.5]}),
        ("r:9 - perf 3: {'rollout/raw_reward': 0.5, 'rollout/response_len/mean': 64, 'rollout/truncated_ratio': 0.25}"
         "\nm:9 - step 3: {'train/kl_loss': 0.125, 'train/grad_norm': 2.0, 'train/step': 3}",
         {"step": [3], "reward": [0.5], "kl": [0.125], "completions/clipped_ratio": [0.25]}),  # slime
        ("step:7 - actor/entropy:0.5 - critic/score/me\nan:0.25 - response_length/mean:6\n4.5 - actor/lr:1e-6 -\n"
         "actor/grad_norm:2\n- actor/kl_loss:0.125\n\nsaved\nstep:8 - critic/score/mean:0.5\n",
         {"step": [7, 8], "reward": [0.25, 0.5], "kl": [0.125, None], "completions/mean_length": [64.5, None]}),  # verl
        ("12:00 SUCCESS Step 28 | Time: 7.7s | Reward: 0.25 | Throughput: 24.9 tok/s | Seq. Length: 64.5 tokens/sample"
         "\n12:01 INFO Starting step 29\n12:02 SUCCESS Step 29 | Time: 7.8s | Reward: 0.5 | Entropy: 1.5",
         {"step": [28, 29], "reward": [0.25, 0.5], "completions/mean_length": [64.5, None]}),  # prime-rl
        ("=== Step 1/9 ===\n  • Loss: 0.5\n  • Avg Reward: 0.25\n  • Mean Generation Length: 64\nTotal time: 7.5s\n"
         "=== Step 2/9 ===\n  • Loss: 0.25\n  • Avg Reward: 0.5",
         {"step": [1, 2], "reward": [0.25, 0.5], "loss": [0.5, 0.25], "completions/mean_length": [64, None]}),  # NeMo
        ("(W pid=1) │ ppo_actor/task_reward/avg │ 2.5e-01 │ ppo_actor/grad_norm │ 2.0 │\n(W pid=1) ╞════╪═══╡\n"
         "(W pid=1) │ ppo_actor/task_reward/avg │ 5.0e-01 │ ppo_actor/grad_norm │ nan │",
         {"step": [1, 2], "reward": [0.25, 0.5], "grad_norm": [2.0, None]}),  # AReaL
        ("Iter 1: Val loss 3.0, Val total_rewards_mean 9.0\nIter 5: Train loss 0.5, Total rewards mean 0.25, "
         "Total rewards std 7.0, KL 0.125, Learning Rate 1.000e-05, It/sec 0.1",
         {"step": [5], "reward": [0.25], "loss": [0.5], "kl": [0.125], "learning_rate": [1e-5]}),  # MLX
        ("Step 1 | loss:0.5 rewards:0.25 kl_loss:0.125 lr:2e-05\nStep 2 | loss:0.25 rewards:0.5 kl_loss:0.25 lr:2e-05",
         {"step": [1, 2], "reward": [0.25, 0.5], "kl": [0.125, 0.25], "loss": [0.5, 0.25]}),  # torchtune
        ("step: 10\nmean reward: 0.25\nkl: 0.125\nstep: 20\nmean reward: 0.5\nkl: 0.25",
         {"step": [10, 20], "kl": [0.125, 0.25]}),
        ("> step 10 reward 0.25 kl 0.125\n> step 20 reward 0.5 kl 0.25", {"step": [10, 20], "kl": [0.125, 0.25]}),
        ("[Step 10/100] reward: 0.25±0.1 | kl: 0.125\nStep 20 metrics: {'reward': array(0.5, dtype=float32)},",
         {"step": [20], "reward": [0.5]}),
        ("Step | reward\\_std | reward\n-- | -- | --\n10 | 0.125 | 0.25\n20 | 0.25 |",
         {"step": [10, 20], "reward_std": [0.125, 0.25], "reward": [0.25, None]}),
        ("reward=0.25\nkl=0.125\nreward=0.5\nkl=0.25", {"step": [1, 2], "reward": [0.25, 0.5], "kl": [0.125, 0.25]}),
        ("wandb:   train/global_step 250\nwandb:    train/reward 0.25\nwandb:  train/kl ▁▂",
         {"step": [250], "reward": [0.25]}),
        ("wandb:   critic/score/mean 0.25\nwandb:    training/global_step 54\nwandb:  zoo ▁▂",
         {"step": [54], "reward": [0.25]}),
        (" [12:00] iteration   7/ 21 | samples:  448 | elapsed time: 17m 33s | learning rate: 4.5E-05 | loss: -2.0E-06 "
         "| reward: 2.5E-01 | rewards/Fits/mean: 5.0E-01 | loss scale: 1.0 | grad norm: 0.016 | skipped:   0 |",
         {"step": [7], "reward": [0.25], "loss": [-2e-6], "grad_norm": [0.016], "rewards/Fits/mean": [0.5]}),  # swift
        ("= [all] - METRICS STEP 2 ===\n  grpo_loss/kl_divergence_max: 51.7\n  grpo_loss/kl_divergence_mean: 0.5\n"
         "  reward/evaluate_response/avg_total_reward: 0.25\n= [all] - METRICS STEP 3 ===\n  grpo_loss/total_loss: 2",
         {"step": [2, 3], "reward": [0.25, None], "kl": [0.5, None], "loss": [None, 2]}),  # torchforge
        ("stats: {'objective/kl': array(0.5, dtype=float32), 'kl_dist': array([0., 0.]), 'ppo/mean_scores': .25, "
         "'ppo/loss/policy': array(2., dtype=float32)}", {"reward": [0.25], "kl": [0.5], "loss": [2]}),  # old TRL
        ('{"current_steps": 10, "total_steps": 50, "loss": 0.5, "eval_loss": null, "reward": 0.25, "percentage": 20.0}',
         {"step": [10], "reward": [0.25]}),  # LLaMA-Factory
        ("Step 1,000 | reward: 1,234.5 | clipped_ratio: 12% | kl: .5\nStep 1,010 | reward: 60.5 % | kl: 0.5",
         {"step": [1000, 1010], "reward": [1234.5, 0.605], "completions/clipped_ratio": [0.12, None]}),
        ("['Step 3 | Reward: 0.25 | Time: 7.4s', 'x: 100%| 8/8', 'Step 4 | Reward: 0.5 | Time: 7.5s']",
         {"step": [3, 4], "reward": [0.25, 0.5]}),
        ("Step 1 | format reward: 9 | reward: 0.25 | value loss: 9 | loss: 0.5 | init kl: 9 | kl: 0.125 | KL time: 9s"
         "\nValidation at step 1: reward: 0.75, kl: 9\n12:00 INFO Step 2 | Training reward: 0.5\n[eval] reward: 0.875",
         {"step": [1, 2], "reward": [0.25, 0.5], "loss": [0.5, None], "kl": [0.125, None],
          "eval/accuracy": [0.75, 0.875]}),
        ("kl: 9\nreward: 9\nStep 10\nloss: 2\nreward: 0.25\nStep 20\nloss: 1\nreward: 0.5",
         {"step": [10, 20], "reward": [0.25, 0.5], "loss": [2, 1], "kl": [None, None]}),
        ("Step 3\n{'actor': {'entropy': 0.5,\n           'grad_norm': 2},\n 'reward': 0.25}\nStep 4\n{'reward': 0.5}",
         {"step": [3, 4], "reward": [0.25, 0.5], "entropy": [0.5, None], "grad_norm": [2, None]}),
        ("loss = 9\niteration 9\nloss = 0.5\nreward = 0.25\niteration 10\nloss = 0.25",
         {"step": [9, 10], "loss": [0.5, 0.25]}),
    ],
)  # fmt: skip
def test_what_others_print(tmp_path, text, expected):
    assert columns(read(tmp_path, text), *expected) == expected


def html(rows):
    cells = ["".join(f"\n<t{'dh'[not n]}>{cell}</t{'dh'[not n]}>" for cell in row) for n, row in enumerate(rows)]
    return "<table><thead>" + "\n".join(f'<tr style="x">{row}</tr>' for row in cells) + "</table>"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("\n".join(" | ".join(row) for row in (TABLE[0], ["--"] * 5, *TABLE[1:])), "a table with bars"),
        ("\n".join("| " + " | ".join(row) + " |" for row in (TABLE[0], [":--"] * 5, *TABLE[1:])), "a table with bars"),
        ("\n".join("\t".join(row) for row in TABLE), "a table with tabs"),
        (html(TABLE), "a table with tabs"),
        ("\n".join(";".join(row).replace(".", ",") for row in TABLE), "CSV by semicolons"),
        ("\n".join("   ".join([index, *row]) for index, row in zip(["", "0", "1"], TABLE, strict=True)), "a table"),
        ("\n".join(",".join(row) for row in TABLE), "CSV"),
        ("\n".join(",".join(f'"{cell}"' for cell in [*row, "x" * 200_000]) for row in TABLE), "CSV"),
        (json.dumps(dict(zip(TABLE[0], zip(*TABLE[1:], strict=True), strict=True))), "JSON"),
        (json.dumps({"log_history": [dict(zip(TABLE[0], row, strict=True)) for row in TABLE[1:]]}), "TRL, log.txt"),
        (json.dumps({row[0]: dict(zip(TABLE[0][1:], row[1:], strict=True)) for row in TABLE[1:]}, indent=1), "JSON"),
    ],
)
def test_tables(tmp_path, text, kind):
    log = read(tmp_path, text)
    assert columns(log, *ROWS) == ROWS
    assert columns(log, "entropy") == {"entropy": [1, None]}
    assert log.source.startswith(kind)
    facts = facts_of_log(log.rows)
    assert (facts.unit, facts.every) == ("step", 10)


def test_charts_of_wandb_and_tensorboard(tmp_path):
    name = "a-run - train/reward"
    chart = f'"Step","{name}","{name}__MIN","{name}__MAX"\n"10","0.25","0","1"\n'
    log = read(tmp_path, chart)
    assert columns(log, "step", "reward") == {"step": [10], "reward": [0.25]}
    assert log.source == "a chart of the run a-run and CSV"
    two = chart.replace('__MAX"', '__MAX","b-run - train/reward"').replace('"1"\n', '"1","9"\n')
    with pytest.raises(InputError, match=r"holds the charts of 2 runs \(a-run, b-run\); keep the columns of one"):
        read(tmp_path, two)
    board = "Wall time,Step,Value\n17.5,10,0.25\n"
    names = {"train_reward": "reward", "train_completions_mean_length": "completions/mean_length"}
    names |= {"train_rewards_fits_mean": "rewards/fits/mean", "critic_score_mean": "reward"}
    for name, metric in names.items():
        found = columns(read(tmp_path, board, f"run-x-tag-{name}.csv"), "step", metric)
        assert found == {"step": [10], metric: [0.25]}
    with pytest.raises(InputError, match="whose name is only in the file's name: name the file as TensorBoard does"):
        read(tmp_path, board, "export.csv")


def test_a_refusal_says_what_was_found_and_what_was_looked_for(tmp_path):
    with pytest.raises(InputError, match=r"Found: JSON Lines \(.* 2\): colour, size. Looked for: step, reward, .*kl"):
        read(tmp_path, '{"colour": 3, "size": 4}\n{"colour": 4}\n')
    with pytest.raises(InputError, match=r"Found: text \(lines not read: 2\): no names of metrics"):
        read(tmp_path, "hello\nworld 3\n")
    with pytest.raises(InputError, match=r"is not a log: it holds numbers for reward once"):
        read(tmp_path, "reward = 1.0")
    for name, head in {
        "safetensors": b"\x40\0\0\0\0{'reward': 1}",
        "zip": b"PK\x03\x04\x14\0\0\0reward: 1, loss: 2",
    }.items():
        (tmp_path / name).write_bytes(head)
        with pytest.raises(InputError, match="is a binary file, not text; give what a trainer prints or writes"):
            read_log(tmp_path / name)
    (tmp_path / "sparse").write_bytes(b"\0" * 9999 + b"reward: 0.5 loss: 1\n\x1b[0m\n")  # cut by logrotate
    assert len(read_log(tmp_path / "sparse").rows) == 1
    for name in ("/proc/kmsg", "/sys/kernel/uevent_seqnum", "/dev/zero"):
        with pytest.raises(InputError, match="cannot be read"):
            diagnose(name)


def test_settings_samples_and_prose_are_no_log(tmp_path):
    """Metrics in a text count where there is no better log beside it, and dicts with few where others have many."""
    row = TRL.format(0.5, 0.25)
    text = f"""learning_rate: 1e-6\nclip_ratio=0.2\nthe reward: 7
config = {{'learning_rate': 1e-6, 'kl': 0.05, 'kl_penalty': 'kl', 'reward_fn': 'x'}}
[response] {{"answer": 5, "reward": 10}}
{row}
{row}
I had set 'reward': 5 before.
{{'eval_reward': 0.75}}
{row.replace("0.25", "0.5")}
RuntimeError: CUDA error: loss: 3 reward = 9
"""
    log = read(tmp_path, text)
    expected = {"step": [1, 2, 3], "reward": [0.25, 0.25, 0.5], "kl": [None] * 3, "eval/accuracy": [None, 0.75, None]}
    assert columns(log, *expected) == expected
    for text in (
        "{'learning_rate': 1e-6, 'reward': 1.0, 'kl': 0.05, 'beta': 0.04}",
        "I give a reward: 1.0 for a right answer and for the format, and the loss: 0.3\nwas fine after 20 steps.",
        "| Setting | reward | kl |\n|---|---|---|\n| ours | 0.5 | 0.1 |\n| theirs | 0.25 | 0.2 |",
    ):
        with pytest.raises(InputError):
            read(tmp_path, text)


def test_rows_of_a_second_run_are_told(tmp_path):
    log = read(tmp_path, "step,reward,kl\n1,0.25,1\n2,0.5,1\nstep,reward\n1,0.75\n2,1\n")
    assert columns(log, "step", "reward") == {"step": [1, 2], "reward": [0.75, 1]}
    assert log.source == "CSV (rows of repeated steps, of which the last count: 2)"


def test_objects_that_hold_rows():
    listed = [{"step": n, "reward": n / 10, "kl": 0.1} for n in range(1, 6)]
    by_column = {key: [row[key] for row in listed] for key in listed[0]}

    class State:
        log_history = listed

    class Trainer:
        state = State()

    class Frame:  # of polars
        to_dicts = staticmethod(lambda: listed)

    table = np.array([tuple(row.values()) for row in listed], dtype=[(key, float) for key in listed[0]])
    by_index = {key: dict(enumerate(column)) for key, column in by_column.items()}
    for given in (listed, by_column, by_index, State(), Trainer(), Frame(), table, {"log_history": listed}):
        assert str(diagnose(given)) == str(diagnose(listed))


class Raising:
    @property
    def output(self):
        raise RuntimeError("no output")


def cut():
    yield {"reward": 1.0}
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    "given", [Raising(), cut(), {"reward": [1, 2], "step": [1]}, {"a": [1]}, np.ones((2, 2)), [[]]]
)
def test_what_cannot_be_rows_is_refused_in_a_sentence(given):
    with pytest.raises(InputError, match=r"^run .*\.$"):
        diagnose(given)


@pytest.mark.parametrize("key", ["algorithm", "baseline", "schedule", "prompts_per_step"])
@pytest.mark.parametrize("value", ["[a]", "{a: 1}", "0x" + "f" * 5000, "1.5"])
def test_settings_that_no_run_writes_are_refused_in_a_sentence(tmp_path, key, value):
    (tmp_path / "config.yaml").write_text(f"{key}: {value}\n")
    with pytest.raises(InputError, match=rf"^config.yaml: {key} has a value that oblrpo train never writes"):
        diagnose(tmp_path)


def test_rows_take_little_memory_and_keep_their_order():
    """What differs from row to row, steps that come again, and numbers that are none."""
    entries = [{"step": n % 70, f"k{n}": n, "reward": None if n < 3 else n, "kl": math.inf} for n in range(100, 0, -1)]
    rows = Rows(entries)
    assert [row["step"] for row in rows] == list(range(70))
    assert rows[1] == {"step": 1, "k71": 71, "k1": 1, "reward": 71, "kl": None, "skipped": 1, "overflow": "kl"}
    assert rows[-1] == list(rows)[-1]
    assert sum(len(array) * array.itemsize for array in (rows._values, rows._step_E)) < 5_000
