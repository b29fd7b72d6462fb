"""The process in which a user's reward function is loaded and runs; see `oblrpo.workers`."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from os.path import isfile
from pathlib import Path
from types import ModuleType
from typing import Any

from oblrpo.checksums import sum_of, sum_of_texts
from oblrpo.errors import InputError, nearby, shown
from oblrpo.regular_files import regular
from oblrpo.rewards.user import RewardFailed, call_reward, takes, waits
from oblrpo.workers import serve

Reward = Callable[..., Sequence[float | None]]
_loaded: dict[str, Reward] = {}


def load_function(path: str, what: str = "reward") -> Reward:
    """Return the function at `package.module.function` or `file.py:function`; the module or file is run."""
    file, colon, name = (path, ":", "") if path.endswith(".py") else path.rpartition(":")
    if not colon:
        file, _, name = path.rpartition(".")
    if not file or not (name.isidentifier() or path.endswith(".py")):
        raise InputError(f"{what} '{path}' names no function; write package.module.function or file.py:function.")
    try:
        module = _run_file(Path(file), what) if colon else importlib.import_module(file)
    except InputError:
        raise
    except Exception as error:  # the user's code may raise anything
        here = f"{file.replace('.', '/')}.py"
        hint = f" Write {here}:{name} for a function in that file." if not colon and isfile(here) else ""
        raise InputError(
            f"{what} '{path}' cannot be imported: {type(error).__name__}: {shown(str, error)}.{hint}"
        ) from error
    function: Reward | None = getattr(module, name, None)
    if function is None:
        routines = {word: each for word, each in vars(module).items() if inspect.isroutine(each) and word[0] != "_"}
        own = [word for word, each in routines.items() if each.__module__ == module.__name__]
        fix = f"write {file}{colon or '.'}{(get_close_matches(name, own, 1) or own)[0]}; " if own else ""
        lacks = f": {file} has no function '{name}'" if name else " does not name a function of the file"
        more = ", ..." if len(own) > 10 else ""
        raise InputError(f"{what} '{path}'{lacks}; {fix}it defines: {', '.join(own[:10]) or 'none'}{more}.")
    if not callable(function):
        raise InputError(f"{what} '{path}' is a {type(function).__name__}, not a function.")
    return function


def _run_file(file: Path, what: str) -> ModuleType:
    """Return the module that a file makes."""
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


def digest_of(path: str, reward: Reward) -> str:
    """Return the SHA-256 of a reward's files, the one that its path names and where it is defined; "" of none."""
    file, colon, _ = path.rpartition(":")
    named = file if colon else getattr(sys.modules.get(path.rpartition(".")[0]), "__file__", None)
    defined = getattr(sys.modules.get(getattr(reward, "__module__", None) or ""), "__file__", None)
    files = dict.fromkeys(Path(name).resolve() for name in (named, defined) if name)
    with suppress(OSError):
        return sum_of_texts(sum_of(regular(file)) for file in files) if files else ""
    return ""


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return {"refused": why} of a path, {"failed": what} of a call, or {"values": numbers, None, or [repr] of others}.

    A message without arguments only loads the function, and is answered with {"digest": `digest_of` it, "takes": the
    names that it can be called with, "waits": whether it is async}.
    """
    path = message["path"]
    try:
        reward = _loaded[path] = _loaded.get(path) or load_function(path)
    except InputError as error:
        return {"refused": str(error)}
    if "given" not in message:
        return {"digest": digest_of(path, reward), "takes": sorted(takes(reward)), "waits": waits(reward)}
    try:
        return {"values": call_reward(reward, message["given"])}
    except RewardFailed as what:
        return {"failed": str(what)}


def main() -> None:
    """Compute rewards until the input ends."""
    serve(answer)
