"""Squared score norms of whole sequences, and the weighted gradient, from one forward and one backward."""

from oblrpo.scores import oracle
from oblrpo.scores.contributions import Outer, Vector
from oblrpo.scores.gram import Sketch
from oblrpo.scores.group_tape import GroupTape
from oblrpo.scores.head import TokenLogps, chunked_logps, token_logps
from oblrpo.scores.methods import METHODS
from oblrpo.scores.proxies import PROXIES, CalibratedProxy, Features, agreement, log_error, logit_norm2
from oblrpo.scores.rules import LayerCall, UnsupportedModelError, register_rule
from oblrpo.scores.tape import ScoreTape
from oblrpo.scores.trainable_layers import by_operations

__all__ = [
    "METHODS",
    "PROXIES",
    "CalibratedProxy",
    "Features",
    "GroupTape",
    "LayerCall",
    "Outer",
    "ScoreTape",
    "Sketch",
    "TokenLogps",
    "UnsupportedModelError",
    "Vector",
    "agreement",
    "by_operations",
    "chunked_logps",
    "log_error",
    "logit_norm2",
    "oracle",
    "register_rule",
    "token_logps",
]
