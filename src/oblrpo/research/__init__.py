"""The research wing: theorems on policies that can be enumerated, what score norms cost, and a run's local smoothness.

Nothing of the product imports it. Three commands do: `oblrpo theory`, `oblrpo bench` and `oblrpo probe`.
"""
