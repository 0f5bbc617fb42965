"""Import what a command line names as ``module:name``."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from flax_ckpt_compat._core.errors import SettingError


def load_name(name: str) -> Any:
    """Return what ``module:name`` names; modules in the working directory are found, as by ``python -m``."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SettingError(f"{name!r} names nothing: expected module:name, such as train:create_state")
    _refuse_file(name, module, attribute)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with _as_program(module):
            found: Any = importlib.import_module(module)
    except SystemExit as error:
        raise SettingError(
            f"{name!r}: importing {module} ended the program (SystemExit: {error}): put what it runs below "
            'if __name__ == "__main__":'
        ) from error
    except Exception as error:
        remedy = f"searched {os.getcwd()} and PYTHONPATH: run this in the module's folder, or put that on PYTHONPATH"
        remedy = remedy if isinstance(error, ModuleNotFoundError) else "importing the module must not fail"
        raise SettingError(f"{name!r}: cannot import {module} ({type(error).__name__}: {error}); {remedy}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f"did you mean {near[0]}?" if near else f"{module} is {getattr(found, '__file__', 'no file')}"
            raise SettingError(f"{name!r}: {module} has no {attribute}; {hint}")
        found = getattr(found, part)
    return found


def _refuse_file(name: str, module: str, attribute: str) -> None:
    """Raise SettingError, with the name to use, if a file stands where the module is expected."""
    if not module.endswith(".py") and "/" not in module:
        return
    path = os.path.relpath(module)
    parts = path.removesuffix(".py").split("/")
    if os.pardir not in parts and all(map(str.isidentifier, parts)):
        searched = f"{os.getcwd()} and PYTHONPATH are searched for it"
    else:
        parts = parts[-1:]
        searched = f"run this in {os.path.dirname(os.path.abspath(module))}, or put that on PYTHONPATH"
    raise SettingError(f"{name!r} names a file, not a module: write {'.'.join(parts)}:{attribute}; {searched}")


def load_value(name: str) -> Any:
    """Return what ``module:name`` names, or the result of calling it if it is a function."""
    found = load_name(name)
    called = f"{name}()" if callable(found) else name
    try:
        with _as_program(name.partition(":")[0]):
            value = found() if callable(found) else found
    except SystemExit as error:
        raise SettingError(
            f"{called} ended the program (SystemExit: {error}), as a function that parses arguments does; name one "
            "that takes no arguments and returns the state"
        ) from error
    except Exception as error:
        raise SettingError(
            f"{called} raised {type(error).__name__}: {error}; it must take no arguments and return the state"
        ) from error
    if value is None:  # a forgotten return: without a target every checkpoint fits
        raise SettingError(f"{called} is None; it must {'return' if callable(found) else 'be'} the state")
    return value


@contextmanager
def _as_program(module: str) -> Iterator[None]:
    """Let code of the user see the arguments of a program of that name, without any, and not ours.

    What it prints goes to standard error, since standard output may be JSON."""
    file = getattr(sys.modules.get(module), "__file__", None) or module.replace(".", "/") + ".py"
    given, sys.argv = sys.argv, [file]
    try:
        with redirect_stdout(sys.stderr) if sys.stderr is not None else nullcontext():
            yield
    finally:
        sys.argv = given
