"""Tests of the TRL adapter: `make test-trl`, in an environment of its own."""

import importlib.util

if importlib.util.find_spec("trl") is None:  # tests/conftest.py says so
    collect_ignore_glob = ["test_*.py", "support.py"]
