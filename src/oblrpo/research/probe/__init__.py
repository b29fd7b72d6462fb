"""What a real run's objective looks like around its path: local smoothness, rates, predicted improvement."""

from oblrpo.research.probe.console import print_place
from oblrpo.research.probe.probe import Effort, Place, probe_model, probe_run

__all__ = ["Effort", "Place", "print_place", "probe_model", "probe_run"]
