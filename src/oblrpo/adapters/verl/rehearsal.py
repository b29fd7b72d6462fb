"""Passes over two short rows before anything is sampled: what would not be exact is refused then, with its cure."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from oblrpo.adapters.verl.checks import MODEL
from oblrpo.adapters.verl.movement import low_precision
from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.policy.rehearsal import MIXES, MIXES_SHORT, check_lengths, noise, two_rows
from oblrpo.scores import UnsupportedModelError

PROMPT, RESPONSE = 3, 5
"""Tokens of each row's parts."""

UNPACK = f"set {MODEL}.use_remove_padding=False."


def rehearse(engine: Any, exact_pairs: bool, longest: int) -> None:
    """Take scores of two short rows, as a step would; the model stays what it is. Every rank must call it.

    `exact_pairs`: whether exact inner products are taken; `longest`: most tokens of a row; 0: the model's context.
    """
    policy, packed = Policy(engine.module, None, bf16=low_precision(engine)), engine.use_remove_padding
    with engine.eval_mode():
        check_lengths(policy, lambda: longest or policy.longest)  # vLLM goes by the longest row that it allows
        engine.module.train()  # in which verl takes its gradient
        if found := noise(policy):
            raise InputError(f"oblr_po takes no noise in forwards ({found}): set it to 0 in {MODEL}.override_config.")
        engine.module.eval()
    try:
        logp_C = _log_probs(engine, 0, packed, exact_pairs)
    except UnsupportedModelError as error:
        raise InputError(f"oblr_po cannot take this model's scores: {error}{_cure(str(error), packed)}") from None
    if not packed:
        return
    if names := [name for name, module in engine.module.named_modules() if isinstance(module, torch.nn.Conv1d)]:
        raise InputError(  # frozen ones, too; what they do to random weights may be too little to be seen below
            f"oblr_po does not work with {MODEL}.use_remove_padding=True and this model: {names[0]} is a convolution "
            f"along tokens, as hybrids have, which runs on from one packed row to the next; {UNPACK}"
        )
    change = float((_log_probs(engine, 1, packed, exact_pairs) - logp_C).abs().max())
    if not change <= (MIXES_SHORT if low_precision(engine) else MIXES):
        raise InputError(
            f"oblr_po does not work with {MODEL}.use_remove_padding=True and this model: a token's log-probability "
            f"changes with the row before it, by {change:.2g} nats, as in linear attention, Mamba and convolutions "
            f"that run on from row to row; {UNPACK}"
        )


def _cure(error: str, packed: bool) -> str:
    if "lora_" in error:
        return f" Adapters of linear layers are taken: set {MODEL}.target_modules=[q_proj,k_proj,v_proj,o_proj]."
    if packed:
        return f" Hybrids (linear attention, Mamba, convolutions) are taken where rows are not packed: {UNPACK}"
    return ""


def _log_probs(engine: Any, shift: int, packed: bool, exact_pairs: bool) -> Tensor:
    """Log-probabilities of the second row's response, after a first row of tokens that are `shift` others."""
    with engine.eval_mode():
        columns = engine.score(_rows(engine, shift, packed, exact_pairs))["model_output"]
    log_probs: Tensor = columns["log_probs"].unbind()[1]
    return log_probs[PROMPT - 1 : PROMPT - 1 + RESPONSE]


def _rows(engine: Any, shift: int, packed: bool, exact_pairs: bool) -> TensorDict:
    """Two outputs of one prompt, as a step hands them to the engine."""
    rows = list(two_rows(PROMPT + RESPONSE, engine.module.config.get_text_config().vocab_size, shift))
    tensors = {
        "input_ids": rows,
        "position_ids": [torch.arange(len(ids)) for ids in rows],
        "prompts": [ids[:PROMPT] for ids in rows],
        "responses": [ids[PROMPT:] for ids in rows],
        "response_mask": [torch.ones_like(ids[PROMPT:]) for ids in rows],
    }
    nested = {key: torch.nested.as_nested_tensor(each, layout=torch.jagged) for key, each in tensors.items()}
    data = tu.get_tensordict({**nested, "uid": ["rehearsal"] * len(rows)}, {})
    tu.assign_non_tensor(
        data,
        use_remove_padding=packed,
        use_dynamic_bsz=False,
        use_fused_kernels=False,
        micro_batch_size_per_gpu=len(rows),
        temperature=1.0,
        calculate_entropy=True,
        oblrpo_group_size=len(rows) if exact_pairs else 0,
    )
    return data
