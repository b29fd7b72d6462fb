"""What the tests of the package's own tasks have, too: hostile completions, and problems with demonstrations."""

from tests.tasks.conftest import demonstrated, hostile

__all__ = ["demonstrated", "hostile"]
