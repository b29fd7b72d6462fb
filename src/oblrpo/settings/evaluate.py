"""Every setting of `oblrpo evaluate` with its default. Names of fields are the flags."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

from oblrpo.errors import InputError
from oblrpo.settings.annotations import NO_VLLM, OWN_SCHEDULER, Range, check_ranges, refuse_named
from oblrpo.settings.reading import flatten
from oblrpo.settings.shared import GradingConfig, ModelConfig, RowsConfig, SamplerConfig
from oblrpo.settings.train import PolicyConfig, TrainConfig
from oblrpo.settings.typed import with_fields

MOST = 2**31 - 1  # beyond it no machine holds anything


@dataclass(frozen=True)
class SamplingConfig(SamplerConfig, ModelConfig):
    """How prompts are shown to a model, and its completions drawn."""

    samples: Annotated[int, Range(1, MOST)] = 1
    """Completions per problem. Not set: at least the largest k."""
    prompt_template: str = ""
    """Template of the prompt, in which {prompt} stands for the question. Empty: {prompt} alone; for a benchmark, the
    question and a request to put the answer in \\boxed{}."""
    temperature: float = 1.0
    """Sampling temperature; 0: always the most probable token."""
    top_p: Annotated[float, Range(1e-6, 1)] = 1.0
    """Sample only from the most probable tokens that together have this probability."""
    max_completion_length: Annotated[int | None, Range(1, MOST)] = None
    """Longest completion, in tokens. None: 2048, or what the model's context leaves beside the longest prompt."""
    problems_per_batch: Annotated[int, Range(1, MOST)] = 16
    """Number of problems whose completions are sampled together."""
    seed: Annotated[int, Range(0, MOST)] = 0
    """Seed of the samples."""
    limit: Annotated[int, Range(0, MOST)] = 0
    """Use only the first so many problems of each benchmark, or of the data. 0: all."""
    output: str = ""
    """Folder for every completion; an evaluation that was stopped resumes there. Empty: evaluations/ and the
    model's name."""

    def policy(self, model: str) -> PolicyConfig:
        """Return how a model is loaded, and how prompts are shown to it."""
        return PolicyConfig(model=model, **{field.name: getattr(self, field.name) for field in fields(ModelConfig)})


@dataclass(frozen=True)
class RewardsConfig(GradingConfig, RowsConfig):
    """How completions are scored where no benchmark is named: by rewards, on rows of `data` or on held-out problems."""

    threshold: float = 1.0
    """Lowest reward that counts as a pass, for pass@k."""


def as_in_run(config: TrainConfig, benchmark: bool = False) -> tuple[SamplingConfig, RewardsConfig]:
    """Return the settings by which a run measures its accuracy; for a `benchmark` those of the chat template alone."""
    flat = flatten(config)
    flat["samples"] = flat["eval_samples"]
    own = {"seed", "device", "trust_remote_code", "output", "max_num_seqs", "where"}  # `where` is of its training
    of_template = {"chat", "system_prompt", "chat_template_args"}
    taken = {key: value for key, value in flat.items() if (key in of_template if benchmark else key not in own)}
    return (with_fields(SamplingConfig(), taken, "config.yaml"), with_fields(RewardsConfig(), taken, "config.yaml"))


def check_sampling(
    sampling: SamplingConfig, ks: Sequence[int], given: Collection[str], drawn: bool = True
) -> SamplingConfig:
    """Refuse what cannot be `drawn`; return it with enough samples for the largest k where their number is not set."""
    sampling = sampling if "samples" in given else replace(sampling, samples=max(sampling.samples, *ks, 1))
    check_ranges(sampling)
    if sampling.temperature != 0 and not 1e-3 <= sampling.temperature < float("inf"):
        raise InputError(f"temperature is {sampling.temperature}; it must be 0 or at least 0.001.")
    sampling.check_temperature(sampling.temperature)
    if sampling.vllm_args and sampling.sampler != "vllm":
        refuse_named({"vllm_args": "vllm_args"}, {NO_VLLM.why: ["vllm_args"]})
    if sampling.max_num_seqs and sampling.sampler == "vllm":
        refuse_named({"max_num_seqs": "max_num_seqs"}, {OWN_SCHEDULER.why: ["max_num_seqs"]})
    sampling.check_at_once(sampling.samples, "samples")
    if wrong := [k for k in ks if k < 1 or (drawn and k > sampling.samples)]:
        raise InputError(f"k is {wrong[0]}; it must be at least 1 and at most samples, {sampling.samples}.")
    return sampling
