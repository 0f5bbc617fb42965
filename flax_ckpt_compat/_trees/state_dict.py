"""Convert user trees to the neutral tree and back.

The structure is that of ``flax.serialization.to_state_dict``. In addition, branches record whether they were lists,
tuples or int-keyed dicts, and registered pytrees that Flax's own serialization refuses (OrderedDict, ``nnx.State``,
user classes) are expanded by their JAX key paths.
"""

from __future__ import annotations

import collections
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import core, serialization

from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, show_path
from flax_ckpt_compat._trees import old_namedtuples

_LEAVES = (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct, bool, int, float, complex, str, bytes)
# Cache of leaf types: isinstance checks against jax's array types are slow.
_LEAF_TYPES: set[type] = {type(None)}
_TEXT = frozenset([str])


class TargetTree:
    """A user's tree and its neutral tree, from one call of ``to_state_dict``."""

    def __init__(self, tree: Any, *, fills_modules: bool = True):
        """Describe the tree; raise UnsupportedLeafError if two children of one node have the same name.

        With ``fills_modules``, nnx modules in it are their states, with which `rebuild` fills them in place."""
        self.tree = tree  # the user's tree
        self._fills_modules = fills_modules
        others: list[Any] = []
        self._state = _state_dict(tree, others)
        self._has_foreign = False
        self._misread: list[Path] = []
        self.dataclass_paths = set[Path]()  # key paths of dataclasses of flax.struct, such as a TrainState
        custom: list[Path] = []
        self.node = self._describe(tree, self._state, (), custom)  # its neutral tree, the leaves untouched
        # Key paths of nodes whose type has its own Flax serialization, which may read older states.
        self.custom_paths = frozenset(custom)
        # A state dict of it is then the tree itself.
        self._is_nested_dicts = type(tree) is dict and not others and not self._has_foreign

    def _describe(self, original: Any, state: Any, path: Path, custom: list[Path]) -> Node:
        """Return the neutral tree; note pytrees that Flax does not expand and namedtuples that it misreads."""
        if type(original) is dict and type(state) is dict and original.keys() == state.keys():
            if _LEAF_TYPES.issuperset(map(type, state.values())):
                return Branch(dict(state))
            plain: dict[str, Node] = {}  # as most nodes are: no numbers as keys, no rules of its own
            for name, child in state.items():
                is_leaf = type(child) in _LEAF_TYPES
                plain[name] = child if is_leaf else self._describe(original[name], child, (*path, name), custom)
            return Branch(plain)
        if (
            type(original) is list
            and type(state) is dict
            and _LEAF_TYPES.issuperset(map(type, state.values()))
            and list(state) == list(map(str, range(len(original))))
        ):
            return Branch(dict(state), Container.LIST)
        is_filled = self._fills_modules and _is_module(state)
        entries = _entries(original, sys.modules["flax.nnx"].state(state) if is_filled else state, path)
        if entries is None:
            return state
        if hasattr(type(original), "_flax_dataclass"):
            self.dataclass_paths.add(path)
        elif _has_custom_serialization(original):
            custom.append(path)
            custom = []  # that nobody reads: what is below is its own matter
        children: dict[str, Node] = {}
        for name, child, value in entries:
            is_leaf = type(value) in _LEAF_TYPES
            children[name] = value if is_leaf else self._describe(child, value, (*path, name), custom)
        if type(state) is not dict:
            self._has_foreign = True
            is_sequence = not _is_module(state) and _is_sequence(_one_level(state))
            container = Container.LIST if is_sequence else Container.DICT
            return Branch(children, container, _int_keys(state, children))
        branch = Branch(children, _container(original, children), _int_keys(original, children))
        if branch.container is Container.NAMEDTUPLE and old_namedtuples.is_misread(branch):
            self._misread.append(path)
        return branch

    def filled(self, values: Iterator[Any], stored_subtrees: Mapping[Path, Node], structure: str) -> Any:
        """Return the state dict of the tree with other leaves, in order, for `rebuild`.

        At key paths of ``stored_subtrees`` it has these, with their own leaves, as `from_stored` gives them."""

        def fill(node: Branch, path: Path) -> Any:
            if not stored_subtrees and Branch not in set(map(type, node.children.values())):
                return dict(zip(node.children, values, strict=False))
            children: dict[str, Any] = {}
            for name, child in node.children.items():
                if stored_subtrees and (*path, name) in stored_subtrees:
                    children[name] = from_stored(stored_subtrees[*path, name], values, structure)
                else:
                    children[name] = fill(child, (*path, name)) if type(child) is Branch else next(values)
            return children

        if () in stored_subtrees:
            return from_stored(stored_subtrees[()], values, structure)
        return fill(self.node, ()) if isinstance(self.node, Branch) else next(values)

    def rebuild(self, state: Any) -> Any:
        """Rebuild the tree with the leaves of nested dicts like `node`; fill modules of nnx once nothing can raise."""
        fills: list[tuple[Any, Any]] = []
        result = self._rebuilt(state, fills)
        for filled, new in fills:
            sys.modules["flax.nnx"].update(filled, jax.tree_util.tree_map(_as_jax_array, new))
        return result

    def _rebuilt(self, state: Any, fills: list[tuple[Any, Any]] | None) -> Any:
        if self._is_nested_dicts:
            return state
        # Most trees have no pytrees that Flax does not expand.
        unexpanded = _unexpand(self._state, state, fills) if self._has_foreign else state
        for path in self._misread:  # the inner ones come first
            unexpanded = old_namedtuples.as_old(unexpanded, path)
        if self.custom_paths:  # the types may raise; from the root, Flax's errors tell whole key paths
            return serialization.from_state_dict(self.tree, unexpanded)
        return _from_state_dict(self.tree, unexpanded, functools.cache(_is_opaque))


