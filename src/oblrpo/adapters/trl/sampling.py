"""Whether a trainer of TRL's draws from the whole policy: by the generation config, or by what a rollout reports."""

from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from oblrpo.adapters.shared import Rule
from oblrpo.errors import InputError
from oblrpo.step.flow import log_ratio, mismatch_metrics

SAMPLES = "completions are then not samples of the policy whose score is taken"

RULES = (
    Rule("top_p", (1.0,), SAMPLES),
    Rule("top_k", (0,), f"{SAMPLES} (None is filled with the model's own, or 50)"),
    Rule("min_p", (None, 0), SAMPLES),
    Rule("repetition_penalty", (1.0,), SAMPLES),
    Rule("generation_kwargs", (None, {}), "they may change how completions are sampled"),
    Rule("vllm_structured_outputs_regex", (None, ""), SAMPLES),
)
"""Conditions on TRL's own parameters."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,), "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,),
    "diversity_penalty": (0,), "penalty_alpha": (0,), "top_k": (0,), "top_p": (1,), "min_p": (0,), "typical_p": (1,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "repetition_penalty": (1,), "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,),
    "guidance_scale": (1,), "remove_invalid_values": (False,), "token_healing": (False,), "use_mtp": (False,),
    "bad_words_ids": ([],), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": ({}, []),
    "cache_implementation": (
        "dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid",
        "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked",
    ),
}  # fmt: skip
"""Fields that change what is drawn, with the values beside None under which they do not; others only if None."""

OF_NO_EFFECT = frozenset(
    {
        "max_length", "max_new_tokens", "early_stopping", "length_penalty", "use_cache", "cache_config",
        "max_cache_len", "renormalize_logits", "output_attentions", "output_hidden_states", "output_scores",
        "output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id",
        "decoder_start_token_id", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
        "assistant_ensemble_weight", "max_matching_ngram_size", "speculation_type", "compile_config",
        "disable_compile", "continuous_batching_config", "low_memory", "prefill_chunk_size",
        "transformers_version",
    }
)  # fmt: skip
"""Fields that leave the distribution as it is at any value, where completions are sampled without an assistant."""

REPORTS = {
    "rollout_func": (
        0.05,
        "draw from trainer.model at args.temperature without top_p and its kin, and return for every token of "
        "completion_ids the log-probability that it was drawn with (any number where env_mask is 0).",
    ),
    "vLLM": (
        0.25,
        "make sure that it samples from the weights that are trained (the same model, without quantisation), and start "
        "a server of your own with --logprobs-mode processed_logprobs.",
    ),
}
"""Who reports log-probabilities: the most nats a token, in the mean, that they may be off the policy's, and the cure.

Rounding is less; vLLM rounds a float32 policy to bfloat16, which has been seen to be 0.1.
"""


def in_effect(trainer: Any) -> GenerationConfig:
    """The config that the trainer's generation will go by: `generate` fills what is unset from the model's own."""
    if getattr(trainer, "use_transformers_continuous_batching", getattr(trainer, "use_transformers_paged", False)):
        return trainer.generation_config  # nothing is filled there
    model = trainer.accelerator.unwrap_model(trainer.model)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    own, inner.generation_config = inner.generation_config, model.generation_config  # PEFT hands its model's on
    try:
        return inner._prepare_generation_config(trainer.generation_config)[0]
    finally:
        inner.generation_config = own


def altered(config: GenerationConfig, temperature: float) -> dict[str, Any]:
    """The fields of a config under which completions are no draws from softmax(logits / temperature), and their values.

    What is not known here, a field that a later transformers adds, counts as one of them; entries that transformers
    does not know either are not read by it.
    """
    neutral = NEUTRAL | {"temperature": (temperature,)}
    fields = {}
    for name in vars(GenerationConfig()):
        value = getattr(config, name, None)
        harmless = name.startswith("_") or name in OF_NO_EFFECT
        if not harmless and value is not None and value not in neutral.get(name, ()):
            fields[name] = value
    return fields


def not_the_policy_s(trainer: Any) -> dict[str, Any]:
    """What keeps any trainer of TRL's from drawing completions from the whole policy; empty where nothing does."""
    if getattr(trainer, "rollout_func", None) is not None:
        return {"rollout_func": trainer.rollout_func}
    if trainer.args.use_vllm:
        there = [(rule, getattr(trainer.args, rule.key)) for rule in RULES if hasattr(trainer.args, rule.key)]
        return {rule.key: value for rule, value in there if not rule.holds(value)}
    return altered(in_effect(trainer), trainer.temperature)


def check_reported(reported_SC: Tensor | None, token_logps_SC: Tensor, own_SC: Tensor, source: str) -> dict[str, float]:
    """Refuse completions that are not the policy's; return how far off they are, by TRL's keys.

    Args:
        reported_SC: the log-probabilities that they are said to have been drawn with.
        token_logps_SC: those of the policy, with the rows' common padding cut off.
        own_SC: which tokens are the policy's own.
        source: who says so, a name in `REPORTS`.
    """
    farthest, fix = REPORTS[source]
    if reported_SC is None or reported_SC.dim() != 2 or reported_SC.shape[1] < token_logps_SC.shape[1]:
        raise InputError(f"{source} does not return one log-probability per token; {fix}")
    try:
        mismatch = log_ratio(token_logps_SC, reported_SC[:, : token_logps_SC.shape[1]], own_SC)
    except ValueError:
        raise InputError(f"{source} returns invalid log-probabilities (NaN or above 0); {fix}") from None
    metrics = mismatch_metrics(*mismatch, clip_max=None)
    key = "sampling/sampling_logp_difference/"
    if metrics[f"{key}mean"] > farthest:
        raise InputError(
            f"the log-probabilities of {source} are {metrics[f'{key}mean']:.3g} nats per token off the policy's, "
            f"so its completions are not the policy's; {fix}"
        )
    return {name: value for name, value in metrics.items() if name.startswith(key)}
