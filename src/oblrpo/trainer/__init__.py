"""Algorithm 1 (`algorithm1`) and the run around it (`loop`)."""

from oblrpo.trainer.algorithm1 import Estimate, Learner, Update
from oblrpo.trainer.loop import Trainer
from oblrpo.trainer.run_folder import RunFolder

__all__ = ["Estimate", "Learner", "RunFolder", "Trainer", "Update"]
