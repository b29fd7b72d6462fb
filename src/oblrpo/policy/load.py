"""Building a policy from nothing, or loading one: a model of the hub or a folder, its adapters, and its precision."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from oblrpo.config import PolicyConfig
from oblrpo.errors import InputError
from oblrpo.policy.adapters import add_adapter, base_of, load_adapter
from oblrpo.policy.model import Policy
from oblrpo.policy.prompts import PromptFormat
from oblrpo.policy.tokenizer import byte_tokenizer


def make_policy(config: PolicyConfig) -> Policy:
    """The policy that the config asks for: built with random weights, or loaded.

    Raises:
        InputError: no such device, settings that do not go together, or the model cannot be loaded.
    """
    check_policy(config)
    if config.model:
        return load_policy(config.model, config)
    device = _device(config.device)
    tokenizer = byte_tokenizer()
    heads = config.num_attention_heads
    if heads < 2 or heads % 2 or config.hidden_size < 1 or config.hidden_size % (2 * heads):
        raise InputError("num_attention_heads must be even, and hidden_size a multiple of twice that.")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_attention_heads // 2,
            head_dim=config.hidden_size // config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=True,
            initializer_range=config.initializer_range,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return _policy(model.to(device), tokenizer, config)


def load_policy(name: str, config: PolicyConfig, train: bool = True) -> Policy:
    """A causal LM and its tokenizer from a folder or, by name, from the hub; adapters with the model they are for.

    Raises:
        InputError: transformers cannot load it, or its tokenizer has neither padding nor end token.
    """
    if train:
        check_policy(config)
    device, base = _device(config.device), base_of(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(_whole(base or name), **_options(config, device))
    except Exception as error:  # transformers raises many kinds; all mean that this model cannot be had
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise InputError(f"cannot load the model {name!r}: {reason}.") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(f"the tokenizer of {name!r} has neither a padding nor an end token; set one in it.")
        tokenizer.pad_token_id = tokenizer.eos_token_id
    if not config.load_in_4bit:
        model = model.to(device)
    if base:
        model = load_adapter(model, name)
    elif train and getattr(model, "peft_config", None):  # of the hub: transformers has put them in, not to be trained
        raise InputError(f"{name!r} holds adapters; to train them, fetch them and give their folder as the model.")
    elif config.lora_r:
        model = add_adapter(model, config)
    return _policy(model, tokenizer, config, _whole(name))


def check_policy(config: PolicyConfig) -> None:
    """Refuse what does not go together.

    Raises:
        InputError: names the settings.
    """
    if config.lora_r < 0 or config.lora_alpha <= 0:
        raise InputError("lora_r must be at least 0 and lora_alpha above 0.")
    adapters = config.lora_r or (config.model and base_of(config.model))
    if adapters and not config.model:
        raise InputError("lora_r needs a model to adapt; name one with model.")
    if config.lora_r and config.model and base_of(config.model):
        raise InputError(f"{config.model!r} holds adapters, which are trained on; leave out lora_r or merge them.")
    if config.merge and not adapters:
        raise InputError("merge needs adapters; set lora_r.")
    if config.load_in_4bit and not adapters:
        raise InputError("load_in_4bit leaves no weight that could be trained; add adapters with lora_r.")
    if config.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
        raise InputError("load_in_4bit needs bitsandbytes; install it with: pip install 'oblrpo[qlora]'")
    if config.dtype == "bfloat16" and not adapters:
        raise InputError(
            "weights in bfloat16 lose updates smaller than 1/256 of them; train in float32 with bf16 arithmetic "
            "(bf16: true), or train adapters beside them (lora_r)."
        )


def _options(config: PolicyConfig, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "trust_remote_code": config.trust_remote_code,
        "use_safetensors": True,
    }
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    if config.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, config.dtype),
        )
        options["device_map"] = {"": device}
    return options


def _policy(model: Any, tokenizer: Any, config: PolicyConfig, name: str = "") -> Policy:
    if config.gradient_checkpointing:
        # transformers 5.x renames it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return Policy(
        model.eval(),
        tokenizer,
        PromptFormat(config.chat, config.system_prompt, config.chat_template_args),
        config.bf16,
        config.gradient_checkpointing,
        name,
    )


def _whole(name: str) -> str:
    """A folder by its whole path, so that adapters still know their model when the current folder changes."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
