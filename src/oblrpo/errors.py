"""The one exception that means "the user can mend this"."""


class InputError(ValueError):
    """What is wrong, where, and how to mend it, in one sentence; the command line prints it and exits with 2."""
