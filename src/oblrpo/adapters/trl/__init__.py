"""OBLR-PO inside TRL: `OBLRPOTrainer` and `OBLRPOConfig` in place of `GRPOTrainer` and `GRPOConfig` (docs/trl.md).

`VarianceLedgerCallback` looks at the gradient of TRL's own trainers, of any TRL from 1.0 on, and changes nothing.
"""

from typing import TYPE_CHECKING, Any

try:
    import trl  # noqa: F401
except ImportError as error:
    from oblrpo.errors import pip_install

    raise ImportError(f"the TRL adapter needs TRL ({error}); install it with: {pip_install('trl')}") from error

from oblrpo.adapters.trl.ledger import VarianceLedgerCallback

if TYPE_CHECKING:
    from oblrpo.adapters.trl.config import OBLRPOConfig
    from oblrpo.adapters.trl.trainer import OBLRPOTrainer

__all__ = ["OBLRPOConfig", "OBLRPOTrainer", "VarianceLedgerCallback"]


def __getattr__(name: str) -> Any:
    """Import the trainer and its configuration on first use; they need a TRL that they know.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oblrpo.adapters.trl.config import OBLRPOConfig
    from oblrpo.adapters.trl.trainer import OBLRPOTrainer

    return {"OBLRPOConfig": OBLRPOConfig, "OBLRPOTrainer": OBLRPOTrainer}[name]
