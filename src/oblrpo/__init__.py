"""Reinforcement learning of language models that finds its learning rate and measures how noisy its gradient is.

    import oblrpo

    run = oblrpo.train("demo", output="runs/demo")          # a recipe, or model=, data=, reward= of your own
    print(run); run = oblrpo.load("runs/demo")              # what it says now; the same run in another program
    run.metrics[-1]["reward"], run.plot("reward", "n_snr")  # a dict a step; axes of matplotlib
    run.evaluate(), run.export()                            # held-out accuracy; a folder to share
    print(oblrpo.diagnose("runs/demo"))                     # what is wrong with a run, ours, TRL's or verl's

To train
    train       train a policy, with the settings of `oblrpo train`; returns a Run
    load        a run that is there already, by its folder
    Run         a run: metrics, plot(), samples(), policy, evaluate(), export(), diagnose(), report
    evaluate    avg@k and pass@k of any model, with intervals
    diagnose    what is wrong with a run, since when, and what to do
    InputError  what the user can fix, in one sentence

In a training loop of your own (torch alone is needed)
    ScoreTape   exact squared score norms of a batch, and its gradient, from one backward
    baseline    a baseline by name, of rewards and score norms; BASELINES is their table
    SNRSchedule the learning rate, measured or by the signal-to-noise ratio
    ledger      the variance of the gradient under every baseline

`help(oblrpo.train)` lists every setting. On the command line: `oblrpo --help`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0.dev0"

if TYPE_CHECKING:  # there is no __all__, with which `help(oblrpo)` would print every class in full
    from oblrpo.api import Run as Run
    from oblrpo.api import evaluate as evaluate
    from oblrpo.api import load as load
    from oblrpo.api import train as train
    from oblrpo.diagnosis import diagnose as diagnose
    from oblrpo.errors import InputError as InputError
    from oblrpo.estimators import BASELINES as BASELINES
    from oblrpo.estimators import SNRSchedule as SNRSchedule
    from oblrpo.estimators import baseline as baseline
    from oblrpo.estimators import ledger as ledger
    from oblrpo.scores import ScoreTape as ScoreTape

_PLACES = {
    **dict.fromkeys(("Run", "evaluate", "load", "train"), "oblrpo.api"),
    **{"diagnose": "oblrpo.diagnosis", "InputError": "oblrpo.errors", "ScoreTape": "oblrpo.scores"},
    **dict.fromkeys(("BASELINES", "SNRSchedule", "baseline", "ledger"), "oblrpo.estimators"),
}
"""Where each name comes from; it is imported when it is used, for torch takes seconds to load."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'oblrpo' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
