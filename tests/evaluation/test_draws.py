"""Every batch of an evaluation has a seed of its own, which decides its draws."""

from oblrpo.evaluation.sampled import SavedCompletions, collect
from oblrpo.rollout import make_sampler
from oblrpo.settings import RolloutConfig, SamplingConfig
from oblrpo.tasks import Problem


def test_batches_of_one_question_are_drawn_differently_and_every_time_alike(tiny_policy, tmp_path):
    """The same question three times, a batch each: under one seed they would have the same completions."""
    sampler, problems = make_sampler(tiny_policy, RolloutConfig()), [Problem("1 + 1 =", "2")] * 3

    def drawn(name, seed):
        asked = SamplingConfig(samples=4, max_completion_length=8, problems_per_batch=1, seed=seed)
        saved = SavedCompletions(tmp_path, name)
        done = []
        collect(tiny_policy, lambda: sampler, problems, asked, saved, lambda *progress: done.append(progress[:2]))
        assert done == [(0, 3), (1, 3), (2, 3), (3, 3)]
        texts = [row["completion"] for row in saved.rows()]
        return [tuple(texts[start : start + 4]) for start in range(0, 12, 4)]

    first = drawn("first", seed=0)
    assert len(set(first)) == 3
    assert drawn("again", seed=0) == first
    assert not set(drawn("other", seed=1)) & set(first)
