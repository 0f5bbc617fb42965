"""Define `Rule`: one step from the tree of a checkpoint towards a target."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec

import numpy as np

from flax_ckpt_compat._core.dtypes import dtype_name
from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.location import as_text
from flax_ckpt_compat._core.tree import Node
from flax_ckpt_compat.rules import _nodes

_Given = ParamSpec("_Given")
# Opens another checkpoint, by path, step and prefix; returns where it is, and its tree.
OpenTree = Callable[[str, Any, str], tuple[str, Node]]
Apply = Callable[..., Node]


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Begin the messages of errors with the name of a rule."""
    try:
        yield
    except (TransformError, NameCollisionError) as error:
        raise type(error)(f"{name}: {error}", path=error.path, leaf=error.leaf) from error.__cause__


class Trees(NamedTuple):
    """The trees that a rule is applied to: the checkpoint's, the target's or None; and perhaps an `OpenTree`."""

    stored: Node
    target: Node
    open_tree: Any = None


def applied(name: str, change: Callable[..., Node], /, *args: Any, **kwargs: Any) -> Apply:
    """Return the `Rule.apply` of a function of `Trees`; cloudpickle can send it to other machines."""

    def apply(*trees: Any) -> Node:
        with named(name):
            return change(Trees(*trees), *args, **kwargs)

    return apply


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One step from the tree of a checkpoint towards a target; made by the functions of `flax_ckpt_compat.rules`.

    Attributes:
        source: Python source of the call, such as ``rules.rename('Dense_0', 'encoder')``.
        apply: takes the checkpoint's tree (leaves: ``LeafHandle``, ``Derived``, ``Own`` or None) and the target's
            neutral tree, and returns a new checkpoint tree; it reads no arrays and changes neither.
        opens: path and prefix of each other checkpoint that it opens, for which ``apply`` also takes an ``OpenTree``.
    """

    source: str
    apply: Apply = dataclasses.field(repr=False, compare=False)
    opens: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False, compare=False)

    def apply_to(self, tree: Node, target: Node, open_tree: OpenTree) -> Node:
        """Apply it, with the means to open another checkpoint if it needs that."""
        return self.apply(tree, target, open_tree) if self.opens else self.apply(tree, target)

    def __str__(self) -> str:
        return self.source


def rule(change: Callable[Concatenate[Trees, _Given], Node]) -> Callable[_Given, Rule]:
    """Decorate a function of `Trees` and arguments, so that it takes these alone and returns the `Rule`."""
    signature = inspect.signature(change)
    parameters = list(signature.parameters.values())[1:]
    signature = signature.replace(parameters=parameters, return_annotation="Rule")

    @functools.wraps(change)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> Rule:
        call, words = signature.bind(*args, **kwargs), list[str]()
        bound = call.arguments
        for name, value in bound.items():  # what the caller may change later
            if isinstance(value, Mapping | list | np.ndarray):
                bound[name] = dict(value) if isinstance(value, Mapping) else copy.copy(value)
        kinds = [signature.parameters[name] for name in bound]
        given = [(one, bound[one.name] if one.kind is one.VAR_POSITIONAL else (bound[one.name],)) for one in kinds]
        for one, values in given:
            is_named = one is not parameters[0] and one.default is not one.empty and one.name != "replacement"
            words += [f"{one.name}={_shown(value)}" if is_named else _shown(value) for value in values]
        name = f"{change.__name__}({', '.join(words)})"
        with named(name):
            for one, values in given:
                _check(one, values)
            if "patterns" in signature.parameters and not all(bound.get("patterns", [""])):
                raise TransformError("name at least one path; '.*' is the whole tree")
        opens = [other for inner in bound.get("transforms", ()) for other in inner.opens]
        if "path" in bound:
            opens.append((as_text(bound["path"]), as_text(bound.get("prefix", "checkpoint_"), "prefix")))
        return Rule(f"rules.{name}", applied(name, change, *call.args, **call.kwargs), tuple(opens))

    made.__signature__ = signature  # type: ignore[attr-defined]
    return made


def _is_list(value: Any, kind: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return (is_list or getattr(value, "ndim", 0) == 1) and all(isinstance(one, kind) for one in value)


# Annotation of an argument, without None → its words for messages, and whether a value is such.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda one: isinstance(one, str)),
    "int": ("a whole number", lambda one: isinstance(one, int | np.integer)),
    "Sequence[str]": ("a list of text", lambda one: _is_list(one, str)),
    "Sequence[int]": ("a list of whole numbers", lambda one: _is_list(one, int | np.integer)),
    "str | Mapping[str, Replacement]": ("text or a mapping", lambda one: isinstance(one, str | Mapping)),
    "Replacement": ("text or a function", lambda one: isinstance(one, str) or callable(one)),
    "Callable[[Any], Any]": ("a function", callable),
    "Sequence[Rule]": ("a list of rules", lambda one: _is_list(one, Rule)),
}
_PATTERNS = ("pattern", "patterns", "source", "at", "stored_at")  # names of arguments


def _check(parameter: inspect.Parameter, values: Sequence[Any]) -> None:
    """Raise an error unless arguments are what an annotation says, and regular expressions if they are patterns."""
    kind = parameter.annotation.removesuffix(" | None")
    for one in values:
        is_known = kind in _KINDS and parameter.name != "prefix" and (one is not None or kind == parameter.annotation)
        if is_known and not _KINDS[kind][1](one):
            raise TransformError(f"{parameter.name} is {_KINDS[kind][0]}, found {type(one).__name__}: {one!r:.100}")
        if parameter.name in _PATTERNS and isinstance(one, str):
            _nodes.compiled(one)


def _shown(value: object) -> str:
    """Return a value as Python source without imports; dtypes and scalar types by their names."""
    if isinstance(value, type | np.dtype):
        with contextlib.suppress(TypeError):  # of a class that no rule takes
            return repr(dtype_name(np.dtype(value)))
    if hasattr(value, "__array__"):
        value = np.asarray(value).tolist()
    if isinstance(value, Rule):
        return value.source
    if isinstance(value, os.PathLike):
        return repr(as_text(value))
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_shown(key)}: {_shown(one)}' for key, one in value.items())}}}"
    if inspect.isroutine(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    # The repr of a complex number such as ``-0j`` evaluates to other signs of zeros.
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return f"{type(value).__name__}({str(value)!r})"
    if isinstance(value, str) and "\\" in value and value.isprintable() and not re.search(r"'|\\$", value):
        return f"r'{value}'"  # as one writes patterns
    return repr(value)
