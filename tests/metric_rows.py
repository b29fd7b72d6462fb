"""Which row of the table of metrics a key of a log belongs to."""

import re

from oblrpo.tables.metrics import ROW_OF


def metric_of(key):
    """The row of a key of a log; None if it is no metric of ours."""
    named = re.sub(r"^(rewards/).+(/(mean|std))$|^(variance/|signal2/).+$", r"\1\4NAME\2", key)
    return ROW_OF.get(key, ROW_OF.get(named))
