"""Check arguments of calls; load a target and transforms that are named as ``module:name``, from the user's code.

Commands that look at checkpoints load this module, but not jax and flax."""

from __future__ import annotations

import importlib
import operator
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from flax_ckpt_compat._core import arguments
from flax_ckpt_compat._core.errors import ArgumentError, SettingError


def loaded(target: Any, transforms: Any) -> tuple[Any, Any]:
    """Return a target and transforms, of which text is a name: of the target, or of a function that returns it."""
    state = _load_value(target) if isinstance(target, str) else target
    return state, _load_name(transforms) if isinstance(transforms, str) else transforms


def _load_name(name: str) -> Any:
    """Return what ``module:name`` names; modules in the working directory are found, as by ``python -m``."""
    module, _, attribute = name.partition(":")
    if not module or not attribute or "/" in module or module.endswith(".py"):
        raise SettingError(f"{name!r} is not module:name, such as train:create_state; a module is no path of a file")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _as_program(module, f"{name!r}: importing {module}, searched in {os.getcwd()} and PYTHONPATH,"):
        found = importlib.import_module(module)
    try:
        return operator.attrgetter(attribute)(found)
    except AttributeError as error:
        raise SettingError(f"{name!r}: {error}") from error


def _load_value(name: str) -> Any:
    """Return what ``module:name`` names, or the result of calling it if it is a function."""
    value = _load_name(name)
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


def item_name(value: Any) -> str | None:
    """Return the name of an item, or None; raise ArgumentError for anything else."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise ArgumentError(f"item is the name of an item, {arguments.found(value)}")


def check_function(value: Any, name: str) -> None:
    """Raise ArgumentError unless an optional function is one, or None."""
    if value is not None and not callable(value):
        raise ArgumentError(f"{name} must be a function, {arguments.found(value)}")
