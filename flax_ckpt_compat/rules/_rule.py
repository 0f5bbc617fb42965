"""What a rule is: one step that turns the tree of a checkpoint into one that fits the target better."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import numpy as np

from flax_ckpt_compat._core.dtypes import stored_name
from flax_ckpt_compat._core.tree import Node

_Given = ParamSpec("_Given")
Apply = Callable[[Node, Node], Node]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One step from the tree of a checkpoint towards a target; made by the functions of `flax_ckpt_compat.rules`.

    Attributes:
        source: the Python that makes it, such as ``rules.rename('Dense_0', 'encoder')``.
        apply: takes the checkpoint's tree (leaves: `LeafHandle`, `Derived`, `Own` or None; see
            `flax_ckpt_compat._trees.leaf_sources`) and the target's (its own leaves), and gives a new tree of the
            first kind. It reads no array data, changes neither, and raises `TransformError` where it does not fit.
    """

    source: str
    apply: Apply = dataclasses.field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.source


def rule(make: Callable[Concatenate[str, _Given], Apply]) -> Callable[_Given, Rule]:
    """Makes a function that gives what a rule does into one that gives the rule, which knows its own source.

    Args:
        make: its first argument, which callers of the result do not give, is the rule for the messages: its source
            without ``rules.``.
    """
    signature = inspect.signature(make)
    parameters = list(signature.parameters.values())[1:]
    signature = signature.replace(parameters=parameters)

    @functools.wraps(make)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> Rule:
        words: list[str] = []
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                words.extend(map(_shown, value))
            elif parameter is not parameters[0] and parameter.default is not inspect.Parameter.empty:
                words.append(f"{name}={_shown(value)}")
            else:
                words.append(_shown(value))
        who = f"{make.__name__}({', '.join(words)})"
        return Rule(f"rules.{who}", make(who, *args, **kwargs))

    made.__signature__ = signature  # type: ignore[attr-defined]  # what help() shows
    return made


def _shown(value: object) -> str:
    """The value as Python that needs no imports; dtypes and scalar types by their names."""
    if isinstance(value, type | np.dtype):
        try:
            dtype = np.dtype(value)
        except TypeError:
            return repr(value)  # which no rule takes; its own error is the better one
        return repr(stored_name(dtype))
    if isinstance(value, np.generic | np.ndarray) or hasattr(value, "__array__"):
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    # Python reads what it writes for a complex number, ``-0j``, say, with other signs of zeros.
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return f"{type(value).__name__}({str(value)!r})"
    return repr(value)
