"""Every setting of a run: its name, type, default and range, and how it is read from recipes, files, flags and Python.

Nothing in here loads torch.
"""

from oblrpo.settings.annotations import (
    Mapping,
    Positional,
    adjustable,
    check_ranges,
    may_change_on_resume,
    refuse_named,
    refuse_no_effect,
)
from oblrpo.settings.evaluate import RewardsConfig, SamplingConfig, as_in_run, check_sampling
from oblrpo.settings.mappings import VLLM
from oblrpo.settings.reading import (
    IDENTITY,
    RECIPES,
    every_value,
    file_named,
    flags_in,
    flatten,
    hint,
    load_recipe,
    read_yaml,
    read_yaml_file,
    recipe_settings,
    settings_in,
    with_file,
    with_settings,
    yaml_line,
    yaml_text,
)
from oblrpo.settings.shared import SamplerConfig
from oblrpo.settings.train import (
    AlgorithmConfig,
    OptimConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    ScoresConfig,
    TaskConfig,
    TrainConfig,
    TurnsConfig,
    WarmStartConfig,
)
from oblrpo.settings.typed import as_type, with_fields

__all__ = [
    "IDENTITY", "RECIPES", "VLLM", "AlgorithmConfig", "Mapping", "OptimConfig", "PolicyConfig", "Positional",
    "RewardsConfig", "RolloutConfig", "RunConfig", "SamplerConfig", "SamplingConfig", "ScoresConfig", "TaskConfig",
    "TrainConfig", "TurnsConfig", "WarmStartConfig", "adjustable", "as_in_run", "as_type", "check_ranges",
    "check_sampling", "every_value", "file_named", "flags_in", "flatten", "hint", "load_recipe", "may_change_on_resume",
    "read_yaml", "read_yaml_file", "recipe_settings", "refuse_named", "refuse_no_effect", "settings_in", "with_fields",
    "with_file", "with_settings", "yaml_line", "yaml_text",
]  # fmt: skip
