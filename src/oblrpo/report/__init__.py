"""One self-contained HTML page per run."""

from oblrpo.report.page import write_report

__all__ = ["write_report"]
