"""What a rule is: one step that turns the tree of a checkpoint into one that fits the target better."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

import numpy as np

from flax_ckpt_compat._core.tree import Node

_Given = ParamSpec("_Given")
Apply = Callable[[Node, Node], Node]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One step from the tree of a checkpoint towards a target; made by the functions of `flax_ckpt_compat.rules`.

    Attributes:
        source: the Python that makes it, such as ``rules.rename('Dense_0', 'encoder')``.
        apply: takes the checkpoint's tree (leaves: `LeafHandle`, `flax_ckpt_compat.leaves.Computed`, None,
            `flax_ckpt_compat.leaves.Own`) and the target's (leaves: the target's own), and gives a new tree of the
            first kind. It reads no array data, changes neither, and raises `TransformError` where it does not fit.
    """

    source: str
    apply: Apply = dataclasses.field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.source


def rule(make: Callable[_Given, Apply]) -> Callable[_Given, Rule]:
    """Makes a function that gives what a rule does into one that gives the rule, which knows its own source."""
    signature = inspect.signature(make)
    first = next(iter(signature.parameters), None)

    @functools.wraps(make)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> Rule:
        given = signature.bind(*args, **kwargs).arguments
        words: list[str] = []
        for name, value in given.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                words.extend(map(repr, value))
            elif name != first and signature.parameters[name].default is not inspect.Parameter.empty:
                words.append(f"{name}={_shown(value)}")
            else:
                words.append(_shown(value))
        return Rule(f"rules.{make.__name__}({', '.join(words)})", make(*args, **kwargs))

    return made


def _shown(value: object) -> str:
    """The value as Python; dtypes and scalar types by their names."""
    if isinstance(value, type | np.dtype) or hasattr(value, "dtype"):
        return repr(np.dtype(value).name)
    return repr(list(value) if isinstance(value, list | tuple) else value)
