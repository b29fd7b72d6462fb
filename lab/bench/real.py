"""A workload of a model that somebody has, on text that somebody has written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from lab.bench.workload import Workload
from oblrpo.errors import InputError
from oblrpo.policy import load_policy
from oblrpo.settings import PolicyConfig
from oblrpo.tasks.rows import text_of
from oblrpo.tasks.sources import read_source

COLUMNS = ("text", "prompt", "question")
"""Where the text of a row may stand."""

GROUP_SIZE, SEQUENCES, TOKENS = 8, 8, 96


def load(
    name: str, data: Sequence[str], sequences: int, tokens: int, device: str, dtype: torch.dtype, seed: int = 0
) -> Workload:
    """Return a workload of a model and of texts; rewards and baselines are drawn from `seed`.

    Texts follow one another, with an end token between, and are cut into rows of as many tokens: no row has padding.

    Raises:
        InputError: the model or the data cannot be read, there is too little text, or no parameter is trained.
    """
    texts = [_text(row, place) for place, row in read_source(data, "train")]
    policy = load_policy(name, PolicyConfig(model=name, device=device), train=False)
    if tokens > policy.longest:
        raise InputError(f"--tokens is {tokens}, but {name} reads {policy.longest}; lower it.")
    end = policy.end_tokens[:1]
    tokenized = policy.tokenizer(texts, padding=False, add_special_tokens=False).input_ids
    ids = list(islice((token for row in tokenized for token in [*row, *end]), sequences * tokens))
    if len(ids) < sequences * tokens:
        raise InputError(
            f"{data[0]} holds {len(ids)} tokens in {len(texts)} texts, but {sequences} sequences of {tokens} need "
            f"{sequences * tokens}; give more text, or lower --sequences or --tokens."
        )
    if not policy.parameters:
        raise InputError(f"{name} has no parameter to train; give a model without frozen weights.")
    group_size, wide = min(GROUP_SIZE, sequences), torch.promote_types(dtype, torch.float32)
    drawn = torch.Generator().manual_seed(seed)
    return Workload(
        model=policy.model.to(dtype),
        ids_ST=torch.tensor(ids, device=policy.device).view(sequences, tokens),
        rewards_S=torch.randn(sequences, dtype=wide, generator=drawn).to(policy.device),
        baseline_P=torch.randn(sequences // group_size, dtype=wide, generator=drawn).to(policy.device),
        group_size=group_size,
    )


def _text(row: dict[str, object], place: str) -> str:
    """Return the text of a row.

    Raises:
        InputError: it has none.
    """
    column = next((column for column in COLUMNS if column in row), None)
    if column is None:
        raise InputError(f"{place} has no column of text; name one of its columns: {', '.join(COLUMNS)}.")
    return text_of(row, column, place)
