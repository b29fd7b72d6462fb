"""Accuracy on held-out problems and on benchmarks; completions of one problem count as dependent.

One way for all: completions, drawn (`sampled`) or read from a file (`completions`), are graded by rewards or
by a benchmark's comparison (`benchmark`), and counted (`evaluate`, `statistics`).
"""
