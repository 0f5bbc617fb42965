"""Run a program in this process as ``python SCRIPT`` or ``python -m MODULE`` would.

Python's behaviour was measured on CPython 3.11; ``tests/cli/test_cli_run.py`` compares with it.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import multiprocessing.spawn
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

from flax_ckpt_compat import _patching

_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Program(BaseException):
    """Exception that carries the program out of click, whose context and interrupt handling must not affect it."""

    def __init__(self, words: tuple[str, ...]):
        super().__init__(words)
        self._words = words

    def run(self) -> None:
        """Run the program with the shim installed; its exceptions pass through, with Python's own traceback."""
        _patching.install_on_import()
        _install_in_workers()
        first, *rest = self._words
        try:
            if first == "--":
                _run_script(rest[0], rest[1:])
            elif first.startswith("-m"):
                name, *rest = [first[2:], *rest] if first != "-m" else rest
                _run_module(name, rest)
            else:
                _run_script(first, rest)
        except SystemExit:
            raise
        except BaseException as error:
            _hide_our_frames(error)
            raise


def _run_script(script: str, args: list[str]) -> None:
    sys.argv[:] = [script, *args]
    if pkgutil.get_importer(script) is not None:
        # Not normalised: neither does python, and its messages show the path.
        _set_path0(os.path.join(os.getcwd(), script))
        _run_as_main("__main__", alter_argv=False)
        return
    path = os.path.abspath(script)
    _set_path0(os.path.dirname(os.path.realpath(script)))
    try:
        with io.open_code(path):
            pass
    except OSError as error:
        message = f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        print(message, file=sys.stderr)
        sys.exit(2)
    _exec_file(path)


def _run_module(name: str, args: list[str]) -> None:
    # Python has "-m" there until it has found the module.
    sys.argv[:] = ["-m", *args]
    _set_path0(os.getcwd())
    _run_as_main(name, alter_argv=True)


def _set_path0(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _fresh_main() -> types.ModuleType:
    """Create a new ``__main__``, in which pickle, dataclasses and multiprocessing look up the program's names."""
    global _our_main
    _our_main = sys.modules["__main__"]
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    return module


# Keeps the command's own module, whose namespace is cleared with its last reference.
_our_main: types.ModuleType | None = None


def _run_as_main(name: str, *, alter_argv: bool) -> None:
    _fresh_main()
    # Private, but python itself calls it, and has its frames in tracebacks.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _exec_file(path: str) -> None:
    module = _fresh_main()
    loader: Any
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, vars(module))  # noqa: S102


def _hide_our_frames(error: BaseException) -> None:
    """Remove our frames from the printed traceback; in the hook, because re-raising adds them again."""
    trace, show = error.__traceback__, sys.excepthook
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        trace = trace.tb_next

    def excepthook(kind: type[BaseException], value: BaseException, _: types.TracebackType | None) -> None:
        nonlocal trace
        # Drop references: the hook outlives the modules, and the program's objects must be freed before these.
        sys.excepthook, shown, trace = show, trace, None
        show(kind, value.with_traceback(shown), shown)

    sys.excepthook = excepthook


class _InstallInWorker:
    """Object that installs the shim when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _patching.install_on_import, ()


def _install_in_workers() -> None:
    """Make spawned and fork-server workers install the shim before they import the program."""
    original = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "flax_ckpt_compat": _InstallInWorker()}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
