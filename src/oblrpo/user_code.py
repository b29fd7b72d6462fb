"""Functions and classes of the user, named by the module or file that they are in: rewards, baselines, tasks."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from os.path import isfile
from pathlib import Path
from types import ModuleType
from typing import Any

from oblrpo.errors import InputError, nearby, shown


def load_named(path: str, what: str = "reward", kind: str = "function") -> Callable[..., Any]:
    """Return the function, or class, at `package.module.name` or `file.py:name`; the module or file is run."""
    file, colon, name = (path, ":", "") if path.endswith(".py") else path.rpartition(":")
    if not colon:
        file, _, name = path.rpartition(".")
    if not file or not (name.isidentifier() or path.endswith(".py")):
        raise InputError(f"{what} '{path}' names no {kind}; write package.module.{kind} or file.py:{kind}.")
    try:
        module = _run_file(Path(file), what) if colon else importlib.import_module(file)
    except InputError:
        raise
    except Exception as error:  # the user's code may raise anything
        here = f"{file.replace('.', '/')}.py"
        hint = f" Write {here}:{name} for a {kind} in that file." if not colon and isfile(here) else ""
        raise InputError(
            f"{what} '{path}' cannot be imported: {type(error).__name__}: {shown(str, error)}.{hint}"
        ) from error
    found: Callable[..., Any] | None = getattr(module, name, None)
    if found is None:
        fits = inspect.isclass if kind == "class" else inspect.isroutine
        fitting = {word: each for word, each in vars(module).items() if fits(each) and word[0] != "_"}
        own = [word for word, each in fitting.items() if each.__module__ == module.__name__]
        fix = f"write {file}{colon or '.'}{(get_close_matches(name, own, 1) or own)[0]}; " if own else ""
        lacks = f": {file} has no {kind} '{name}'" if name else f" does not name a {kind} of the file"
        more = ", ..." if len(own) > 10 else ""
        raise InputError(f"{what} '{path}'{lacks}; {fix}it defines: {', '.join(own[:10]) or 'none'}{more}.")
    if not callable(found):
        raise InputError(f"{what} '{path}' is a {type(found).__name__}, not a {kind}.")
    return found


def _run_file(file: Path, what: str) -> ModuleType:
    if not file.is_file():
        raise InputError(f"{what} file {file} does not exist; check the path.{nearby(file)}")
    # A name of its own, so that two files called reward.py do not take each other's place.
    name = f"oblrpo_{what}_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{what} file {file} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
