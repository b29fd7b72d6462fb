"""Every batch of an evaluation has a seed of its own, which decides its draws."""

from contextlib import suppress

import pytest

from oblrpo.errors import InputError
from oblrpo.evaluation import sampled
from oblrpo.evaluation.sampled import SavedCompletions, collect
from oblrpo.rollout import make_sampler
from oblrpo.rollout import transformers as rollout
from oblrpo.rollout.room import USED_SHARE, sampling_memory
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


def test_it_samples_as_many_at_once_as_fit_and_goes_on_with_as_many(tiny_policy, tmp_path, monkeypatch):
    """A batch of 6 problems x 2 with room for two of them; what goes on elsewhere does so with the same blocks."""
    problems = [Problem(f"{n} + 1 =", str(n + 1)) for n in range(12)]
    asked = SamplingConfig(samples=2, max_completion_length=8, problems_per_batch=6)
    sizes = []
    plain = rollout.sample
    monkeypatch.setattr(rollout, "sample", lambda *given: sizes.append(len(given[1])) or plain(*given))

    def drawn(name, groups, stop=None):
        memory, longest = sampling_memory(tiny_policy), len("11 + 1 =")
        free = memory.of(groups, 2, longest, 8) / USED_SHARE * 1.001
        monkeypatch.setattr(sampled, "free_bytes", lambda device: free)
        saved, sampler = SavedCompletions(tmp_path, name), make_sampler(tiny_policy, SamplingConfig())

        def progress(done, *_):
            if done == stop:
                raise KeyboardInterrupt

        sizes.clear()
        with suppress(KeyboardInterrupt):
            collect(tiny_policy, lambda: sampler, problems, asked, saved, progress)
        return saved.rows(), saved.settings()["max_num_seqs"]

    whole, at_once = drawn("whole", 100)
    assert (sizes, at_once) == ([6, 6], 12)
    blocks, at_once = drawn("blocks", 2)
    assert (sizes, at_once) == ([2] * 6, 4)
    assert whole != blocks
    assert whole[:2] != blocks[:2]  # the first row's draws depend on those beside it
    half, _ = drawn("stopped", 2, stop=6)
    assert half == blocks[:12]
    assert drawn("stopped", 100) == (blocks, 4)
    monkeypatch.setattr(sampled, "free_bytes", lambda device: 1000)
    said = r"a prompt's 2 completions \(samples\) of up to 8 tokens take .* are free for it: lower samples"
    with pytest.raises(InputError, match=said):
        collect(tiny_policy, lambda: None, problems, asked, SavedCompletions(tmp_path, "none"))
