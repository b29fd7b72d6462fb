"""Exact squared score norms of whole sequences, and the weighted gradient, from one forward and one backward."""

from oblrpo.scores import oracle
from oblrpo.scores.contributions import Outer, Vector
from oblrpo.scores.head import chunked_logps
from oblrpo.scores.rules import Call, UnsupportedModelError, register_rule
from oblrpo.scores.tape import ScoreTape

__all__ = ["Call", "Outer", "ScoreTape", "UnsupportedModelError", "Vector", "chunked_logps", "oracle", "register_rule"]
