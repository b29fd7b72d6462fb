"""Measurements behind docs/lab_book.md; each prints the table that stands there."""
