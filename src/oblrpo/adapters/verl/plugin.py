"""The module that verl loads when it is imported (entry-point group `verl.plugins`): its import registers everything.

If this import fails, verl drops the exception at level DEBUG, and the run then fails elsewhere with "Unknown trainer".
So whatever goes wrong is printed first.
"""

import sys
import traceback

try:
    from oblrpo.adapters.verl import advantages, engine, trainer
except BaseException as error:
    traceback.print_exc()
    print(
        f"oblrpo: the verl plugin did not load ({type(error).__name__}: {error}); adv_estimator and trainer_mode "
        "oblr_po do not exist in this process.",
        file=sys.stderr,
        flush=True,
    )
    raise

__all__ = ["advantages", "engine", "trainer"]
