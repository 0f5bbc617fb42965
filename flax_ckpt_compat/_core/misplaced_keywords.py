"""Answer a keyword of a sibling function with what to write here; Python alone says that it is unexpected."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_POLICIES = ("missing_leaves", "shape_mismatch", "kind_mismatch", "dtype", "structure", "must_exist", "mapped")
_IN_SETTINGS = "with flax_ckpt_compat.config.override({}=…): around the call, or pass {}= to flax_ckpt_compat.{}"

OF_RESTORE_CHECKPOINT = {"path": "ckpt_dir=", "transforms": "orbax_transforms="} | {
    name: _IN_SETTINGS.format(name, name, "restore") for name in _POLICIES
}
OF_RESTORE = {
    "ckpt_dir": "path=",
    "orbax_transforms": "transforms=",
    "orbax_checkpointer": "restore_checkpoint(…, orbax_checkpointer=…)",
}
OF_SAVE_CHECKPOINT = {
    "path": "ckpt_dir=",
    "compression": _IN_SETTINGS.format("compression", "compression", "save"),
    "format": "format= in a call of flax_ckpt_compat.save; here, flax.config.flax_use_orbax_checkpointing decides",
}
OF_SAVE = {"ckpt_dir": "path=", "orbax_checkpointer": "save_checkpoint(…, orbax_checkpointer=…)"}


def explained(instead: dict[str, str]) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Decorate a function: for a keyword in ``instead`` it raises a TypeError that says what to write."""

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def wrapper(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            for name in instead.keys() & kwargs.keys():
                raise TypeError(f"{function.__name__}() takes no {name}=; write {instead[name]}")
            return function(*args, **kwargs)

        return wrapper

    return decorate
