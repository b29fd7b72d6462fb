"""Sampling by a vLLM engine in this process, on the policy's GPU (extra `vllm`).

Written against vLLM's offline API as it stands in 0.17.0, 0.25.1 and 0.33.0: read there, not run by us. The engine is
asked for nothing but `LLM(...)`, `LLM.generate`, `LLM.apply_model` and `LLM.reset_prefix_cache`.
"""

import importlib.metadata
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from oblrpo.errors import InputError, pip_install
from oblrpo.policy import Policy, Prompt, Sequences
from oblrpo.policy.adapters import without_adapters
from oblrpo.policy.sequences import pad
from oblrpo.rollout.rollouts import Rollouts, ended, texts_of
from oblrpo.scores import Features
from oblrpo.settings import RolloutConfig

LEAST_VERSION, BELOW_VERSION = (0, 17), (0, 34)
"""The range of vLLM's versions that this is written for: those whose source was read, and what lies between."""

LEAST_TEMPERATURE = 0.01  # the lowest temperature; vLLM raises lower ones to this without saying so


class VLLMSampler:
    """Samples with an engine that holds a copy of the policy's weights, up to `max_model_length` tokens a sequence.

    The engine is a `vllm.LLM` of the policy's architecture, opened with logprobs_mode "processed_logprobs".
    """

    def __init__(self, policy: Policy, engine: Any, sampling_params: Callable[..., Any], max_model_length: int) -> None:
        self.engine, self.sampling_params, self.max_model_length = engine, sampling_params, max_model_length
        self.sync(policy)

    def sample(
        self, prompts: Sequence[Prompt], num_generations: int, max_completion_length: int, temperature: float
    ) -> Rollouts:
        """Return `num_generations` completions of every prompt, with the log-probabilities they were drawn with.

        Every prompt has a seed of its own from torch's global random state; vLLM adds the output's number to it.
        """
        rows = self.policy.encode(prompts, room=max_completion_length)
        if (longest := max(map(len, rows)) + max_completion_length) > self.max_model_length:
            raise InputError(
                f"a prompt and its completion may take {longest} tokens, more than max_model_len of "
                f"vllm_args, {self.max_model_length}; raise it, or lower max_completion_length."
            )
        parameters = [
            self.sampling_params(
                n=num_generations,
                temperature=temperature,
                seed=seed,
                max_tokens=max_completion_length,
                stop_token_ids=self.policy.end_tokens,
                ignore_eos=True,  # the line above says what ends a completion, and nothing else does
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for seed in torch.randint(2**48, (len(rows),), device="cpu").tolist()
        ]
        requests = self.engine.generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
        outputs = [output for request in requests for output in sorted(request.outputs, key=lambda out: out.index)]
        if len(outputs) != len(rows) * num_generations:
            raise RuntimeError(f"vLLM gave {len(outputs)} completions for {len(rows)} x {num_generations}.")
        if any(output.logprobs is None for output in outputs):
            raise RuntimeError("vLLM gave no log-probabilities.")
        tokens = [list(output.token_ids) for output in outputs]
        logps = [
            [float(at[token].logprob) for at, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ]
        device, padding = self.policy.device, self.policy.pad_token
        prompt_SQ, prompt_mask_SQ = (
            values.repeat_interleave(num_generations, 0) for values in self.policy.pad_prompts(rows)
        )
        completion_SC, mask_SC = pad(tokens, padding, left=False, device=device)
        width = completion_SC.shape[1]
        logps_SC = torch.tensor([row + [0.0] * (width - len(row)) for row in logps], device=device)
        clipped_S = ~(ended(self.policy, completion_SC) & mask_SC.bool()).any(1)
        for output, row, clipped in zip(outputs, tokens, clipped_S.tolist(), strict=True):
            if clipped and len(row) != max_completion_length:
                raise RuntimeError(
                    f"vLLM ended a completion after {len(row)} tokens ({output.finish_reason}) without an end token."
                )
        sequences = Sequences.of(prompt_SQ, prompt_mask_SQ, completion_SC, mask_SC)
        texts = texts_of(self.policy, completion_SC, mask_SC)
        return Rollouts(sequences, texts, clipped_S, logps_SC, features_of_logps(logps_SC, mask_SC))

    def sync(self, policy: Policy) -> None:
        """Copy the weights into the engine and forget what it cached under the old ones."""
        self.policy = policy

        @torch.no_grad()
        def load(model: Any) -> None:
            loaded = model.load_weights(checkpoint_weights(policy.model))
            missing = set() if loaded is None else {name for name, _ in model.named_parameters()} - set(loaded)
            if missing:
                raise InputError(
                    f"vLLM's model has weights that this policy does not set, such as {min(missing)}; use the sampler "
                    "transformers."
                )

        self.engine.apply_model(load)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache, which holds keys and values of old weights.")


def features_of_logps(logps_SC: Tensor, mask_SC: Tensor) -> Features:
    """The features of draws by log-probabilities alone, with estimates for what a token's whole distribution gives.

    Of a token drawn with probability p, 1 - p estimates the expected squared norm 1 - sum p^2 of its score for the
    logits, and -log p the entropy; both without bias.
    """
    mask_SC = mask_SC.to(logps_SC)
    logps_S = (logps_SC * mask_SC).sum(1)
    return Features(mask_SC.sum(1), ((1 - logps_SC.exp()) * mask_SC).sum(1).clamp(min=0), logps_S, -logps_S)


def open_engine(
    policy: Policy, config: RolloutConfig, trust_remote_code: bool = False
) -> tuple[Any, Callable[..., Any], int]:
    """Return an engine of the policy's architecture with random weights, SamplingParams, and the longest sequence."""
    _check_machine(policy)
    # The worker must live in this process: weights are handed over as tensors.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    model = without_adapters(policy.model)
    folder = tempfile.mkdtemp(prefix="oblrpo-vllm-")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    longest = config.vllm.max_model_len or policy.longest
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # the engine seeds torch
        engine = LLM(
            model=folder,
            load_format="dummy",  # `sync` brings the weights
            skip_tokenizer_init=True,
            trust_remote_code=trust_remote_code,
            generation_config="vllm",  # not the model's defaults (top-p, repetition penalty ...)
            logprobs_mode="processed_logprobs",  # those that tokens are drawn with, temperature included
            dtype=config.vllm.dtype,
            gpu_memory_utilization=config.vllm.gpu_memory_utilization,
            max_model_len=longest,
        )
    weakref.finalize(engine, shutil.rmtree, folder, ignore_errors=True)
    return engine, SamplingParams, longest


def _check_machine(policy: Policy) -> None:
    least, below = (".".join(map(str, version)) for version in (LEAST_VERSION, BELOW_VERSION))
    wanted = f"the sampler vllm is written for vLLM {least} to below {below}"
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"{wanted}, which is not installed; on a machine with a GPU, install it with: {pip_install('vllm')}"
        ) from None
    if not LEAST_VERSION <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < BELOW_VERSION:
        raise InputError(f"{wanted}; here is {version}. Install one of those, or use the sampler transformers.")
    if policy.device.type != "cuda":
        raise InputError(f"the sampler vllm needs the policy on a CUDA device, not on {policy.device}.")


def checkpoint_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its name in a checkpoint, adapters merged; a tied one once, under its first name.

    The weight of a layer with LoRA adapters is W + sum of scale B A. It is computed aside: merging in place and undoing
    it would leave a rounding error in W at every update.
    """
    base = without_adapters(model)
    if base is model:
        for name, parameter in model.named_parameters():
            yield name, parameter.detach()
        return
    adapted = {
        name: module
        for name, module in base.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "active_adapters")
    }
    _check_adapters(base, adapted)
    for full_name, parameter in base.named_parameters():
        name = re.sub(r"\.base_layer|\.modules_to_save\.[^.]+", "", full_name)
        if model.prefix in name or "original_module" in name:
            continue
        layer = adapted.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        yield name, parameter.detach() if layer is None else _merged(layer, parameter)


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    merged = weight.detach().clone()
    if not layer.merged and not layer.disable_adapters:
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
                merged += layer.get_delta_weight(adapter).to(merged)
    return merged


def _check_adapters(base: Any, adapted: dict[str, Any]) -> None:
    tied = bool(getattr(base.config, "tie_word_embeddings", False))
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    for name, layer in adapted.items():
        if tied and any(layer is end for end in ends):
            raise InputError(
                f"the adapter of {name} changes one use of a tied weight, which the sampler cannot take over; leave "
                "that layer out of the adapter, or use the sampler transformers."
            )
        other = [key for key in ("use_dora", "lora_bias") if any(getattr(layer, key, {}).values())]
        if other or not hasattr(layer, "get_delta_weight") or not hasattr(layer.base_layer, "weight"):
            raise InputError(
                f"the adapter of {name} ({', '.join([type(layer).__name__, *other])}) cannot be merged for the "
                "sampler; use plain LoRA, or the sampler transformers."
            )
