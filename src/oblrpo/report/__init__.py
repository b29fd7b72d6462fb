"""What a person sees of a run: the console while it goes on, one HTML page, the charts and the shell of all pages."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oblrpo.report.page import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    # The trainer takes its advice from here, and must not load matplotlib for it.
    if name == "write_report":
        from oblrpo.report.page import write_report

        return write_report
    raise AttributeError(name)
