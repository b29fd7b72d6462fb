import pytest

from tests.scores.stay_double import StayDouble


@pytest.fixture
def stay_double():
    with StayDouble():
        yield
