"""`python -m lab.bench`: what the score norms cost, beside every other way to have them, in one run."""
