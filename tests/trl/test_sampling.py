"""Completions are draws of the policy, or are refused by name: the config that generation really goes by."""

import logging
import re

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    GenerationConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from oblrpo.adapters.trl import VarianceLedgerCallback
from oblrpo.adapters.trl.advantages import sequences_of
from oblrpo.adapters.trl.sampling import NEUTRAL, OF_NO_EFFECT, altered, in_effect
from oblrpo.errors import InputError
from oblrpo.policy import Policy, byte_tokenizer
from tests.trl.support import assert_first_tokens, ours, theirs, tiny_policy

CHANGES = {
    "min_p": 0.1, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "typical_p": 0.9, "top_h": 0.5, "suppress_tokens": [65],
    "begin_suppress_tokens": [65], "no_repeat_ngram_size": 2, "min_new_tokens": 4, "min_length": 4,
    "bad_words_ids": [[65]], "num_beams": 2, "forced_bos_token_id": 65, "forced_eos_token_id": 65,
    "sequence_bias": [[[65], 2.0]], "guidance_scale": 2.0, "exponential_decay_length_penalty": (1, 1.5),
    "remove_invalid_values": True, "encoder_repetition_penalty": 1.2, "stop_strings": ["a"], "max_time": 1.0,
    "prompt_lookup_num_tokens": 2, "use_mtp": True, "cache_implementation": "quantized", "num_return_sequences": 2,
    "watermarking_config": {"bias": 2.0}, "token_healing": True, "dola_layers": "low", "assistant_early_exit": 1,
}  # fmt: skip
"""Fields that no parameter of TRL's sets, as a model's generation_config.json may have them."""


