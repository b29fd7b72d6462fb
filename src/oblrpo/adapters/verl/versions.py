"""The versions of verl that the adapter was written against."""

import re

OLDEST, FIRST_UNKNOWN = (0, 9, 1), (0, 11)


def check_version(version: str) -> None:
    """Refuse a verl whose insides are not known here.

    Raises:
        ImportError: verl is older or newer than those.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not OLDEST <= numbers < FIRST_UNKNOWN:
        raise ImportError(
            f"oblrpo's verl adapter works with verl >=0.9.1,<0.11, and this is verl {version}; "
            "install 'verl>=0.9.1,<0.11', or a version of oblrpo that supports this one."
        )
