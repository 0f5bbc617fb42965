"""Configure the library: settings, their sources, and Flax's own flag.

Set a setting by an environment variable (``FLAX_CKPT_COMPAT_`` + its name in capitals, read when this module is first
imported; empty counts as not given), for the process with `update`, or for a block with `override`.
``config.current()`` returns all values in force, ``config.must_exist`` one of them. Defaults are those of the table for
Flax's own functions, and ``STRICT`` for ``flax_ckpt_compat.restore`` and ``save``.

========================  =========================  ===========================================================
setting                   values (default first)     meaning
========================  =========================  ===========================================================
``missing_leaves``        error, warn, ignore        a target leaf that the checkpoint lacks: raise, or keep the
                                                     target's value with or without a warning
``shape_mismatch``        warn, error, ignore        stored and target shapes differ; the stored one is returned
``kind_mismatch``         warn, error, ignore        an array in the target over stored text, None, a number or a
                                                     subtree, a longer stored sequence, or a target that is not a tree
                                                     of arrays; what is stored is returned, and sequences cut
``unused_leaves``         auto, error, warn, ignore  a stored leaf that the target lacks, which is dropped. ``auto``:
                                                     for numbered layers of which the target has fewer, as
                                                     ``kind_mismatch`` says of longer sequences; a warning for a
                                                     schedule's count; for all else a line of the log
``dtype``                 stored, target             keep the stored dtype, or cast to the target leaf's
``structure``             flax, stored               without a target: Flax's nested dicts with text keys, or lists,
                                                     tuples and int keys where the format recorded them
``must_exist``            false, true                nothing to restore: return the target as Flax does, or raise
``mapped``                false, true                restored numpy arrays are memory of their own, or, if large and
                                                     stored as they are in a local file, private mappings of it
``checksums``             verify, write, off         record checksums in saves and verify them in restores, only
                                                     record them, or neither
``compression``           none, crc32c, zstd         codec of array data in Orbax-format checkpoints; with crc32c, which
                                                     does not compress, and zstd every reader checks each chunk
``links``                 inside, follow             a file of a checkpoint that is a link out of its directory: refuse
                                                     to read it, or follow it, if you trust who made it
``progress``              none, bar, a function      what reports of the progress of saves and restores go to: nothing,
                                                     a progress bar on a terminal, or a function that takes a
                                                     `flax_ckpt_compat.Progress`
``coordination_timeout``  600.0, any number > 0      seconds that process 0 waits for the others at each barrier of a
                                                     save; they wait for it twice as long, and look-ups four times as
                                                     long for this process's part of a background save
========================  =========================  ===========================================================
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType, ModuleType
from typing import Any, Literal, TypedDict, Unpack

from flax_ckpt_compat._core import arguments
from flax_ckpt_compat._core.errors import ArgumentError, SettingError
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.progress import Callback

__all__ = ["STRICT", "Settings", "current", "defaults", "override", "update", "use_orbax_format"]

_log = logging.getLogger("flax_ckpt_compat")
_VARIABLE = "FLAX_CKPT_COMPAT_"
_VALUES: dict[str, tuple[Any, ...]] = {
    "missing_leaves": ("error", "warn", "ignore"),
    "shape_mismatch": ("warn", "error", "ignore"),
    "kind_mismatch": ("warn", "error", "ignore"),
    "unused_leaves": ("auto", "error", "warn", "ignore"),
    "dtype": ("stored", "target"),
    "structure": ("flax", "stored"),
    "must_exist": (False, True),
    "mapped": (False, True),
    "checksums": ("verify", "write", "off"),
    "compression": (None, "crc32c", "zstd"),
    "links": ("inside", "follow"),
    "progress": (None, "bar"),
}
_SECONDS = ("coordination_timeout",)
_FUNCTIONS = ("progress",)  # these may also be one
_NAMES = (*_VALUES, *_SECONDS)
# Settings of earlier releases, and what to do instead.
_REMOVED = {
    "read_once": "leave it out; each process reads what it restores",
    "oldest_orbax": "leave it out; Orbax 0.6 and later read all saves; older Flax reads msgpack",
    "shadow": "leave it out; to compare both formats, `flax-ckpt convert` a checkpoint and `flax-ckpt diff` the two",
    "reuse_host_memory": "leave it out; background saves keep their memory for the next one",
}
_WORDS: dict[str, Any] = {"none": None, "false": False, "0": False, "no": False, "true": True, "1": True, "yes": True}


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """One consistent set of settings; see the module's table."""

    missing_leaves: str = "error"
    shape_mismatch: str = "warn"
    kind_mismatch: str = "warn"
    unused_leaves: str = "auto"
    dtype: str = "stored"
    structure: str = "flax"
    must_exist: bool = False
    mapped: bool = False
    checksums: str = "verify"
    compression: str | None = None
    links: str = "inside"
    coordination_timeout: float = 600.0
    progress: Callback | str | None = None


class Changes(TypedDict, total=False):
    """Settings by name, for type checkers: the fields of `Settings` with the values that each takes."""

    missing_leaves: Literal["error", "warn", "ignore"]
    shape_mismatch: Literal["warn", "error", "ignore"]
    kind_mismatch: Literal["warn", "error", "ignore"]
    unused_leaves: Literal["auto", "error", "warn", "ignore"]
    dtype: Literal["stored", "target"]
    structure: Literal["flax", "stored"]
    must_exist: bool
    mapped: bool
    checksums: Literal["verify", "write", "off"]
    compression: Literal["crc32c", "zstd"] | None
    links: Literal["inside", "follow"]
    coordination_timeout: float
    progress: Callback | Literal["bar"] | None


