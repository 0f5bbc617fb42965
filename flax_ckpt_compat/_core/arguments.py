"""Validate what callers pass: numbers, flags, functions, keywords of a sibling function, and names as ``module:name``.

One-element arrays are accepted as scalars."""

from __future__ import annotations

import difflib
import importlib
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from flax_ckpt_compat._core.errors import ArgumentError, SettingError


def found(value: Any) -> str:
    """Return the end of an error message: what was found in place of what is expected."""
    shape = getattr(value, "shape", None)  # an array may have been deleted, and cannot be shown
    return f"found an array of shape {shape}" if isinstance(shape, tuple) else f"found {value!r:.100}"


def number(value: Any, name: str, *, of_any_rank: bool = False) -> Any:
    """Return the Python number of a 0-d array, and anything else as it is; raise ArgumentError for other arrays.

    If ``of_any_rank``, arrays of one element and more axes count, too."""
    # 0-d arrays of numpy and jax, and numpy scalars, have item(), which turns numpy's and jax's bools into bool.
    if isinstance(value, (int, float, str)) or not hasattr(value, "item"):
        return value
    shape = getattr(value, "shape", ())
    if not isinstance(shape, tuple):  # of a class, such as np.float32
        return value
    if (math.prod(shape) != 1) if of_any_rank else shape:
        expected = "one number, or an array of equal ones" if name == "step" else "one number"
        raise ArgumentError(f"{name} must be {expected}, {found(value)}")
    if is_traced(value):
        raise ArgumentError(
            f"{name} has no value yet, because jax is tracing this function (found {value!r:.100}); call this outside "
            "of jit and other transformations"
        )
    try:
        item = value.item()
    except RuntimeError as error:  # of a jax array that was deleted or donated
        raise ArgumentError(f"{name} cannot be read: {error}") from error
    if isinstance(item, (bool, int, float)):
        return item
    try:
        return float(value)  # such as bfloat16
    except (TypeError, ValueError):
        return item


def flag(value: Any, name: str) -> bool:
    """Return the value of a flag; 0, 1 and arrays of one element count, and None as False."""
    given = False if value is None else number(value, name, of_any_rank=True)
    if not isinstance(given, bool | int | float) or given not in (0, 1):
        raise ArgumentError(f"{name} must be True or False, {found(value)}")
    return bool(given)


def item_name(value: Any) -> str | None:
    """Return the name of an item, or None; raise ArgumentError for anything else."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise ArgumentError(f"item is the name of an item, {found(value)}")


def check_function(value: Any, name: str) -> None:
    """Raise ArgumentError unless an optional function is one, or None."""
    if value is not None and not callable(value):
        raise ArgumentError(f"{name} must be a function, {found(value)}")


def is_traced(value: Any) -> bool:
    """Return whether a value is a jax tracer, without importing jax: a tracer implies that it is loaded."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def load_name(name: str) -> Any:
    """Return what ``module:name`` names; modules in the working directory are found, as by ``python -m``."""
    module, _, attribute = name.partition(":")
    if not module or not attribute or "/" in module or module.endswith(".py"):
        raise SettingError(f"{name!r} is not module:name, such as train:create_state; a module is no path of a file")
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
