"""Accuracy on held-out problems and on benchmarks; completions of one problem count as dependent.

Completions, drawn (`sampled`) or read from a file, are graded by rewards or a benchmark, and counted (`evaluate`).
"""
