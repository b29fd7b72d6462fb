"""Just as much of vLLM as the sampler calls: an engine with weights of its own, sampled by transformers."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from oblrpo.policy import Policy
from oblrpo.rollout import sample


@dataclass
class FakeSamplingParams:
    """Refuses any other argument, as vLLM does."""

    n: int
    temperature: float
    seed: int
    max_tokens: int
    stop_token_ids: list
    ignore_eos: bool
    logprobs: int
    detokenize: bool


class FakeModel(torch.nn.Module):
    """Weights that are loaded by name, as a vLLM model's."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def named_parameters(self, *given, **settings):
        return self.inner.named_parameters(*given, **settings)

    def load_weights(self, weights):
        own = dict(self.inner.named_parameters())
        loaded = set()
        for name, value in weights:
            own[name].data.copy_(value)
            loaded.add(name)
        return loaded


@dataclass
class FakeLLM:
    """`off` is added to every logit-bearing weight after each load: another engine is never quite the same."""

    policy: Policy
    off: float = 0.0
    settings: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)

    def __post_init__(self):
        self.policy = Policy(copy.deepcopy(self.policy.model), self.policy.tokenizer)
        for parameter in self.policy.model.parameters():
            torch.nn.init.normal_(parameter)
        self.noise = torch.Generator().manual_seed(5)

    def apply_model(self, function):
        self.calls.append("apply_model")
        result = [function(FakeModel(self.policy.model))]
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter += self.off * torch.randn(parameter.shape, generator=self.noise)
        return result

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return True

    def generate(self, prompts, parameters, *, use_tqdm):
        self.calls.append(("generate", prompts, parameters))
        requests = []
        for prompt, given in zip(prompts, parameters, strict=True):
            text = self.policy.tokenizer.decode(prompt["prompt_token_ids"])
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(given.seed % 2**63)
                drawn = sample(self.policy, [text], given.n, given.max_tokens, given.temperature, logps=True)
            outputs = []
            for j in range(given.n):
                kept = drawn.sequences.own_SC[j].bool()
                ids = drawn.sequences.completion_SC[j][kept].tolist()
                logps = drawn.sampler_logps_SC[j][kept].tolist()
                logprobs = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, logps, strict=True)]
                reason = "length" if drawn.clipped_S[j] else "stop"
                outputs.append(SimpleNamespace(index=j, token_ids=ids, logprobs=logprobs, finish_reason=reason))
            requests.append(SimpleNamespace(outputs=outputs[::-1]))
        return requests
