"""Building a policy from nothing, or loading one: of the hub, a folder or a GGUF file, its adapters, its precision."""

import importlib.util
import io
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import find_adapter_config_file

from oblrpo.checksums import SUMS, damage
from oblrpo.errors import InputError, pip_install
from oblrpo.model_files import base_of, check_complete, check_is_there, check_policy, explained, is_gguf
from oblrpo.objects import PREFIX
from oblrpo.policy.adapters import add_adapter, load_adapter, load_adapter_weights, without_adapters
from oblrpo.policy.model import Policy
from oblrpo.policy.prompts import PromptFormat
from oblrpo.settings import PolicyConfig

NEEDED = ("gguf", "accelerate")


def read_gguf_tokenizer(name: str) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template."""
    return _read_file(name, AutoTokenizer)


def read_gguf_model(name: str, dtype: torch.dtype, attention: str = "") -> Any:
    """Return the causal LM of a GGUF file, dequantised to `dtype`; its name is the file's absolute path."""
    options = {"attn_implementation": attention} if attention else {}
    if config := getattr(transformers, "GgufConfig", None):  # blocks would stay packed where there is a kernel for them
        options["quantization_config"] = config(dequantize=True)
    model, report = _read_file(name, AutoModelForCausalLM, dtype=dtype, output_loading_info=True, **options)
    check_complete(name, report["missing_keys"])
    if quantizer := getattr(model, "hf_quantizer", None):  # which would refuse to save what is in numbers now
        quantizer.remove_quantization_config(model)
    # PEFT looks for a config beside the weights to see if adapters' model has grown tokens; in a file there is none.
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*\.gguf", category=UserWarning)
    # What adapters call the model they belong to; transformers takes the file's folder.
    model.name_or_path = model.config.name_or_path = str(Path(name).resolve())
    return model


def _read_file(name: str, kind: Any, **options: Any) -> Any:
    path = Path(name)
    failed = f"cannot load the model {name!r}"
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{failed}: a GGUF file needs {package}; install it with: {pip_install('gguf')}")
    hint = "; is the file complete, and its architecture one that transformers reads from GGUF?"
    with explained(failed, hint), redirect_stderr(io.StringIO()):  # for a progress bar that has no switch
        return kind.from_pretrained(str(path.parent.resolve()), gguf_file=path.name, **options)


VOCABULARIES = ("tokenizer.json", "vocab*", "merges*", "*.model*", "*.tiktoken", "tekken.json")
"""The files that tokenizers keep their words in; transformers makes one that knows none where there is none of them."""


def make_policy(config: PolicyConfig) -> Policy:
    """Return the policy that the config names: built with random weights, or loaded."""
    check_policy(config)
    if config.model:
        return load_policy(config.model, config)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"  # a line each
    return _built(tokenizer, config)


def stand_in(config: PolicyConfig) -> Policy:
    """Return a small policy that reads prompts as the named model does, for checks that must not load its weights."""
    name, longest = base_of(config.model) or config.model, 2**20
    check_is_there(name)
    with explained(f"cannot find the model {config.model!r}"):
        tokenizer = _tokenizer(config.model, config)
        if not is_gguf(name):
            of_model = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
            longest = getattr(of_model, "max_position_embeddings", longest)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": longest}
    return _built(tokenizer, PolicyConfig(model_args=sizes, device=config.device))


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of 258 tokens, padding, end and the 256 bytes: a policy built from nothing writes any text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "<eos>" in a prompt is five bytes, not the end
    )


def _built(tokenizer: Any, config: PolicyConfig) -> Policy:
    device, sizes = _device(config.device), config.sizes
    heads = sizes.num_attention_heads
    if heads < 2 or heads % 2 or sizes.hidden_size < 1 or sizes.hidden_size % (2 * heads):
        raise InputError("num_attention_heads must be even, and hidden_size a multiple of twice that.")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=sizes.hidden_size,
            intermediate_size=3 * sizes.hidden_size,
            num_hidden_layers=sizes.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=sizes.hidden_size // heads,
            max_position_embeddings=sizes.max_position_embeddings,
            tie_word_embeddings=True,
            initializer_range=sizes.initializer_range,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return _policy(model.to(device), tokenizer, config)


def load_policy(name: str, config: PolicyConfig, train: bool = True, dequantise: bool = False) -> Policy:
    """A causal LM and its tokenizer, from a folder, a GGUF file or, by name, the hub; adapters with their model.

    `dequantise` gives quantised weights, to which nothing can be added, back as numbers: what they compute with.
    """
    if train:
        check_policy(config)
    device, base = _device(config.device), base_of(name)
    check_is_there(base or name)
    if (Path(name) / SUMS).is_file() and (wrong := damage(Path(name))):
        raise InputError(
            f"the checkpoint {name} is damaged ({wrong}): use another. If you changed it yourself, remove its "
            f"{SUMS} first."
        )
    with explained(f"cannot load the model {name!r}"):
        tokenizer = _tokenizer(name, config)
        model = _model(_absolute(base or name), config, device)
        if dequantise and getattr(model, "hf_quantizer", None):
            model = model.dequantize()
            model._weight_conversions = None  # what undoes them would quantise again
    if not config.load_in_4bit:
        model = model.to(device)
    if base:
        model = load_adapter(model, name, train)
    elif train and getattr(model, "peft_config", None):  # of the hub: transformers has put them in, not to be trained
        raise InputError(f"{name!r} holds adapters; to train them, fetch them and give their folder as the model.")
    elif config.lora:
        model = add_adapter(model, config)
    return _policy(model, tokenizer, config, _absolute(name))


