"""Measurements behind docs/results.md; each prints the table that stands there."""
