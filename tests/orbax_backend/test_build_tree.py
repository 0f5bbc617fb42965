"""The tree that the entries of a structure file describe, in whatever order, and entries that describe none."""

import types
from typing import Any

import pytest
from flax_ckpt_compat.orbax_backend.build_tree import build_tree
from flax_ckpt_compat.orbax_backend.type_annotations import ContainerType

from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.orbax_layout import DICT_KEY, SEQUENCE_KEY
from flax_ckpt_compat._core.tree import Branch, Container


def built(entries: list[tuple[str, str]], containers: Any = None) -> Any:
    """The tree of entries, paths with a letter for each kind of key: ``s`` of sequences, ``d`` of dicts."""
    structure: Any = types.SimpleNamespace(
        is_single_array=False,
        location=location_of("/p"),
        annotations=None if containers is None else types.SimpleNamespace(containers=containers),
        rich_types={},
        entries=[
            types.SimpleNamespace(
                path=tuple(path.split("/")), kinds=tuple({"s": SEQUENCE_KEY, "d": DICT_KEY}[one] for one in kinds)
            )
            for path, kinds in entries
        ],
    )
    return build_tree(structure, [path for path, _ in entries])


def test_sequences_are_in_the_order_of_their_indices() -> None:
    """Of numbers, not of text."""
    names = [str(number) for number in (3, 10, 0, 7, 1, 2, 9, 4, 6, 5, 8)]
    tree = built([(f"a/{name}", "ds") for name in names]).children["a"]
    assert tree == Branch({str(n): f"a/{n}" for n in range(11)}, Container.LIST)
    assert list(tree.children) == [str(n) for n in range(11)]


@pytest.mark.parametrize("entries", [[("a/0", "ds"), ("a/b", "dd")], [("a/b", "dd"), ("a/0", "ds")]])
def test_children_by_index_and_by_name_are_a_dict(entries: list[tuple[str, str]]) -> None:
    """As Orbax saves a `flax.nnx.List`, which it cannot restore."""
    assert built(entries).children["a"] == Branch({name[2:]: name for name, _ in entries})


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([("a/0", "ds"), ("a/2", "ds")], "has the indices"),
        ([("a/0/b", "dsd"), ("a/0/c", "ddd")], "contradicts"),
        ([("a/b", "dd"), ("a/b", "dd")], "listed twice"),
        ([("a", "d"), ("a/b", "dd")], "listed twice, or as both a leaf and a branch"),
    ],
)
def test_entries_that_are_no_tree(entries: list[tuple[str, str]], why: str) -> None:
    """They are an error that names the leaf."""
    with pytest.raises(CorruptCheckpointError, match=why):
        built(entries)


def test_annotations() -> None:
    """They say what a sequence or a dict is, make no sequence of a dict, and name no keys that are not there."""
    named = {("a",): ContainerType(Container.NAMEDTUPLE, frozenset({"x", "gone"}))}
    assert built([("a/x", "dd")], named).children["a"].int_keys == {"x"}
    assert built([("a/x", "dd")], {("a",): ContainerType(Container.LIST)}).children["a"] == Branch({"x": "a/x"})
    assert built([("a/0", "ds")], {("a",): ContainerType(Container.TUPLE)}).children["a"] == Branch(
        {"0": "a/0"}, Container.TUPLE
    )
    assert built([], {(): ContainerType(Container.NAMEDTUPLE)}) == Branch({}, Container.NAMEDTUPLE)
