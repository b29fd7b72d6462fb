"""What is drawn in a run has a seed of its own: each step, each evaluation."""

import torch

from tests.door.conftest import letters, loaded


def test_an_evaluation_is_drawn_from_another_seed_than_the_step_before_it(train):
    """The head is zero, so that a draw depends on its seed alone; equal draws would make accuracy follow the reward."""
    model, tokenizer = loaded(tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    drawn = []

    def watch(completions, **columns):
        drawn.append(completions)
        return letters(completions)

    sizes = {"prompts_per_step": 4, "num_generations": 3, "eval_prompts": 4, "eval_samples": 3, "eval_steps": 1}
    train(model=(model, tokenizer), reward=watch, algorithm="rloo", learning_rate=0.0, steps=2, **sizes)
    assert len(drawn) == 8  # evaluation, then twice a step and an evaluation; each is graded twice
    assert len(set(map(tuple, drawn))) == 5


def test_the_same_seed_draws_the_same(train, tmp_path):
    """The test above would hold of a sampler without any seed."""
    drawn = {}
    for name in ("one", "two"):
        mine = drawn[name] = []

        def watch(completions, mine=mine, **columns):
            mine.append(completions)
            return letters(completions)

        train(reward=watch, steps=1, output=tmp_path / name)
    assert drawn["one"] == drawn["two"]
