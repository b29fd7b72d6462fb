"""Tests of sampling with vLLM: `make test-vllm`, in an environment of its own."""

import importlib.util
import os

if importlib.util.find_spec("vllm") is None:  # tests/conftest.py says so
    collect_ignore_glob = ["test_*.py", "support.py"]
else:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; tiny policies need less
