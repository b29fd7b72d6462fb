"""What a real run's objective looks like around its path: local smoothness, rates, predicted improvement."""

from lab.probe.console import print_place
from lab.probe.probe import Effort, Place, probe_model, probe_run

__all__ = ["Effort", "Place", "print_place", "probe_model", "probe_run"]
