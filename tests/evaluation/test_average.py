"""avg@k and its interval."""

import pytest

from oblrpo.evaluation.evaluate import Evaluation


@pytest.mark.parametrize(
    ("rewards_P", "interval"),
    [
        ([[0.0, 0.0], [1.0, 1.0]], (0.0, 1.0)),  # 0.5 +- 0.98, cut
        ([[-0.1, 0.1], [1.0, 1.0]], (-0.48, 1.48)),
        ([[0.0, 0.0], [0.9, 1.1]], (-0.48, 1.48)),
        ([[0.5, 0.5], [0.5, 0.5]], (0.5, 0.5)),
    ],
)
def test_the_interval_of_rewards_between_0_and_1_is_cut_to_it(rewards_P, interval):
    assert Evaluation(2, [], rewards_P).average().interval == pytest.approx(interval, abs=1e-3)
