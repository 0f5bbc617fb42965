"""Interpret the ``transforms`` argument: rules, applied to the checkpoint's tree, or Orbax's, resolved per leaf."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from flax_ckpt_compat import config
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError, TransformError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Node, Path, from_leaves, iter_leaves, joined, map_leaves
from flax_ckpt_compat._discovery import locating, opening, saved_steps
from flax_ckpt_compat._save import async_saves
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, FunctionInput, Own, nearest
from flax_ckpt_compat._trees.old_namedtuples import modernize
from flax_ckpt_compat.rules import Rule, names
from flax_ckpt_compat.transforms import restore_args
from flax_ckpt_compat.transforms._resolve import Entry, Leaves, Transforms, call_multi_value_fn, call_value_fn

_log = logging.getLogger("flax_ckpt_compat")


class TransformSpec:
    """The ``transforms`` of one call."""

    def __init__(self, given: Any = None, *, default_to_original: bool = True, strict: bool = False):
        """Parse rules, a mapping of names, a pytree of transforms (ours or Orbax's), or a list of these.

        By ``default_to_original``, leaves that no transform matches come from the checkpoint, else from the target. If
        ``strict``, a leaf that the checkpoint lacks is an error, whatever was given."""
        self.rules = _rules(given)  # ready-made rules, in order
        self._others = contextlib.ExitStack()  # of `opening`
        is_empty = isinstance(given, list | tuple) and not given  # as of a program that found nothing to change
        # Transforms were given, ``{}`` included: None in the target stays None, and a stored None counts as missing.
        self.orbax_semantics = given is not None and not self.rules and not is_empty
        # Leaves that the checkpoint lacks keep the target's value, as in Orbax. Rules and no transforms are strict.
        self.lenient = self.orbax_semantics and not strict
        self._transforms = Transforms(given if self.orbax_semantics else None)
        are_items = bool(self._transforms) and isinstance(given, list)
        self._is_list_of_dicts = are_items and all(isinstance(one, dict) for one in given)
        self._default_to_original = default_to_original
        self._is_active = self.orbax_semantics and (bool(self._transforms) or not default_to_original)

    def wait_for_pending_saves(self) -> None:
        """Wait for background saves to the other checkpoints, before a retry could drop a failure of theirs."""
        for path, prefix in dict.fromkeys(other for rule in self.rules for other in rule.opens):
            async_saves.wait_for_pending_saves(saved_steps.checkpoint_dir(path, prefix))

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Close the other checkpoints that rules open in the block; raise `ReplacedError` if one was replaced."""
        with contextlib.ExitStack() as self._others:
            yield

    def _open(self, path: str, step: Any, prefix: str) -> tuple[str, Node]:
        """Open another checkpoint for a rule, within `opening`; return its path and tree."""
        checkpoint_dir, verify = saved_steps.checkpoint_dir(path, prefix), config.current().checksums == "verify"
        found = locating.find(checkpoint_dir, step)
        if isinstance(found, locating.Absence):
            raise found.error(checkpoint_dir.root)
        location = found.location.listed()
        self._others.enter_context(locating.unchanged(location))
        opened = self._others.enter_context(contextlib.closing(opening.Opened(location, verify=verify)))
        trees = {name: opened.reader(name).tree for name in opened.trees}
        return location.path, next(iter(trees.values())) if len(trees) == 1 else Branch(trees)

    def apply_rules(self, stored: Node, target: Node, path: str, *, warns: bool = True) -> Node:
        """Apply all rules to a checkpoint's tree of leaf handles; the target is a neutral tree, or None."""
        wanted = [joined(place) for place, _ in iter_leaves(target)] if self._is_list_of_dicts else []
        if isinstance(target, Branch) and wanted and len(self._transforms.unmatched(wanted)) == len(self._transforms):
            raise TransformError(
                f"{path}: a list of nothing but dicts is read as Orbax reads it, as the transforms of the items of "
                "a list, and the target has no such items; give one dict",
                path=path,
            )
        tree = modernize(stored, target) if self.rules else stored
        for rule in self.rules:
            try:
                tree = rule.apply_to(tree, target, self._open)
            except CheckpointError as error:
                if error.path is not None:  # of another checkpoint
                    raise
                raise type(error)(f"{path}: {error}", path=path, leaf=error.leaf) from error
        carries = warns and any(one.source.startswith("rules.optimizer_state(") for one in self.rules)
        if carries and (lost := names.unused_moments(stored, tree, target)):
            advice = "let rules before optimizer_state change moments, too"
            _log.warning("%s: %s are not used; %s", path, one_line(lost), advice)
        return tree

    def chooser(self, tree: Node) -> _Chooser | None:
        """Return the function that chooses a source for each target leaf, or None without transforms."""
        return _Chooser(tree, self._transforms, self._default_to_original) if self._is_active else None

    def explain_unmatched(self, target: Node) -> str:
        """Return a message about transforms that match no leaf of the target; empty if none."""
        return _explain_unmatched(self._transforms, (path for path, _ in iter_leaves(target)))

    def warn_without_target(self) -> None:
        """Warn that transforms do nothing without a target, as in Flax."""
        if self._is_active:
            _log.warning("orbax_transforms say what becomes of a target's leaves; without a target they do nothing")


def _rules(given: Any) -> tuple[Rule, ...]:
    """Return the rules given, and mappings of names as rules; none for Orbax's transforms alone."""
    if isinstance(given, Rule) or _is_of_names(given):
        given = [given]
    is_list = isinstance(given, list | tuple)
    found = list(given.values()) if isinstance(given, Mapping) else list(given) if is_list else []
    has_rules = any(isinstance(one, Rule) for one in found)
    if isinstance(given, Iterator) or any(map(inspect.isfunction, found)) or (has_rules and not is_list):
        raise TransformError(
            "rules are given as a list of calls, such as [rules.rename('Dense_0', 'encoder'), rules.drop('extra')]; "
            f"found {given!r:.100}"
        )
    return tuple(map(_step, found)) if is_list and (has_rules or any(map(_is_of_names, found))) else ()


def _is_of_names(given: Any) -> bool:
    """Return whether a mapping has text among its values: stored names, by the target's."""
    return isinstance(given, Mapping) and any(isinstance(one, str) for one in given.values())


def _step(given: Any) -> Rule:
    """Return a rule, a mapping of names or a pytree of transforms as a rule."""
    if isinstance(given, Rule):
        return given
    if not isinstance(given, Mapping):
        raise TransformError(
            f"found {given!r:.100} in a list of rules; expected rules, and mappings of the target's names to stored "
            "names or to Transforms"
        )
    if _is_of_names(given):
        if not all(isinstance(one, str) for one in given.values()):
            raise TransformError(f"names and Transforms in one mapping; give two in a list: {given!r:.200}")
        return names.from_names(given)
    transforms = Transforms(given)

    def apply(tree: Node, target: Node) -> Node:
        if target is None:
            raise TransformError("transforms say what becomes of a target's leaves; pass a target, or use rules")
        wanted = {path: leaf for path, leaf in iter_leaves(target) if leaf is not None and not isinstance(leaf, Branch)}
        if unmatched := _explain_unmatched(transforms, wanted):
            raise TransformError(unmatched)
        choose = _Chooser(tree, transforms, True)
        given = {path: source for path, leaf in wanted.items() if (source := choose(path, leaf))}
        above = {path[:end] for path in given for end in range(len(path))}
        # What is stored above or below a leaf that is given has to make room for it.
        stays = {
            path: leaf
            for path, leaf in iter_leaves(tree)
            if path not in above and given.keys().isdisjoint(path[:end] for end in range(len(path)))
        }
        return from_leaves(stays | given, like=tree)

    return Rule(repr(given), apply)


def _explain_unmatched(transforms: Transforms, wanted: Iterable[Path]) -> str:
    if not transforms or not (unmatched := transforms.unmatched(list(map(joined, wanted)))):
        return ""
    return (
        f"transforms whose keys match no leaf of the target: {one_line(unmatched)}; keys are names of the "
        "target, and original_key is the stored one: they may be misspelt, or reversed"
    )


class _Chooser:
    """Resolver of Orbax's transforms: key path and leaf of the target → its source; None for the stored one there."""

    def __init__(self, tree: Node, given: Transforms, default_to_original: bool):
        self._tree, self._given, self._default_to_original = tree, given, default_to_original
        leaves = list(iter_leaves(tree))
        self._leaves = Leaves((path, leaf) for path, leaf in leaves if isinstance(leaf, LeafHandle | Derived))
        self._empty = Leaves((path, leaf) for path, leaf in leaves if leaf is None or isinstance(leaf, Branch))
        # Inputs of a multi_value_fn, by its transform's key: leaves that share a transform share them.
        self._inputs: dict[str, dict[Path, Derived | FunctionInput]] = {}

    def __call__(self, path: Path, leaf: Any) -> LeafHandle | Derived | Own | None:
        key = joined(path)
        outcome = self._given.resolve(key, self._leaves.has, self._default_to_original, self._empty.has, self._like)
        if isinstance(outcome, Entry):
            return self._derive(key, outcome, leaf)
        if outcome is None or outcome is Own.KEEP_TARGET:
            return outcome  # a leaf known to neither is recorded by the match
        if outcome.transform is None and outcome.source == key:
            return None
        stored: LeafHandle | Derived = self._leaves.of(outcome.source)
        if outcome.transform is None or outcome.transform.value_fn is None:
            return stored
        function = _note_leaf(key)(functools.partial(call_value_fn, outcome.transform, args=restore_args(leaf)))
        one = stored if isinstance(stored, Derived) else FunctionInput(stored, _input_target(leaf, stored))
        return Derived((one,), function, None, None, "value_fn")

    def _like(self, name: str) -> str:
        near = nearest(name, self._leaves.names)
        return f"; stored names like it: {', '.join(near)}" if near else ""

    def _derive(self, key: str, outcome: Entry, leaf: Any) -> Derived:
        """Return the derived leaf of a multi_value_fn, with its declared inputs."""
        transform, args = outcome.transform, restore_args(leaf)
        if outcome.key not in self._inputs:
            self._inputs[outcome.key] = self._inputs_of(key, transform)
        inputs = self._inputs[outcome.key]

        @_note_leaf(key)
        def function(*values: Any) -> Any:
            given = dict(zip(inputs, values, strict=True))
            tree = map_leaves(lambda path, other: given.get(path, other), self._tree)
            return call_multi_value_fn(transform, key, state_dict.from_stored(tree, None, "orbax"), args)

        return Derived(tuple(inputs.values()), function, None, None, "multi_value_fn")

    def _inputs_of(self, key: str, transform: Any) -> dict[Path, Derived | FunctionInput]:
        wanted = getattr(transform, "multi_value_fn_input_args", None)
        if wanted is None:
            raise TransformError(
                f"{key}: a multi_value_fn has to say which stored leaves it needs; use RestoreTransform with "
                "multi_value_fn_input_args, a dict of their names (or regular expressions) to RestoreArgs or None",
                leaf=key,
            )
        found: dict[Path, Derived | FunctionInput] = {}
        for pattern, args in wanted.items():
            matching = {path: leaf for path, leaf in self._leaves.items() if re.fullmatch(pattern, joined(path))}
            if not matching:
                raise TransformError(
                    f"{key}: multi_value_fn_input_args: {pattern!r} matches no stored leaf{self._like(pattern)}; give "
                    "names that are stored",
                    leaf=key,
                )
            for path, leaf in matching.items():
                if path not in found:  # the first pattern decides
                    found[path] = leaf if isinstance(leaf, Derived) else FunctionInput(leaf, _example(leaf, args))
        return found


@contextlib.contextmanager
def _note_leaf(key: str) -> Iterator[None]:
    """Add a note with the leaf to errors of the caller's function."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by the function that transforms {key}")
        raise


def _input_target(leaf: Any, handle: LeafHandle) -> Any:
    """Return the target's leaf if a function's input can have the sharding of its output, else None."""
    sharding = getattr(leaf, "sharding", None)
    is_spread = sharding is not None and not sharding.is_fully_replicated
    return None if is_spread and tuple(leaf.shape) != handle.shape else leaf


def _example(handle: LeafHandle, args: Any) -> Any:
    """Return an abstract array with the dtype and sharding of RestoreArgs, or None."""
    dtype, sharding = getattr(args, "dtype", None), getattr(args, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        on_device = getattr(args, "restore_type", None) is jax.Array
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if on_device else None
    if handle.kind is not LeafKind.ARRAY or (dtype is None and sharding is None):
        return None
    return jax.ShapeDtypeStruct(handle.shape, handle.dtype if dtype is None else dtype, sharding=sharding)
