"""Patch ``flax.training.checkpoints`` with our functions, and restore it.

An import hook patches the real module at the end of its own import, so no thread ever sees the originals through it.
If the module cannot be imported, the hook turns it into a stand-in with our public names. References outside of module
namespaces that were captured before `install()` (default arguments, containers) still point to Flax."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_TARGET = "flax.training.checkpoints"
_PACKAGE = "flax.training"
# Private in Flax's module too; a stand-in offers them because evaluation scripts call them.
_CALLED_PRIVATE_NAMES = ("_all_checkpoints", "_checkpoint_path", "_checkpoint_path_step")
_ABSENT = object()
_log = logging.getLogger("flax_ckpt_compat")

# ``module.__dict__`` without a module's own ``__getattribute__`` or properties, at which lazy modules load.
_namespace_of: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__


class _State:
    """State of the installation, guarded by `lock`. Import nothing under it: the hook takes it under an import lock."""

    lock = threading.RLock()
    wanted = False
    contexts = 0
    # Namespace, name, original and ours of what was replaced.
    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []  # noqa: RUF012 - one process, one state
    stand_ins: dict[str, types.ModuleType] = {}  # noqa: RUF012


def install() -> None:
    """Replace the functions of ``flax.training.checkpoints`` by ours for the whole process.

    Idempotent and thread-safe. Modules that imported functions from it before
    (``from flax.training.checkpoints import save_checkpoint as sc``) get ours too. If Flax's module is missing or
    fails to import, a module of that name with our public names takes its place.

    Raises:
        ImportError: flax itself cannot be imported.
    """
    install_on_import()
    importlib.import_module(_TARGET)
    _patch()


def install_on_import() -> None:
    """Install like `install`, but import nothing: patch Flax's module when the program imports it.

    The program can then still set environment variables that jax and Flax read at import.
    """
    with _State.lock:
        _State.wanted = True
        _add_finder()
    if _TARGET in sys.modules:
        _patch()


def uninstall() -> None:
    """Restore what was replaced and is still ours; within ``with installed():``, at its end.

    Modules that imported our functions while they were installed keep them.
    """
    with _State.lock:
        _State.wanted = False
        _restore_if_unused()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install within a ``with`` block; nests, and never undoes an outer install.

    Example:
        >>> with installed():
        ...     from flax.training.checkpoints import save_checkpoint
        >>> save_checkpoint is checkpoints.save_checkpoint
        True
    """
    with _State.lock:
        _State.contexts += 1
        _add_finder()
    try:
        importlib.import_module(_TARGET)
        _patch()
        yield
    finally:
        with _State.lock:
            _State.contexts -= 1
            _restore_if_unused()


def installed_in_flax() -> bool:
    """Return whether programs get our functions from ``flax.training.checkpoints`` here; import it to see."""
    try:
        saves = importlib.import_module(_TARGET).save_checkpoint
    except ImportError:
        return False
    return str(saves.__module__).startswith("flax_ckpt_compat.")


def load_ipython_extension(ipython: object) -> None:  # noqa: ARG001 - IPython calls it so
    """Run ``install()`` for ``%load_ext flax_ckpt_compat``."""
    install()


def unload_ipython_extension(ipython: object) -> None:  # noqa: ARG001
    """Run ``uninstall()`` for ``%unload_ext flax_ckpt_compat``."""
    uninstall()


def _add_finder() -> None:
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


def _patch() -> None:
    ours = vars(importlib.import_module("flax_ckpt_compat.checkpoints"))
    with _State.lock:
        module = sys.modules.get(_TARGET)
        if module is None or module is _State.stand_ins.get(_TARGET) or not (_State.wanted or _State.contexts):
            return
        for name in ours["__all__"]:
            original = _namespace_of(module).get(name, _ABSENT)
            if callable(ours[name]) and original is not ours[name]:
                _replace(_namespace_of(module), name, original, ours[name])
        # All earlier replacements too: a module may have been loaded meanwhile.
        _replace_everywhere({id(original): new for _, _, original, new in _State.replaced if original is not _ABSENT})