def adopt_policy(
    model: Any, tokenizer: Any, config: PolicyConfig, checkpoint: Path | None = None, train: bool = True
) -> Policy:
    """Return a policy of a loaded model and its tokenizer: the model itself, not a copy, on the device where it is.

    Dropout is turned off. `lora` puts new adapters into the model; `checkpoint` gives it the weights of a folder.
    """
    inner = without_adapters(model)
    if not (isinstance(inner, PreTrainedModel) and inner.can_generate()):
        raise InputError(
            f"the model is a {type(model).__name__}; give a causal LM of transformers, or PEFT's model around one."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError(f"the tokenizer is a {type(tokenizer).__name__}; give one of transformers.")
    if model is inner and getattr(model, "peft_config", None):
        raise InputError("the model has adapters inside it; give the PEFT model around it, which is trained as it is.")
    if model is not inner and config.lora:
        raise InputError("the model has adapters already, which are trained as they are; leave out lora.")
    if config.lora:
        model = add_adapter(model, config)
    if checkpoint:
        with explained(f"cannot load {checkpoint} into the model that was given"):
            if getattr(model, "peft_config", None):
                load_adapter_weights(model, checkpoint)
            else:
                saved = _read(type(model), str(checkpoint), dtype=model.dtype, use_safetensors=True)
                model.load_state_dict(saved.state_dict())
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if train and not trained:
        raise InputError("no parameter of the model is trainable; set requires_grad, or add adapters with lora.")
    if train and (low := trained - {torch.float32, torch.float64}):
        raise InputError(
            f"weights in {str(min(low, key=str)).removeprefix('torch.')} lose small updates; load the model in float32 "
            "(bf16=True gives arithmetic in bfloat16), or train adapters beside it (lora)."
        )
    name = str(getattr(inner, "name_or_path", "")) or PREFIX + type(model).__name__
    return _policy(model, tokenizer, config, name)


def _tokenizer(name: str, config: PolicyConfig) -> Any:
    if is_gguf(name):
        return read_gguf_tokenizer(name)
    if Path(name).is_dir() and not config.trust_remote_code and not any(map(any, map(Path(name).glob, VOCABULARIES))):
        raise InputError(
            f"cannot load the model {name!r}: the folder holds no tokenizer (tokenizer.json); copy it there from the "
            "model's source."
        )
    return AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)


def _model(name: str, config: PolicyConfig, device: torch.device) -> Any:
    dtype = getattr(torch, config.dtype)
    if is_gguf(name):
        return read_gguf_model(name, dtype, config.attn_implementation)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": config.trust_remote_code, "use_safetensors": True}
    kind: Any = AutoModelForCausalLM
    if find_adapter_config_file(name) is None:  # or else transformers finds the model of adapters on the hub
        of_model = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
        # Of a model that also sees, the text alone would be loaded, and exported without the rest.
        whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(of_model), None)
        kind = whole if whole and [whole.__name__] == of_model.architectures else kind
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    if config.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        options["device_map"] = {"": device}
    return _read(kind, name, **options)


def _read(kind: Any, name: str, **options: Any) -> Any:
    """Return what transformers reads, if every weight was there in its shape; weights without a use are `left_out`."""
    model, report = kind.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    check_complete(name, report["missing_keys"], report["mismatched_keys"])
    model.left_out = set(report["unexpected_keys"])
    return model


def check_values(model: Any, which: str) -> None:
    """Refuse weights that are not there, or hold NaN or infinities, as they come."""
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise InputError(f"{which} has no values: {name} is on the device meta; load all of the model.")
        if not weight.is_floating_point() or weight.element_size() == 1 or not weight.numel():
            continue
        if not torch.stack(torch.aminmax(weight.detach())).isfinite().all():  # no copy, as a sum in float32 makes one
            raise InputError(f"{which} has NaN or infinities in {name} before any training; use another.")


def _policy(model: Any, tokenizer: Any, config: PolicyConfig, name: str = "") -> Policy:
    which = f"the model {name!r}" if name else "the model"
    check_values(model, which)
    if config.gradient_checkpointing:
        # transformers 5.x renames it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    policy = Policy(
        model.eval(),
        tokenizer,
        PromptFormat(config.chat, config.system_prompt, config.chat_template_args),
        config.bf16,
        config.gradient_checkpointing,
        name,
    )
    if not policy.end_tokens:
        raise InputError(f"neither {which} nor its tokenizer has an end token; set eos_token in the tokenizer.")
    if policy.vocabulary < 2:
        raise InputError(f"{which} knows one token, so there is nothing to choose from; give another model.")
    if max(policy.end_tokens) >= policy.vocabulary:
        raise InputError(
            f"{which} ends completions with token {max(policy.end_tokens)}, but knows {policy.vocabulary} tokens; "
            "give its config eos_token_id=tokenizer.eos_token_id."
        )
    if policy.pad_token >= policy.vocabulary:
        pad = tokenizer.convert_ids_to_tokens(policy.pad_token)
        raise InputError(
            f"{which} knows {policy.vocabulary} tokens, but its tokenizer pads with {pad!r}, token {policy.pad_token}; "
            "is its tokenizer_config.json missing? Copy it there, or set another pad_token."
        )
    types = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
    apart = f"{which} has weights in {' and '.join(types)}, which its layers do not take together"
    with explained(apart, ": load it in one of them, or compute in bfloat16 (bf16)."), policy.arithmetic():
        if len(types) > 1:
            model(input_ids=torch.tensor([[0, 1]], device=policy.device), use_cache=False)
    return policy


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def _absolute(name: str) -> str:
    """Return a folder or file by its absolute path, by which adapters find their model from any current folder."""
    return str(Path(name).resolve()) if Path(name).is_dir() or is_gguf(name) else name
