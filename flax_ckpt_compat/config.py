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
                                                     subtree, a longer stored sequence, or a target that is no tree
``unused_leaves``         auto, error, warn, ignore  a stored leaf that the target lacks, which is dropped. ``auto``:
                                                     ``kind_mismatch`` decides on numbered layers of which the target
                                                     has fewer; a schedule's count is warned of, all else logged
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
``progress``              none, bar, a function      where progress is shown: nowhere, as a bar on a terminal, or by a
                                                     function that takes a `flax_ckpt_compat.Progress`
``coordination_timeout``  600.0, any number > 0      seconds that process 0 waits for the others at each barrier of a
                                                     save; they wait for it twice as long, look-ups four times
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
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType, ModuleType
from typing import Any, Literal, TypedDict, Unpack, get_args, get_type_hints

from flax_ckpt_compat._core import arguments
from flax_ckpt_compat._core.errors import ArgumentError, SettingError
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._core.progress import Callback

__all__ = ["STRICT", "Settings", "current", "defaults", "override", "update", "use_orbax_format"]

_log = logging.getLogger("flax_ckpt_compat")
_VARIABLE = "FLAX_CKPT_COMPAT_"
_YES, _NO = ("1", "y", "yes", "t", "true", "on"), ("0", "n", "no", "f", "false", "off")
_WORDS: dict[str, Any] = {"none": None} | dict.fromkeys(_YES, True) | dict.fromkeys(_NO, False)


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
    """Settings by name, with the values that each takes, the default first; one that is a number lists none."""

    missing_leaves: Literal["error", "warn", "ignore"]
    shape_mismatch: Literal["warn", "error", "ignore"]
    kind_mismatch: Literal["warn", "error", "ignore"]
    unused_leaves: Literal["auto", "error", "warn", "ignore"]
    dtype: Literal["stored", "target"]
    structure: Literal["flax", "stored"]
    must_exist: Literal[False, True]
    mapped: Literal[False, True]
    checksums: Literal["verify", "write", "off"]
    compression: Literal[None, "crc32c", "zstd"]
    links: Literal["inside", "follow"]
    progress: Literal[None, "bar"] | Callback  # in this order; see `_VALUES`
    coordination_timeout: float


_VALUES: dict[str, tuple[Any, ...]] = {name: get_args(taken) for name, taken in get_type_hints(Changes).items()}
_VALUES["progress"] = get_args(_VALUES["progress"][0])  # functions are no values to compare with; numbers have none
_NAMES = tuple(_VALUES)
_DEFAULTS = Settings()
STRICT = Settings(shape_mismatch="error", kind_mismatch="error", structure="stored", must_exist=True)


def _validated(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: _value(name, given) for name, given in changes.items()}


def _value(name: str, given: Any) -> Any:
    """Return the value that a setting gets; a 0-d array counts as its value."""
    if name not in _NAMES:
        raise SettingError(_unknown(name))
    if name == "progress" and callable(given):
        return given
    try:
        value = arguments.number(given, name)
    except ArgumentError:
        value = given
    if name == "coordination_timeout":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise SettingError(f"setting {name} takes a positive number of seconds; {arguments.found(given)}")
        return value
    if not isinstance(value, str | int | float | None) or value not in _VALUES[name]:
        allowed = ", ".join(map(repr, _VALUES[name])) + ", or a function" * (name == "progress")
        raise SettingError(f"setting {name} takes {allowed}; {arguments.found(given)}")
    return _VALUES[name][_VALUES[name].index(value)]


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
        if name not in _NAMES:
            _log.warning("Environment variable %s has no effect: %s", variable, _unknown(name))
            continue
        value: Any = word if word in _VALUES.get(name, ()) else _WORDS.get(word, word)
        if name == "coordination_timeout":
            with suppress(ValueError):
                value = float(word)
        try:
            found[name] = _value(name, value)
        except SettingError as error:
            raise SettingError(f"environment variable {variable}: {error}") from None
    return found


# Explicit settings only, so that each caller can have its own defaults.
_process = _from_environment()
_block: ContextVar[Mapping[str, Any]] = ContextVar("flax_ckpt_compat_settings", default=MappingProxyType({}))
_defaults: ContextVar[Settings] = ContextVar("flax_ckpt_compat_defaults", default=_DEFAULTS)


def current() -> Settings:
    """Return the settings in force: of the innermost `override`, else the process's, else the `defaults`."""
    return dataclasses.replace(_defaults.get(), **{**_process, **_block.get()})


def update(*pair: Any, **changes: Unpack[Changes]) -> None:
    """Change settings for the whole process: by name, or one by its name and value, as Flax's ``config.update``.

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
    """Change settings by name inside a ``with`` block, in this thread (and async task) only.

    Raises:
        SettingError: no such setting, or not one of its values.
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
    from flax import config as flax_config  # here, because commands that look at checkpoints do without Flax

    try:
        return arguments.flag(flax_config.flax_use_orbax_checkpointing, "Flax's flag flax_use_orbax_checkpointing")
    except AttributeError:  # a later Flax without the flag; the environment still has the user's choice
        word = os.environ.get("FLAX_USE_ORBAX_CHECKPOINTING", "true")
    if word.lower() not in (*_YES, *_NO):
        raise SettingError(f"FLAX_USE_ORBAX_CHECKPOINTING is {word!r}; set it to true or false")
    return word.lower() in _YES


def __dir__() -> list[str]:
    return [*__all__, *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(current(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Module(ModuleType):
    """Module type that refuses assignments without effect: to settings, and to unknown names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NAMES:
            raise SettingError(f"a setting is not assigned to; call config.update({name}={value!r})")
        if name not in vars(self) and not name.startswith("__"):
            raise SettingError(f"{_unknown(name)}; settings are changed by config.update(name=value)")
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Module
