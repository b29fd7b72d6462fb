"""What is wrong with a run: conditions over its metrics, each with its noise; the standard library only."""

from oblrpo.diagnosis.course import Course, Facts
from oblrpo.diagnosis.diagnosis import Diagnosis, diagnose, facts_of, facts_of_log
from oblrpo.diagnosis.table import CONDITIONS
from oblrpo.diagnosis.watch import Finding, Watch

__all__ = ["CONDITIONS", "Course", "Diagnosis", "Facts", "Finding", "Watch", "diagnose", "facts_of", "facts_of_log"]
