"""Resolve transforms to the source of each target leaf: Orbax's semantics, over key paths joined with ``/``."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.tree import Path, joined, show_path
from flax_ckpt_compat._trees.leaf_sources import Own
from flax_ckpt_compat._trees.state_dict import key_name

_FIELDS = ("original_key", "use_fallback", "value_fn", "multi_value_fn")
_LITERAL = re.compile(r"[\w/ -]*")  # keys that, as regular expressions, match only themselves


class Take(NamedTuple):
    """Outcome: take a stored leaf."""

    source: str | Path  # key path joined with ``/``, or a tuple if the transform gave a tuple
    transform: Any = None  # with a value_fn to apply if it has one; None if no transform matched


class Leaves(dict[Path, Any]):
    """The leaves of the old tree by key path; transforms ask for them by name joined with ``/``, or by path."""

    def __init__(self, leaves: Iterable[tuple[Path, Any]]):
        super().__init__(leaves)
        self.names: dict[str, list[Path]] = {}
        for path in self:
            self.names.setdefault(joined(path), []).append(path)

    def has(self, source: str | Path) -> bool:
        return source in self if isinstance(source, tuple) else source in self.names

    def of(self, source: str | Path) -> Any:
        """Return an existing leaf; raise NameCollisionError if two leaves have that name."""
        paths = [source] if isinstance(source, tuple) else self.names[source]
        if len(paths) > 1:
            raise NameCollisionError(
                f"{source!r} means {len(paths)} leaves of the old tree, {' and '.join(map(repr, paths))}; give "
                "original_key as a tuple of names",
                leaf=show_path(paths[0]),
            )
        return self[paths[0]]


class Entry(NamedTuple):
    """One transform; as an outcome: call its multi_value_fn."""

    number: int
    key: str
    pattern: re.Pattern[str] | None  # None for a literal key
    transform: Any

    def matches(self, key: str) -> bool:
        return self.key == key if self.pattern is None else bool(self.pattern.fullmatch(key))


class Transforms:
    """Transforms validated, flattened and compiled; false if there are none."""

    def __init__(self, tree: Any):
        """Compile a pytree of transforms, ours or Orbax's, in the order of their application, by sorted keys.

        Raise TransformError for another leaf, or an invalid transform, and NameCollisionError for a key twice."""
        flat: dict[str, Any] = {}
        for path, transform in named_leaves(tree)[0]:
            key = joined(path)
            if not all(hasattr(transform, name) for name in _FIELDS) or isinstance(transform, type):
                raise TransformError(
                    f"transforms: expected a Transform at {key or show_path(())}, found {type(transform).__name__}: "
                    f"{transform!r:.100}; write flax_ckpt_compat.Transform(original_key=…) or the like",
                    leaf=key,
                )
            if key in flat:
                raise NameCollisionError(f"transforms: two entries for {key!r}; leave one out", leaf=key)
            check(transform, key)
            flat[key] = transform
        self._entries = tuple(Entry(at, key, _compiled(key), flat[key]) for at, key in enumerate(flat))
        # Literal keys are looked up: a search through one transform for each leaf would be quadratic.
        self._literals = {entry.key: entry for entry in self._entries if entry.pattern is None}
        self._patterns = [entry for entry in self._entries if entry.pattern is not None]

    def __len__(self) -> int:
        return len(self._entries)

    def _matching(self, key: str) -> list[Entry]:
        """Return the transforms that match a key, in order."""
        found = [entry for entry in self._patterns if entry.matches(key)]
        if key in self._literals:
            found = sorted([*found, self._literals[key]], key=lambda entry: entry.number)
        return found

    def unmatched(self, keys: Sequence[str]) -> list[str]:
        """Return the transforms' keys that match none of ``keys``."""
        known = frozenset(keys)
        return [
            entry.key
            for entry in self._entries
            if (entry.key not in known if entry.pattern is None else not any(map(entry.matches, keys)))
        ]

    def resolve(
        self,
        key: str,
        has: Callable[[str | Path], bool],
        default_to_original: bool = True,
        is_empty: Callable[[str | Path], bool] = lambda _: False,
        like: Callable[[str], str] = lambda _: "",
    ) -> Take | Entry | Own | None:
        """Resolve one target leaf; None if neither a transform nor the checkpoint has it, and its own value stays.

        Matching transforms apply in order; the last one wins.

        ``has`` returns whether a stored leaf exists, by its name joined with ``/`` or its tuple of names. By
        ``default_to_original``, leaves that no transform matches come from the checkpoint, and fallbacks from the
        target; else the other way round. Raise TransformError if a matching transform asks for a leaf that does not
        exist, even if a later one replaces it, or for an empty container or None (``is_empty``) that none replaces;
        ``like`` returns an end for its message, of the name of that leaf."""
        outcome: Take | Entry | Own | None = None
        winner: Entry | None = None
        for entry in self._matching(key):
            # A fallback to the target leaves alone what an earlier transform gave.
            one = _of_one(entry, key, default_to_original)
            if isinstance(one, Take) and not (has(one.source) or is_empty(one.source)):
                raise _absent(entry, key, one.source, like)
            outcome, winner = one or outcome or Own.KEEP_TARGET, entry if one else winner
        if winner is not None and isinstance(outcome, Take) and not has(outcome.source):
            raise _absent(winner, key, outcome.source, like)
        if outcome is None and has(key):
            return Take(key) if default_to_original else Own.KEEP_TARGET
        return outcome