def with_own(**fields):
    """A policy whose own generation config has these fields."""
    policy = tiny_policy()
    policy.model.generation_config = GenerationConfig(
        **{"eos_token_id": policy.tokenizer.eos_token_id, "do_sample": True} | fields
    )
    return policy


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_model_s_own_config_changes_is_named(tmp_path, caplog, name):
    """TRL fills from there what its own parameters leave unset."""
    for peft in (None, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")):
        caplog.clear()
        trainer = ours(tmp_path, with_own(**{name: CHANGES[name]}), peft_config=peft)
        [said] = [text for text in caplog.messages if "which is not the expected reward alone" in text]
        assert re.search(rf"{name}=.*of the model's own generation_config.*not samples of the policy", said)
        assert trainer._advantages.rows is None


def test_a_model_s_own_config_that_trl_overrules_is_taken(tmp_path, caplog):
    """What TRL sets itself, and fields whose value changes nothing."""
    own = {"top_p": 0.8, "top_k": 20, "temperature": 0.6, "repetition_penalty": 1.05, "do_sample": False}
    policy = with_own(**own, min_length=0, bad_words_ids=None, max_length=5, length_penalty=2.0, chat_format="chatml")
    config = in_effect(ours(tmp_path, policy, temperature=0.7))
    assert "not the expected reward" not in caplog.text
    assert (config.top_p, config.top_k, config.temperature, config.do_sample) == (1.0, 0, 0.7, True)


@pytest.mark.parametrize("top_k", [0, 2])
def test_top_k_none_is_filled_and_so_named(tmp_path, caplog, top_k):
    """With the model's own, or with transformers' 50."""
    ours(tmp_path, with_own(top_k=top_k), top_k=None)
    assert "top_k=None" in caplog.text


def test_features_of_the_draws_are_those_of_a_forward(tmp_path):
    """So that weights cost none; where draws are altered, a forward is taken."""
    trainer = ours(tmp_path, tiny_policy(torch.float64), temperature=0.8, max_steps=1)
    seen, of = [], trainer._advantages.of

    def kept(inputs, rewards_S, features):
        seen.append((features, trainer._advantages._features(sequences_of(inputs))))
        return of(inputs, rewards_S, features)

    trainer._advantages.of = kept
    trainer.train()
    [(drawn, forward)] = seen
    for name, values in vars(forward).items():
        torch.testing.assert_close(getattr(drawn, name).double(), values.double(), rtol=1e-6, atol=1e-6)
    trainer = ours(tmp_path, top_p=0.9, max_steps=1)
    trainer._advantages.of = lambda inputs, rewards_S, features: seen.append(features) or of(inputs, rewards_S, None)
    trainer.train()
    assert seen[1] is None


def test_every_field_that_transformers_knows_is_known_here():
    """One that a later version adds is refused until somebody has read what it does."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    only_none = {
        "max_time", "stop_strings", "top_h", "forced_bos_token_id", "forced_eos_token_id", "constraints", "dola_layers",
        "exponential_decay_length_penalty", "watermarking_config", "prompt_lookup_num_tokens", "assistant_early_exit",
        "force_words_ids", "temperature",
    }  # fmt: skip
    assert not set(NEUTRAL) & OF_NO_EFFECT
    assert fields - set(NEUTRAL) - OF_NO_EFFECT == only_none
    assert altered(GenerationConfig(do_sample=True, top_k=0, temperature=0.5), 1.0) == {"temperature": 0.5}


def test_continuous_batching_is_refused_where_it_rounds_what_is_trained(tmp_path):
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
        ours(tmp_path, **{name: True})
        with pytest.raises(InputError, match="continuous_batching=True under bf16=True"):
            ours(tmp_path, **{name: True}, bf16=True)
        ours(tmp_path, tiny_policy(torch.bfloat16), **{name: True}, bf16=True)


def test_continuous_batching_draws_from_the_policy(tmp_path):
    """Its first tokens against the policy's probabilities, by chi-square; it takes nothing from the model's config."""
    policy = with_own(min_p=0.5)
    small = {"num_blocks": 64, "max_batch_tokens": 128, "seed": 0}
    trainer = ours(
        tmp_path, policy, use_transformers_continuous_batching=True, transformers_continuous_batching_config=small,
        max_completion_length=1, temperature=0.3,
    )  # fmt: skip
    assert_first_tokens(trainer, policy, 0.3)


@pytest.mark.parametrize(("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_the_ledger_says_where_completions_are_not_the_policy_s(tmp_path, caplog, kind, config):
    words = {"kind": kind, "config": config, "beta": 0.0, "max_steps": 1}
    with caplog.at_level(logging.WARNING, "oblrpo"):
        VarianceLedgerCallback(theirs(tmp_path, with_own(top_p=0.8), **words))
        assert "VarianceLedgerCallback" not in caplog.text
        trainer = theirs(tmp_path, with_own(min_p=0.1), **words, generation_kwargs={"typical_p": 0.9})
        trainer.add_callback(VarianceLedgerCallback(trainer))
        [said] = [text for text in caplog.messages if text.startswith("VarianceLedgerCallback")]
    assert "min_p=0.1" in said
    assert "typical_p=0.9" in said
    trainer.train()
    assert "variance/rloo" in trainer.state.log_history[0]


SIZES = {
    "vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.5, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
OPT = {"vocab_size": 258, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 2,
       "num_attention_heads": 2, "init_std": 0.5, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 0}  # fmt: skip
NOISY = {
    "attention": lambda rate: LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=rate)),
    "seed-oss": lambda rate: SeedOssForCausalLM(
        SeedOssConfig(**SIZES, head_dim=8, attention_dropout=rate, residual_dropout=rate)
    ),
    "granite": lambda rate: GraniteForCausalLM(GraniteConfig(**SIZES, attention_dropout=rate)),
    "router": lambda rate: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=rate)),
    "hidden": lambda rate: OPTForCausalLM(OPTConfig(**OPT, dropout=rate)),
    "layers": lambda rate: OPTForCausalLM(OPTConfig(**OPT, dropout=0.0, layerdrop=rate)),
}  # fmt: skip
"""Models with noise while they train that TRL's `disable_dropout` does not reach."""


def policy_of(make, rate):
    torch.manual_seed(0)
    return Policy(make(rate), byte_tokenizer())


@pytest.mark.parametrize("kind", NOISY)
def test_completions_are_drawn_without_the_noise_of_training(tmp_path, kind):
    """The same completions from the same seed as of a model without it; TRL's own trainer draws others."""
    drawn = []
    for rate, trainer_of in ((0.0, ours), (0.5, ours), (0.5, theirs)):
        trainer = trainer_of(tmp_path, policy_of(NOISY[kind], rate), disable_dropout=True)
        modes = [module.training for module in trainer.model.train().modules()]
        torch.manual_seed(5)
        drawn.append(trainer._generate_single_turn([[40, 41, 42]] * 64, None, {}, 64)[0])
        assert [module.training for module in trainer.model.modules()] == modes
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    "given",
    [
        {"peft_config": LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=["adapters", "NEFTune"],
)
def test_noise_that_is_not_there_yet_is_named_and_kept_out_of_the_measured_rate(tmp_path, caplog, given):
    trainer = ours(tmp_path, max_steps=3, learning_rate=0.01, **given)
    assert re.search(r"noise in TRL's forward \(.*(dropout|neftune_noise_alpha=5)", caplog.text)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "step_kl" in log]
    assert len(logs) == 3
    assert all(0 < log["step_kl"] < 1 for log in logs)


@pytest.mark.parametrize("kind", ["attention", "hidden"])
def test_the_noise_of_trl_s_loss_is_named(tmp_path, caplog, kind):
    """Its log-probabilities do not say how far an update moved the policy: forwards without noise do."""
    for rate in (0.0, 0.5):
        caplog.clear()
        trainer = ours(tmp_path, policy_of(NOISY[kind], rate), disable_dropout=True, max_steps=1)
        assert ("noise in TRL's forward" in caplog.text) == bool(rate)
        watch, seen = trainer._update.watch, []
        trainer._update.watch = lambda watch=watch, seen=seen: (change := watch(), seen.append(change()))[0]
        trainer.train()
        assert not seen[0].abs().max() > 1e-5  # before the update


def test_the_ledger_says_that_training_s_noise_is_in_the_completions(tmp_path, caplog):
    for rate, warned in ((0.1, True), (0.0, False)):
        caplog.clear()
        trainer = theirs(tmp_path, policy_of(NOISY["attention"], rate))
        modes = [module.training for module in trainer.model.modules()]
        VarianceLedgerCallback(trainer)
        assert ("noise='attention_dropout; the same tokens differ by" in caplog.text) == warned
        assert [module.training for module in trainer.model.modules()] == modes


def phi3(_):
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    return Phi3ForCausalLM(Phi3Config(**SIZES, original_max_position_embeddings=32, rope_parameters=rope))


def test_rows_that_would_depend_on_those_beside_them_are_refused(tmp_path):
    """The longest prompt and completion of the data count; prompts that are not known may be as long as the context."""
    policy = policy_of(phi3, 0)
    prompts = ["12345="] * 8
    ours(tmp_path, policy, prompts=prompts, max_completion_length=26)
    with pytest.raises(InputError, match=r"rows may have 33 tokens, but if one has more than 32, .*max_completion_l"):
        ours(tmp_path, policy, prompts=prompts, max_completion_length=27)
    streamed = Dataset.from_dict({"prompt": prompts}).to_iterable_dataset()
    with pytest.raises(InputError, match="rows may have 64 tokens"):
        ours(tmp_path, policy, words={"train_dataset": streamed}, max_completion_length=4)
