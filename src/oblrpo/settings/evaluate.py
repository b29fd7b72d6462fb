"""Every setting of `oblrpo evaluate` with its default. Names of fields are the flags."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

from oblrpo.errors import InputError
from oblrpo.settings.annotations import check_ranges
from oblrpo.settings.idle import NO_VLLM
from oblrpo.settings.reading import flatten
from oblrpo.settings.shared import GradingConfig, ModelConfig, RowsConfig, SamplerConfig
from oblrpo.settings.train import PolicyConfig, TrainConfig
from oblrpo.settings.typed import with_fields


@dataclass(frozen=True)
class SamplingConfig(SamplerConfig, ModelConfig):
    """How a model is sampling, and its completions drawn."""

    samples: int = 1
    """Completions a problem. Not set: at least the largest k."""
    prompt_template: str = ""
    """What is sampling; {prompt} stands for the question. Empty: it alone; of a benchmark, it and a request to put the
    answer in \\\\boxed{}."""
    temperature: float = 1.0
    """Sampling temperature; 0: the most probable token, always."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this probability."""
    max_completion_length: int | None = None
    """Longest completion, in tokens. None: 2048, or what the model's context leaves beside the longest prompt."""
    problems_per_batch: int = 16
    """Problems whose completions are drawn together."""
    seed: int = 0
    """Seed of the samples."""
    limit: int = 0
    """Take only the first so many problems of each benchmark, or of the data; 0: all."""
    output: str = ""
    """Folder that keeps every completion; an evaluation that was stopped resumes there. Empty: evaluations/ and the
    model's name."""

    def policy(self, model: str) -> PolicyConfig:
        """Return how a model is loaded and sampling."""
        return PolicyConfig(model=model, **{field.name: getattr(self, field.name) for field in fields(ModelConfig)})


@dataclass(frozen=True)
class RewardsConfig(GradingConfig, RowsConfig):
    """What gives completions their figures where no benchmark is named: rewards, on rows of `data` or held-out ones."""

    threshold: float = 1.0
    """Least reward of a completion that passes, for pass@k."""


def as_in_run(config: TrainConfig, benchmark: bool = False) -> tuple[SamplingConfig, RewardsConfig]:
    """Return the settings under which a run measures its held-out accuracy; `where` is of its training.

    On a benchmark only its use of the chat template counts.
    """
    flat = flatten(config)
    flat["samples"] = flat["eval_samples"]
    own = {"seed", "device", "trust_remote_code", "output", "where"}
    of_template = {"chat", "system_prompt", "chat_template_args"}
    taken = {key: value for key, value in flat.items() if (key in of_template if benchmark else key not in own)}
    return (with_fields(SamplingConfig(), taken, "config.yaml"), with_fields(RewardsConfig(), taken, "config.yaml"))


def check_sampling(
    sampling: SamplingConfig, ks: Sequence[int], given: Collection[str], drawn: bool = True
) -> SamplingConfig:
    """Refuse what cannot be `drawn`; return it with enough samples for the largest k where their number is not set."""
    sampling = sampling if "samples" in given else replace(sampling, samples=max(sampling.samples, *ks, 1))
    for key, value, least in (
        ("samples", sampling.samples, 1),
        ("max_completion_length", sampling.max_completion_length, 1),
        ("problems_per_batch", sampling.problems_per_batch, 1),
        ("limit", sampling.limit, 0),
        ("seed", sampling.seed, 0),
        ("k", min(ks, default=1), 1),
    ):
        if value is not None and not least <= value < 2**31:
            raise InputError(f"{key} is {value}; it must be at least {least}.")
    if sampling.temperature != 0 and not 1e-3 <= sampling.temperature < float("inf"):
        raise InputError(f"temperature is {sampling.temperature}; it must be 0 or at least 0.001.")
    sampling.check_temperature(sampling.temperature)
    if sampling.vllm_args and sampling.sampler != "vllm":
        raise InputError(f"vllm_args does nothing: {NO_VLLM.why}; set sampler to vllm, or leave it out.")
    check_ranges(sampling, vars(sampling) | {f"vllm_args.{key}": value for key, value in vars(sampling.vllm).items()})
    if not 0 < sampling.top_p <= 1:
        raise InputError("top_p must be above 0 and at most 1.")
    if drawn and max(ks, default=1) > sampling.samples:
        raise InputError(f"k is {max(ks)}; with samples {sampling.samples} it must be from 1 to {sampling.samples}.")
    return sampling