def _of_one(entry: Entry, key: str, default_to_original: bool) -> Take | Entry | None:
    transform = entry.transform
    if transform.use_fallback and default_to_original:
        return None
    if transform.multi_value_fn is not None:
        return entry
    return Take(_source(entry, key), transform)


def _absent(entry: Entry, key: str, source: str | Path, like: Callable[[str], str]) -> TransformError:
    is_fallback = entry.transform.use_fallback
    note = " (use_fallback with default_to_original=False takes the stored leaf)" if is_fallback else ""
    near = like(joined(source) if isinstance(source, tuple) else source)
    return TransformError(
        f"the transform {entry.key!r} takes {_shown(source)} for {key or show_path(())}, but no such "
        f"leaf is stored{note}; correct its original_key, or leave the transform out to keep the target's value{near}",
        leaf=key,
    )


def _source(entry: Entry, key: str) -> str | Path:
    original = entry.transform.original_key
    if original is None:
        return key
    if isinstance(original, tuple):
        return tuple(map(str, original))
    if "\\" not in original:  # no references to groups
        return str(original)
    try:
        matched = re.fullmatch(entry.pattern or entry.key, key)
        assert matched is not None
        return matched.expand(original)
    except (re.error, IndexError) as error:
        raise TransformError(
            f"the transform {entry.key!r} has the original_key {original!r}, which cannot be filled in for "
            f"{key}: {error}; refer only to groups that the key has",
            leaf=key,
        ) from error


def _shown(source: str | Path) -> str:
    return repr(source) if isinstance(source, tuple) or not source else source


def _compiled(key: str) -> re.Pattern[str] | None:
    try:
        return None if _LITERAL.fullmatch(key) else re.compile(key)
    except re.error as error:
        raise TransformError(
            f"transforms: the key {key!r} is not a regular expression: {error}; escape what is meant literally with "
            "re.escape",
            leaf=key,
        ) from error


def check(transform: Any, key: str | None = None) -> None:
    """Raise TransformError if a transform's fields contradict each other; ``key`` is for the message."""
    given = [name for name in _FIELDS if getattr(transform, name) not in (None, False)]
    original, problem = transform.original_key, ""
    is_path = isinstance(original, tuple) and all(isinstance(name, str | int) for name in original)
    if len(given) > 1 and given != ["original_key", "value_fn"]:
        problem = f"{' and '.join(given)} exclude each other; only original_key and value_fn go together"
    elif getattr(transform, "multi_value_fn_input_args", None) is not None and given != ["multi_value_fn"]:
        problem = "multi_value_fn_input_args is for a multi_value_fn, and there is none; add it, or leave both out"
    elif not (original is None or isinstance(original, str) or is_path):
        problem = f"original_key has to be text or a tuple of names, found {original!r:.100}; join the names with /"
    if problem:
        place = type(transform).__name__ + ("" if key is None else f" at {key!r}")
        raise TransformError(f"{place}: {problem}", leaf=key)


def named_leaves(tree: Any) -> tuple[list[tuple[Path, Any]], Any]:
    """Return the leaves of a pytree with their names, in jax's order, and its structure; None is not a leaf."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [(tuple(map(key_name, keys)), leaf) for keys, leaf in leaves], structure


def call_value_fn(transform: Any, value: Any, args: Any) -> Any:
    """Call a transform's value_fn.

    Only a RestoreTransform's function that requires the `RestoreArgs` of the target leaf gets them: Orbax never passes
    them, and functions written for Orbax must keep working."""
    function = transform.value_fn
    needed, _, any_number = _positional(function)
    takes = _is_for_restore(transform) and (needed >= 2 or any_number)
    return function(value, args) if takes else function(value)


def call_multi_value_fn(transform: Any, key: str, tree: Any, args: Any, *, in_memory: bool = False) -> Any:
    """Call a transform's multi_value_fn; that of a RestoreTransform also takes the target leaf's `RestoreArgs`.

    Orbax's `apply_transformations`, unlike its restore, passes none: ``in_memory``, only a function that requires them
    gets them."""
    function = transform.multi_value_fn
    needed, most, _ = _positional(function)
    takes = _is_for_restore(transform) and (needed if in_memory else most) >= 3
    return function(key, tree, args) if takes else function(key, tree)


def _is_for_restore(transform: Any) -> bool:
    return hasattr(transform, "multi_value_fn_input_args")


def _positional(function: Callable[..., Any]) -> tuple[int, float, bool]:
    """Return how many positional arguments a function needs, how many it takes, and whether it declares ``*args``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # without a signature, it may take any number
        return 0, math.inf, False
    found = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    any_number = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return sum(one.default is one.empty for one in found), math.inf if any_number else len(found), any_number
