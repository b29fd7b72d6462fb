"""OBLR-PO on verl: `algorithm.adv_estimator=oblr_po` with the settings of docs/verl.md.

The library verl is imported here, before any module of this package: it loads `plugin` at the end of its own import,
in every process, and a module of ours that was being imported first would be seen half made.
"""

try:
    import verl
except ImportError as error:
    from oblrpo.errors import pip_install

    raise ImportError(f"the verl adapter needs verl ({error}); install it with: {pip_install('verl')}") from error

from oblrpo.adapters.shared import check_version

KNOWN_VERSIONS = (0, 9, 1), (0, 11)
"""The oldest version of verl that the adapter was written against, and the first that it does not know."""

check_version("verl", verl.__version__, *KNOWN_VERSIONS)
