"""Tasksets of the library verifiers as rows, an environment and a reward (docs/verifiers.md)."""

try:
    import verifiers.v1  # noqa: F401
except ImportError as error:
    from oblrpo.errors import pip_install

    raise ImportError(
        f"the adapter for verifiers needs verifiers 0.4 and Python 3.11 or newer ({error}); install it with: "
        f"{pip_install('verifiers')}"
    ) from error

from oblrpo.adapters.verifiers.taskset import FromTaskset, from_taskset

__all__ = ["FromTaskset", "from_taskset"]
