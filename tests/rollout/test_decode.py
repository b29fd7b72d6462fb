"""The sampling loop: what it draws is what `generate` draws, from rows that have not ended, in memory that stays."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    OPTConfig,
)

from oblrpo.rollout import decode as module
from oblrpo.rollout.cache import BLOCK
from oblrpo.rollout.decode import applies, decode
from oblrpo.rollout.draw import Draw
from tests.scores.models import VOCABULARY
from tests.scores.zoo import FAMILIES, build_family

G, Q, LONGEST, PAD = 3, 6, 9, 0
