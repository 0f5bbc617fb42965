"""Validate what callers pass: numbers, flags, functions, keywords of a sibling function, and names as ``module:name``.

One-element arrays are accepted as scalars."""

from __future__ import annotations

import importlib
import math
import operator
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
    with _as_program(module, f"{name!r}: importing {module}, searched in {os.getcwd()} and PYTHONPATH,"):
        loaded = importlib.import_module(module)
    try:
        return operator.attrgetter(attribute)(loaded)
    except AttributeError as error:
        raise SettingError(f"{name!r}: {error}") from error


def load_value(name: str) -> Any:
    """Return what ``module:name`` names, or the result of calling it if it is a function."""
    value = load_name(name)
    if callable(value):
        with _as_program(name.partition(":")[0], f"{name}(), which must take no arguments and return the state,"):
            value = value()
    if value is None:  # a forgotten return: without a target every checkpoint fits
        raise SettingError(f"{name} is None; it must be the state, or return it")
    return value


@contextmanager
def _as_program(module: str, doing: str) -> Iterator[None]:
    """Let code of the user see the arguments of a program of that name, without any, and not ours.

    What it prints goes to standard error, since standard output may be JSON."""
    file = getattr(sys.modules.get(module), "__file__", None) or module.replace(".", "/") + ".py"
    given, sys.argv = sys.argv, [file]
    try:
        with redirect_stdout(sys.stderr) if sys.stderr is not None else nullcontext():
            yield
    except SystemExit as error:
        raise SettingError(
            f"{doing} ended the program (SystemExit: {error}), as parsing arguments does: put what a program runs "
            'below if __name__ == "__main__":'
        ) from error
    except Exception as error:
        raise SettingError(f"{doing} raised {type(error).__name__}: {error}") from error
    finally:
        sys.argv = given
