"""Tests of the verifiers adapter: `make test-verifiers`, in an environment of its own."""

import importlib.util

if importlib.util.find_spec("verifiers") is None:  # tests/conftest.py says so
    collect_ignore_glob = ["test_*.py", "shop.py"]