def describe(target: Any) -> Node:
    """Return the neutral tree of a user's tree, its leaves untouched; see `TargetTree`."""
    return TargetTree(target, fills_modules=False).node


def from_stored(node: Node, values: Iterator[Any] | None, structure: str) -> Any:
    """Convert a stored tree to Python containers; ``values`` are its leaves in order, None takes those of the tree.

    The structure ``flax`` gives dicts with text keys, as Flax restores without a target: lists become dicts of '0',
    '1', …; ``lists`` keeps lists; ``orbax`` makes lists of tuples, too, as Orbax takes them; ``stored`` gives lists,
    tuples and int keys where the format recorded them."""
    if not isinstance(node, Branch):
        return node if values is None else next(values)
    children: dict[str, Any] = {}
    for name, child in node.children.items():
        if isinstance(child, Branch):
            children[name] = from_stored(child, values, structure)
        else:
            children[name] = child if values is None else next(values)
    is_list = node.container is Container.LIST or (structure == "orbax" and node.container is Container.TUPLE)
    if is_list and structure != "flax":
        return list(children.values())
    if structure != "stored":
        return children
    if node.container is Container.TUPLE:
        return tuple(children.values())
    if node.type_name and (kind := _namedtuple(node.type_name, tuple(children))) is not None:
        return kind(*children.values())
    return {int(name) if name in node.int_keys else name: child for name, child in children.items()}


@functools.lru_cache
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return a namedtuple of a recorded name and fields; None if Python takes no such names."""
    try:
        return collections.namedtuple(name, fields)
    except ValueError:
        return None


def _has_custom_serialization(node: Any) -> bool:
    plain = isinstance(node, (dict, list, tuple, core.FrozenDict, jax.tree_util.Partial))
    return not plain and not hasattr(type(node), "_flax_dataclass") and serialization.is_serializable(node)


def _is_opaque(kind: type) -> bool:
    """Return whether values of a type are their own state dict; types may be registered at any time."""
    return not (issubclass(kind, tuple) or serialization.is_serializable(kind))


def _from_state_dict(target: Any, state: Any, opaque: Callable[[type], bool]) -> Any:
    """Do as ``flax.serialization.from_state_dict``; in a fifth of the time where the nodes are dicts, as most are."""
    if type(target) is dict and type(state) is dict and target.keys() == state.keys():
        return {
            name: state[name] if opaque(type(child)) else _from_state_dict(child, state[name], opaque)
            for name, child in target.items()
        }
    if type(target) is list and type(state) is dict and all(opaque(kind) for kind in set(map(type, target))):
        names = list(map(str, range(len(target))))
        if state.keys() == set(names):
            return [state[name] for name in names]
    return serialization.from_state_dict(target, state)


def _to_state_dict(target: Any, opaque: Callable[[type], bool], others: list[Any]) -> Any:
    """Do as ``flax.serialization.to_state_dict``; in a fifth of the time where the nodes are dicts, as most are.

    Add to ``others`` the nodes that are not plain dicts."""
    if type(target) is dict and _TEXT.issuperset(map(type, target)):
        return {
            name: child if opaque(type(child)) else _to_state_dict(child, opaque, others)
            for name, child in target.items()
        }
    others.append(target)
    if type(target) is list:
        return {
            str(at): child if opaque(type(child)) else _to_state_dict(child, opaque, others)
            for at, child in enumerate(target)
        }
    return serialization.to_state_dict(target)


def _state_dict(target: Any, others: list[Any] | None = None) -> Any:
    try:
        return _to_state_dict(target, functools.cache(_is_opaque), [] if others is None else others)
    except (ValueError, AssertionError) as error:
        # Up to flax 0.10.2 at least, keys of a FrozenDict that are not text fail an assertion.
        raise UnsupportedLeafError(f"the tree has no state dict: {error}") from error


def _is_leaf(state: Any) -> bool:
    """Return whether a state is certainly a leaf; checks each type once."""
    if type(state) in _LEAF_TYPES:
        return True
    if state is not None and not isinstance(state, _LEAVES):
        return False
    _LEAF_TYPES.add(type(state))
    return True


def _entries(original: Any, state: Any, path: Path) -> Iterable[tuple[str, Any, Any]] | None:
    """Return (name, the user's own child, its state) of a node's children; None for a leaf."""
    if type(state) is dict:  # Flax's own; it does not expand subclasses such as OrderedDict
        return zip(state, _originals(original, state), state.values(), strict=True)
    if _is_leaf(state) or jax.tree_util.all_leaves([state]):
        return None
    entries = _one_level(state)
    children = [child for _, child in entries]
    return zip(_child_names(entries, path), children, map(_state_dict, children), strict=True)


def _is_module(value: Any) -> bool:
    """Return whether nnx splits a value into a state: a module, optimizer, metric, ``Rngs``."""
    return _is_nnx(value, "Pytree", "Object")


def _is_nnx(value: Any, *names: str) -> bool:
    """Return whether a value is of the first of these classes that this nnx has; never imports nnx."""
    nnx = sys.modules.get("flax.nnx")
    kinds = [getattr(nnx, name) for name in names if hasattr(nnx, name)]
    return bool(kinds) and isinstance(value, kinds[0])


def _as_jax_array(leaf: Any) -> Any:
    """Return an array of numpy as a ``jax.Array``, unless jax would change its dtype; anything else as it is."""
    is_numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV"
    if not is_numeric or jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return leaf
    with jax.transfer_guard("allow"):
        return jax.device_put(leaf)


def _originals(original: Any, state: dict[str, Any]) -> Iterable[Any]:
    """Return the user's own objects behind the entries of a state dict, or else the entries themselves."""
    if isinstance(original, (dict, core.FrozenDict)) and len(original) == len(state):
        return original.values()
    if isinstance(original, (list, tuple)) and len(original) == len(state):
        return original
    if hasattr(type(original), "_flax_dataclass"):
        return [getattr(original, name, value) for name, value in state.items()]
    return state.values()


def _container(original: Any, children: Mapping[str, Node]) -> Container:
    # Custom serialization may use any names, so check them.
    names = list(children)
    if isinstance(original, tuple) and names == list(getattr(original, "_fields", ())):
        return Container.NAMEDTUPLE if hasattr(original, "_fields") else Container.TUPLE
    if isinstance(original, (list, tuple)) and names == [str(index) for index in range(len(original))]:
        return Container.LIST if isinstance(original, list) else Container.TUPLE
    return Container.DICT


def _int_keys(original: Any, children: Mapping[str, Node]) -> frozenset[str]:
    if not isinstance(original, Mapping):
        return frozenset()
    return frozenset(str(key) for key in original if type(key) is int and str(key) in children)


def _one_level(node: Any) -> list[tuple[Any, Any]]:
    """Return (JAX key path of length one, child) of a registered pytree's children."""
    asked = itertools.count()  # about the node first, and then about its children, one of which may be the node
    entries, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda _: next(asked) > 0)
    return entries


