from contextlib import ExitStack

import pytest
import torch

from tests.scores.models import batch
from tests.scores.stay_double import StayDouble
from tests.scores.zoo import POSITIONS_BY_DEFAULT, build_family


@pytest.fixture
def stay_double():
    with StayDouble():
        yield


@pytest.fixture
def case():
    """Make a model of the zoo by its name, and a batch for it, which `logps` takes; one in float64 stays in float64."""
    with ExitStack() as modes:
        doubled = []

        def make(name, *shape, dtype=torch.float64, **changes):
            if dtype == torch.float64 and not doubled:
                doubled.append(modes.enter_context(StayDouble()))
            torch.manual_seed(0)
            model = build_family(name, dtype, **changes)
            return model, (*batch(*shape), name not in POSITIONS_BY_DEFAULT)

        yield make
