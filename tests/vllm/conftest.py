"""Tests of sampling with vLLM: `make test-vllm`, in an environment of its own."""

import importlib.util

if importlib.util.find_spec("vllm") is None:  # tests/conftest.py says so
    collect_ignore_glob = ["test_*.py", "support.py"]
