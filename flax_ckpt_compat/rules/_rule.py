"""Define `Rule`: one step from the tree of a checkpoint towards a target."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec

import numpy as np

from flax_ckpt_compat._core.dtypes import dtype_name
from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.location import as_text
from flax_ckpt_compat._core.tree import Node, Path, show_path

_Given = ParamSpec("_Given")
# Opens another checkpoint, by path, step and prefix; returns where it is, and its tree.
OpenTree = Callable[[str, Any, str], tuple[str, Node]]
Apply = Callable[..., Node]
_name: ContextVar[str] = ContextVar("name")  # of the rule that is made or applied, for messages


class RuleError(Exception):
    """A rule that is invalid, or does not fit; `named` makes the error of it that callers see."""

    def __init__(
        self, problem: str, *, leaf: str | None = None, kind: type[TransformError | NameCollisionError] = TransformError
    ):
        super().__init__(problem)
        self.leaf, self.kind = leaf, kind


def misfit(path: Path, problem: str) -> RuleError:
    """Return the error for what is at a key path."""
    shown = show_path(path)
    return RuleError(f"{shown} {problem}", leaf=shown)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Begin the messages of errors with the name of a rule."""
    token = _name.set(name)
    try:
        yield
    except RuleError as error:
        raise error.kind(f"{name}: {error}", leaf=error.leaf) from error.__cause__
    finally:
        _name.reset(token)


def applied(name: str, apply: Apply) -> Apply:
    """Return an `apply` whose errors are `named`; cloudpickle can send it to other machines, as `convert` may."""

    def apply_named(*trees: Any) -> Node:
        with named(name):
            return apply(*trees)

    return apply_named


def name_in_messages() -> str:
    """Return the name of the rule that is applied; functions that use a ContextVar cannot be sent."""
    return _name.get()


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One step from the tree of a checkpoint towards a target; made by the functions of `flax_ckpt_compat.rules`.

    Attributes:
        source: Python source of the call, such as ``rules.rename('Dense_0', 'encoder')``.
        apply: takes the checkpoint's tree (leaves: ``LeafHandle``, ``Derived``, ``Own`` or None; see
            ``flax_ckpt_compat._trees.leaf_sources``) and the target's neutral tree, and returns a new checkpoint tree.
            It reads no array data, changes neither, and raises ``TransformError`` if the rule does not fit.
        opens: path and prefix of each other checkpoint that it opens; if there are any, ``apply`` also takes an
            ``OpenTree``.
    """

    source: str
    apply: Apply = dataclasses.field(repr=False, compare=False)
    opens: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False, compare=False)

    def apply_to(self, tree: Node, target: Node, open_tree: OpenTree) -> Node:
        """Apply it, with the means to open another checkpoint if it needs that."""
        return self.apply(tree, target, open_tree) if self.opens else self.apply(tree, target)

    def __str__(self) -> str:
        return self.source


def rule(make: Callable[_Given, Apply]) -> Callable[_Given, Rule]:
    """Decorate a function that returns a rule's `apply`, so that it returns the `Rule`, whose errors are `named`."""
    signature = inspect.signature(make)
    first = next(iter(signature.parameters), None)

    @functools.wraps(make)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> Rule:
        words: list[str] = []
        bound = signature.bind(*args, **kwargs).arguments
        given = [(signature.parameters[name], value) for name, value in bound.items()]
        for parameter, value in given:
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                words.extend(map(_shown, value))
            elif parameter.name in (first, "replacement") or parameter.default is inspect.Parameter.empty:
                words.append(_shown(value))
            else:
                words.append(f"{parameter.name}={_shown(value)}")
        name = f"{make.__name__}({', '.join(words)})"
        with named(name):
            for parameter, value in given:
                _check_type(parameter, value)
            apply = make(*args, **kwargs)
        return Rule(f"rules.{name}", applied(name, apply), getattr(apply, "opens", ()))

    return made


# Annotation of an argument → its words for messages, and its type, or that of the items of a list.
_KINDS: dict[str, tuple[str, Any]] = {
    "str": ("text", str),
    "int": ("a whole number", (int, np.integer)),
    "Sequence[str]": ("a list of text", str),
    "Sequence[int]": ("a list of whole numbers", (int, np.integer)),
    "Mapping[str, Replacement]": ("a mapping of text to it", Mapping),
    "Replacement": ("text or a function", (str, Callable)),
    "Callable[[Any], Any]": ("a function", Callable),
    "None": ("", type(None)),
}


def _check_type(parameter: inspect.Parameter, value: Any) -> None:
    """Raise an error unless an argument is what its annotation says, if `_KINDS` knows all of that."""
    kinds = str(parameter.annotation).split(" | ")
    # A prefix may also be a path object, and `as_text` refuses others.
    if parameter.name == "prefix" or not _KINDS.keys() >= set(kinds):
        return
    for one in value if parameter.kind is inspect.Parameter.VAR_POSITIONAL else (value,):
        if not any(_is(one, kind) for kind in kinds):
            words = " or ".join(_KINDS[kind][0] for kind in kinds if kind != "None")
            raise RuleError(f"{parameter.name} is {words}, found {type(one).__name__}: {one!r:.100}")


def _is(value: Any, kind: str) -> bool:
    if not kind.startswith("Sequence"):
        return isinstance(value, _KINDS[kind][1])
    items = list(value) if isinstance(value, np.ndarray) and value.ndim == 1 else value
    is_list = isinstance(items, Sequence) and not isinstance(items, str | bytes)
    return is_list and all(isinstance(one, _KINDS[kind][1]) for one in items)


def _shown(value: object) -> str:
    """Return a value as Python source without imports; dtypes and scalar types by their names."""
    if isinstance(value, type | np.dtype):
        try:
            dtype = np.dtype(value)
        except TypeError:
            return repr(value)  # no rule takes it; leave the error to the rule
        return repr(dtype_name(dtype))
    if isinstance(value, np.generic | np.ndarray) or hasattr(value, "__array__"):
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
