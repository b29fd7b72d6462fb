"""A model's own generation defaults: set aside while we sample, and saved as they came."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from oblrpo.policy.adapters import without_adapters


@contextmanager
def own_settings_aside(model: Any) -> Iterator[None]:
    """Set a model's own generation defaults aside, such as top-p: they would change the distribution."""
    # PEFT hands its model's on to the one beneath.
    models = list({id(part): part for part in (model, without_adapters(model))}.values())
    defaults = [part.generation_config for part in models]
    for part in models:
        part.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for part, own in zip(models, defaults, strict=True):
            part.generation_config = own


def save_model(model: Any, folder: Path, end_tokens: list[int]) -> None:
    """Write a model with its generation config as it is, but for the tokens that end a completion.

    transformers refuses to write some configs that models come with, such as a temperature without do_sample.
    """
    with own_settings_aside(model):
        model.save_pretrained(folder)
    own = copy.deepcopy(model.generation_config)
    if end_tokens not in ([own.eos_token_id], own.eos_token_id):
        own.eos_token_id = end_tokens
    own.to_json_file(folder / "generation_config.json")