def _replace_everywhere(ours: dict[int, Any]) -> None:
    """Replace in all modules what has a key of ``ours`` as its id."""
    for module_name, module in list(sys.modules.items()):
        # Not isinstance(), which reads __class__ of proxies.
        if not issubclass(type(module), types.ModuleType) or module_name.partition(".")[0] == "flax_ckpt_compat":
            continue
        namespace = _namespace_of(module)
        for name, value in list((namespace or {}).items()):
            # In the target itself, replace public names only.
            if id(value) in ours and module_name != _TARGET:
                _replace(namespace, name, value, ours[id(value)])


def _replace(namespace: dict[str, Any], name: str, original: Any, ours: Any) -> None:
    _State.replaced.append((namespace, name, original, ours))
    namespace[name] = ours


def _restore_if_unused() -> None:
    if _State.wanted or _State.contexts:
        return
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
    for namespace, name, original, ours in reversed(_State.replaced):
        if namespace.get(name) is not ours:
            continue
        if original is _ABSENT:
            del namespace[name]
        else:
            namespace[name] = original
    _State.replaced.clear()
    for full_name, module in _State.stand_ins.items():
        if sys.modules.get(full_name) is module:
            del sys.modules[full_name]
        parent_name, _, child = full_name.rpartition(".")
        parent = sys.modules.get(parent_name)
        if parent is not None and _namespace_of(parent).get(child) is module:
            delattr(parent, child)
    _State.stand_ins.clear()


class _Finder(importlib.abc.MetaPathFinder):
    """Finder for the target, and for its package in case a future Flax drops it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in (_TARGET, _PACKAGE):
            return None
        finders = [getattr(one, "find_spec", None) for one in sys.meta_path if one is not self]  # Python skips others
        specs = (find(fullname, path, target) for find in finders if find is not None)
        spec: importlib.machinery.ModuleSpec | None = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return importlib.machinery.ModuleSpec(fullname, _Loader(None), is_package=fullname == _PACKAGE)
        if fullname == _TARGET:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loader that runs Flax's own, then patches the module; a missing or failing module becomes a stand-in."""

    def __init__(self, real: Any):
        self._real = real

    def __getattr__(self, name: str) -> Any:  # for runpy, and tools that look for the source before the import
        return getattr(self._real, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None if self._real is None else self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if self._real is None:
            _make_stand_in(module)
            return
        assert module.__spec__ is not None
        # For inspect, pkgutil and pickle.
        module.__loader__ = module.__spec__.loader = self._real
        try:
            self._real.exec_module(module)
        except Exception as error:  # noqa: BLE001 - releases of orbax and jax broke it with errors of many types
            _log.warning("%s fails to import (%r); flax_ckpt_compat replaces it", _TARGET, error)
            _make_stand_in(module)
        else:
            _patch()


def _make_stand_in(module: types.ModuleType) -> None:
    namespace = _namespace_of(module)
    for name in [name for name in namespace if not (name.startswith("__") and name.endswith("__"))]:
        del namespace[name]
    if module.__name__ == _TARGET:
        ours = importlib.import_module("flax_ckpt_compat.checkpoints")
        names = [*ours.__all__, *_CALLED_PRIVATE_NAMES]
        namespace.update({name: vars(ours)[name] for name in names}, __all__=list(ours.__all__))
        namespace["__doc__"] = ours.__doc__
        namespace["__getattr__"] = _missing_name
    with _State.lock:
        _State.stand_ins[module.__name__] = module


def _missing_name(name: str) -> Any:
    raise AttributeError(
        f"module {_TARGET!r} has no attribute {name!r}: Flax's own module is missing or cannot be imported"
    )


FINDER = _Finder()  # cli/pythonpath/sitecustomize.py asks it, too
