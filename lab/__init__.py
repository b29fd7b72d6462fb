"""The laboratory: what was measured, and what measures it. It uses the package `oblrpo`, which knows nothing of it.

    python -m lab.theory             every theorem, on policies that can be enumerated
    python -m lab.bench              what score norms cost, beside every other way to have them
    python -m lab.probe RUN|MODEL    local smoothness of a real objective, and what rate it supports
    python -m lab.benchmarks.NAME    the measurements of docs/lab_book.md; those of `oblrpo compare` are in comparisons/
    python -m lab.fetch_smollm       a real model of 135 M parameters, into models/

They run in a checkout, from its root.
"""
