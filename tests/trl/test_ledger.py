"""The ledger looks at a run and never ends it, under any TRL from 1.0 on."""

import logging
import subprocess
import sys

import pytest
import torch

from oblrpo.adapters.trl import VarianceLedgerCallback
from oblrpo.diagnosis import Watch
from oblrpo.diagnosis.of_updates import n_snr
from oblrpo.errors import InputError
from oblrpo.runs.logs import read_log
from oblrpo.scores import ScoreTape
from oblrpo.scores.recorder import ForwardRecorder
from tests.trl.support import theirs


def broken(monkeypatch, ledger, where):
    """Make one part of a look fail, as a bug or too little memory would."""

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no memory is left")

    target, name = {
        "the forward": (type(ledger._policy), "logps"),
        "the backward": (ForwardRecorder, "backward"),
        "the sketch": (ScoreTape, "sketch"),
        "the averages": (ledger._average, "add"),
        "the gathering": (ledger._trainer.accelerator, "gather"),
    }[where]
    monkeypatch.setattr(target, name, fail)


@pytest.mark.parametrize("where", ["the forward", "the backward", "the sketch", "the averages"])
def test_a_look_that_fails_warns_once_and_leaves_the_run_as_it_is(tmp_path, monkeypatch, caplog, where):
    """Weights and logs are those of a run without it, under the defaults of TRL that matter: dropout, checkpoints."""
    weights, logs = [], []
    for looks in (False, True):
        trainer = theirs(tmp_path, max_steps=3, gradient_checkpointing=True)
        if looks:
            ledger = VarianceLedgerCallback(trainer, every=1)
            broken(monkeypatch, ledger, where)
            trainer.add_callback(ledger)
        with caplog.at_level(logging.WARNING, "oblrpo"):
            trainer.train()
        weights.append(trainer.model.state_dict())
        logs.append([{k: v for k, v in log.items() if "time" not in k and "per_second" not in k}
                     for log in trainer.state.log_history])  # fmt: skip
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    assert str(logs[0]) == str(logs[1])
    said = [text for text in caplog.messages if text.startswith("VarianceLedgerCallback")]
    assert len(said) == 1
    assert "continues without it: OutOfMemoryError: no memory is left" in said[0]
    assert ledger._batch is None


def test_conditions_on_the_batch_read_what_it_logs(tmp_path):
    """N SNR of the steps that were looked at is that of the ledger's entries, though others lie between."""
    trainer = theirs(tmp_path, max_steps=41)
    trainer.add_callback(VarianceLedgerCallback(trainer, every=2))
    trainer.train()
    trainer.save_state()
    watch = Watch().over(read_log(tmp_path).rows)
    looked = [log for log in trainer.state.log_history if "variance/rloo" in log]
    assert [log["step"] for log in looked] == list(range(1, 42, 2))
    signal, noise = (sum(log[f"{key}/rloo"] for log in looked[-20:]) for key in ("signal2", "variance"))
    value, stderr, first, *_ = n_snr(watch.course)
    assert (value, first) == (pytest.approx(signal / noise), 3)
    assert stderr > 0
    assert not {"batch far below", "batch far above"} & watch.unchecked.keys()


def test_images_are_not_looked_at(tmp_path):
    """Scores of the text alone would be another policy's."""
    with pytest.raises(ValueError, match="images"):
        VarianceLedgerCallback(theirs(tmp_path))._score({"pixel_values": torch.zeros(8)}, 1)


def test_a_trainer_that_does_not_generate_is_refused(tmp_path):
    trainer = theirs(tmp_path)
    hidden = type("Hidden", (), {"__getattr__": lambda self, name: self.given(name)})()
    hidden.given = lambda name: getattr(trainer, name) if name != "_calculate_rewards" else getattr(None, name)
    with pytest.raises(InputError, match="generates as GRPOTrainer does"):
        VarianceLedgerCallback(hidden)


def test_another_series_of_trl_has_the_ledger_and_not_the_trainer():
    """Of the real TRL, whose version says another number."""
    code = (
        "import trl; trl.__version__ = '1.0.0'\n"
        "from oblrpo.adapters.trl import VarianceLedgerCallback\n"
        "from oblrpo import adapters\n"
        "for name in ('OBLRPOTrainer', 'OBLRPOConfig'):\n"
        "    try: getattr(adapters.trl, name)\n"
        "    except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("this is trl 1.0.0; install 'trl>=1.16,<1.17'") == 2