_DEFAULTS = Settings()
STRICT = Settings(shape_mismatch="error", kind_mismatch="error", structure="stored", must_exist=True)


def _validated(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: _value(name, given) for name, given in changes.items()}


def _value(name: str, given: Any) -> Any:
    """Return the value that a setting gets; a 0-d array counts as its value."""
    _check_not_removed(name)
    if name not in _NAMES:
        raise SettingError(_unknown(name))
    try:
        value = arguments.number(given, name)
    except ArgumentError:
        value = given
    if name in _SECONDS:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise SettingError(f"setting {name} takes a positive number of seconds; {arguments.found(given)}")
        return value
    if name in _FUNCTIONS and callable(given):
        return given
    if not isinstance(value, str | int | float | None) or value not in _VALUES[name]:
        allowed = ", ".join(repr(choice) for choice in _VALUES[name]) + ", or a function" * (name in _FUNCTIONS)
        raise SettingError(f"setting {name} takes {allowed}; {arguments.found(given)}")
    return _VALUES[name][_VALUES[name].index(value)]


def _check_not_removed(name: str) -> None:
    if name in _REMOVED:
        raise SettingError(f"{name} was removed; {_REMOVED[name]}")


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, _NAMES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no setting {name!r}; {hint}the settings are {', '.join(_NAMES)}"


def _from_environment() -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in sorted(os.environ.items()):
        name, word = variable.removeprefix(_VARIABLE).lower(), text.strip().lower()
        if not variable.startswith(_VARIABLE) or not word:
            continue
        if variable not in _variables() and name not in _REMOVED:
            _warn_about_unknown(variable)
            continue
        is_word = word in _WORDS and _WORDS[word] in _VALUES.get(name, ())
        value = _number(word) if name in _SECONDS else _WORDS[word] if is_word else word
        try:
            found.update(_validated({name: value}))
        except SettingError as error:
            raise SettingError(f"environment variable {variable}: {error}") from None
    return found


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def _variables() -> list[str]:
    return [_VARIABLE + name.upper() for name in _NAMES]


def _warn_about_unknown(variable: str) -> None:
    near = difflib.get_close_matches(variable.upper(), _variables(), n=1, cutoff=0.8)
    known = f"did you mean {near[0]}?" if near else f"the variables are {', '.join(_variables())}"
    _log.warning("Environment variable %s is not a setting and has no effect; %s", variable, known)


# Explicit settings only, so that each caller can have its own defaults.
_process = _from_environment()
_block: ContextVar[Mapping[str, Any]] = ContextVar("flax_ckpt_compat_settings", default=MappingProxyType({}))
_defaults: ContextVar[Settings] = ContextVar("flax_ckpt_compat_defaults", default=_DEFAULTS)


def current() -> Settings:
    """Return the settings in force: of the innermost `override`, else the process's, else the `defaults`."""
    return dataclasses.replace(_defaults.get(), **{**_process, **_block.get()})


def update(*pair: Any, **changes: Unpack[Changes]) -> None:
    """Change settings for the whole process.

    Args:
        pair: one setting's name and value, as Flax's ``config.update`` takes them.
        changes: settings by name.

    Raises:
        SettingError: no such setting, or not one of its values.
    """
    global _process
    if pair:
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise SettingError(f"update takes a setting's name and its value, or name=value; found {pair!r:.100}")
        _process = {**_process, **_validated({pair[0]: pair[1]})}
    _process = {**_process, **_validated(changes)}


@contextmanager
def override(**changes: Unpack[Changes]) -> Iterator[Settings]:
    """Change settings inside a ``with`` block, in this thread (and async task) only.

    Args:
        changes: settings by name.

    Raises:
        SettingError: no such setting, or not one of its values.

    Example:
        >>> with config.override(must_exist=True):
        ...     checkpoints.restore_checkpoint("nowhere", target=None)
        Traceback (most recent call last):
            ...
        flax_ckpt_compat.errors.CheckpointNotFoundError: ...
    """
    token = _block.set({**_block.get(), **_validated(changes)})
    try:
        yield current()
    finally:
        _block.reset(token)


@contextmanager
def defaults(settings: Settings) -> Iterator[Settings]:
    """Replace the table's defaults inside a ``with`` block; explicit settings take precedence."""
    token = _defaults.set(settings)
    try:
        yield current()
    finally:
        _defaults.reset(token)


presence.follows_links = lambda: current().links == "follow"


def use_orbax_format() -> bool:
    """Return Flax's flag ``flax_use_orbax_checkpointing``, read at each call: scripts change it midway."""
    from flax import config as flax_config

    try:
        value = flax_config.flax_use_orbax_checkpointing
    except AttributeError:  # a later Flax without the flag; the environment still has the user's choice
        return _flag_in_environment()
    return arguments.flag(value, "Flax's flag flax_use_orbax_checkpointing")


def _flag_in_environment() -> bool:
    value = os.environ.get("FLAX_USE_ORBAX_CHECKPOINTING", "true")
    if value.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True
    if value.lower() in ("n", "no", "f", "false", "off", "0"):
        return False
    raise SettingError(f"FLAX_USE_ORBAX_CHECKPOINTING is {value!r}; set it to true or false")


def __dir__() -> list[str]:
    return [*__all__, *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(current(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Module(ModuleType):
    """Module type that refuses assignments without effect: to settings, and to unknown names."""

    def __setattr__(self, name: str, value: Any) -> None:
        _check_not_removed(name)
        if name in _NAMES:
            raise SettingError(f"a setting is not assigned to; call config.update({name}={value!r})")
        if name not in vars(self) and not name.startswith("__"):
            raise SettingError(f"{_unknown(name)}; settings are changed by config.update(name=value)")
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Module
