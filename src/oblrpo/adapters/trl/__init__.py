"""OBLR-PO inside TRL: `OBLRPOTrainer` and `OBLRPOConfig` in place of `GRPOTrainer` and `GRPOConfig` (docs/trl.md).

`VarianceLedgerCallback` looks at the gradient of TRL's own trainers and changes nothing.
"""

try:
    import trl
except ImportError as error:
    raise ImportError(f"the TRL adapter needs TRL ({error}): pip install 'oblrpo[trl]'.") from error

if trl.__version__.split(".")[:2] != ["1", "16"]:
    raise ImportError(
        f"oblrpo's TRL adapter overrides what is inside TRL 1.16, and this is TRL {trl.__version__}; "
        "install 'trl>=1.16,<1.17', or a version of oblrpo that knows this one."
    )

from oblrpo.adapters.trl.config import OBLRPOConfig
from oblrpo.adapters.trl.ledger import VarianceLedgerCallback
from oblrpo.adapters.trl.trainer import OBLRPOTrainer

__all__ = ["OBLRPOConfig", "OBLRPOTrainer", "VarianceLedgerCallback"]
