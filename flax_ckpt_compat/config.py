"""The settings, where they come from, and Flax's own flag.

Every setting can be given as an environment variable (``FLAX_CKPT_COMPAT_`` + its name in capitals, read
when this module is first imported), set for the process with `update`, or for a block with `override`.

====================  =========================  ==========================================================
setting               values (default first)     meaning
====================  =========================  ==========================================================
``missing_leaves``    error, warn, keep          a target leaf that the checkpoint lacks: raise, or keep the
                                                 target's value with or without a warning
``shape_mismatch``    warn, error, ignore        stored and target shapes differ; the stored one is returned
``dtype``             stored, target             keep the stored dtype, or cast to the target leaf's
``structure``         flax, stored               without a target: Flax's nested dicts with text keys, or lists,
                                                 tuples and int keys where the format recorded them
``must_exist``        false, true                nothing to restore: return the target as Flax does, or raise
``compression``       none, zstd, gzip, blosc    codec of array data in Orbax-format checkpoints
====================  =========================  ==========================================================
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from flax_ckpt_compat._core.errors import SettingError

__all__ = ["Settings", "current", "override", "update", "use_orbax_format"]

_VALUES: dict[str, tuple[Any, ...]] = {
    "missing_leaves": ("error", "warn", "keep"),
    "shape_mismatch": ("warn", "error", "ignore"),
    "dtype": ("stored", "target"),
    "structure": ("flax", "stored"),
    "must_exist": (False, True),
    "compression": (None, "zstd", "gzip", "blosc"),
}
_WORDS: dict[str, Any] = {"none": None, "false": False, "0": False, "no": False, "true": True, "1": True, "yes": True}


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """One consistent set of settings; see the module's table."""

    missing_leaves: str = "error"
    shape_mismatch: str = "warn"
    dtype: str = "stored"
    structure: str = "flax"
    must_exist: bool = False
    compression: str | None = None

    def replace(self, **changes: Any) -> Settings:
        """A copy with some settings changed.

        Raises:
            SettingError: no such setting, or not one of its values.
        """
        for name, value in changes.items():
            if name not in _VALUES:
                raise SettingError(f"there is no setting {name!r}; the settings are {', '.join(_VALUES)}")
            if value not in _VALUES[name]:
                allowed = ", ".join(repr(choice) for choice in _VALUES[name])
                raise SettingError(f"setting {name} takes {allowed}; found {value!r}")
        return dataclasses.replace(self, **changes)


def _from_environment() -> Settings:
    changes: dict[str, Any] = {}
    for name, values in _VALUES.items():
        text = os.environ.get(f"FLAX_CKPT_COMPAT_{name.upper()}")
        if text is not None:
            word = text.strip().lower()
            changes[name] = _WORDS[word] if word in _WORDS and _WORDS[word] in values else word
    return Settings().replace(**changes)


_process = _from_environment()
_block: ContextVar[Settings | None] = ContextVar("flax_ckpt_compat_settings", default=None)


def current() -> Settings:
    """The settings in force here: those of the innermost `override`, else the process's."""
    return _block.get() or _process


def update(**changes: Any) -> None:
    """Changes settings for the whole process.

    Raises:
        SettingError: no such setting, or not one of its values.
    """
    global _process
    _process = _process.replace(**changes)


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Changes settings inside a ``with`` block, in this thread (and async task) only.

    Raises:
        SettingError: no such setting, or not one of its values.
    """
    token = _block.set(current().replace(**changes))
    try:
        yield current()
    finally:
        _block.reset(token)


def use_orbax_format() -> bool:
    """Flax's own flag ``flax_use_orbax_checkpointing``, read afresh: code flips it in the middle of a script."""
    from flax import config as flax_config

    return bool(getattr(flax_config, "flax_use_orbax_checkpointing", False))