def _is_sequence(entries: list[tuple[Any, Any]]) -> bool:
    kinds = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)
    return bool(entries) and all(isinstance(keys[0], kinds) for keys, _ in entries)


def key_name(key: Any) -> str:
    """Return the name of one key of jax's key paths, as text."""
    return str(next((getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field)), key))


def _child_names(entries: list[tuple[Any, Any]], path: Path) -> list[str]:
    names = [key_name(keys[0]) for keys, _ in entries]
    if len(set(names)) != len(names):
        twice = one_line(name for name, count in Counter(names).items() if count > 1)
        raise UnsupportedLeafError(
            f"cannot save {show_path(path)}: several of its keys are, as text, {twice}; rename them",
            leaf=show_path(path),
        )
    return names


def _unexpand(original_state: Any, state: Any, fills: list[tuple[Any, Any]] | None) -> Any:
    """Rebuild registered pytrees; Flax's own rules hold below and above them.

    Add modules and variables of nnx with their new states to ``fills``. Within an ``nnx.State`` that is None, since the
    variables there are those of its module: they are made anew."""
    if type(original_state) is dict:
        if not isinstance(state, dict) or original_state.keys() != state.keys():
            return state
        return {
            name: state[name] if type(value) in _LEAF_TYPES else _unexpand(value, state[name], fills)
            for name, value in original_state.items()
        }
    if _is_leaf(original_state) or jax.tree_util.all_leaves([original_state]):
        return state
    if fills is not None and _is_module(original_state):
        fills.append((original_state, _unexpand(sys.modules["flax.nnx"].state(original_state), state, fills)))
        return original_state
    entries = _one_level(original_state)
    names = _child_names(entries, ())
    if not isinstance(state, dict) or set(names) != state.keys():
        return state
    structure = jax.tree_util.tree_structure(original_state, is_leaf=lambda value: value is not original_state)
    below = None if _is_nnx(original_state, "State") else fills
    children = [TargetTree(child)._rebuilt(state[name], below) for name, (_, child) in zip(names, entries, strict=True)]
    rebuilt = jax.tree_util.tree_unflatten(structure, children)
    if fills is None or not _is_nnx(original_state, "Variable"):
        return rebuilt
    fills.append((original_state, rebuilt))
    return original_state
