"""Accuracy on held-out problems and on benchmarks; completions of one problem count as dependent."""
