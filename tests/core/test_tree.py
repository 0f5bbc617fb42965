"""Trees from their leaves, and how their paths are shown."""

import re
from typing import Any

import pytest

from flax_ckpt_compat._core.errors import NameCollisionError
from flax_ckpt_compat._core.tree import Branch, Container, from_leaves, iter_leaves, show_path, topmost

LIKE = Branch(
    {
        "list": Branch({"0": 1, "1": Branch({}, Container.TUPLE)}, Container.LIST),
        "7": Branch({"8": 2, "x": 3}, int_keys=frozenset({"8"})),
        "none": None,
    },
    int_keys=frozenset({"7"}),
)


def test_a_tree_comes_back_from_its_leaves() -> None:
    """Names, order, containers and keys that were ints, of branches without children too."""
    assert from_leaves(dict(iter_leaves(LIKE)), LIKE) == LIKE
    assert ["/".join(path) for path, _ in iter_leaves(LIKE)] == ["list/0", "list/1", "7/8", "7/x", "none"]
    assert from_leaves({(): 5}) == 5
    assert from_leaves({}) == Branch({})


def test_other_names_make_a_dict() -> None:
    """A list that lost an entry is none; of the keys that were ints, those that are there stay."""
    leaves = {path: leaf for path, leaf in iter_leaves(LIKE) if path not in {("list", "0"), ("7", "x")}}
    tree = from_leaves(leaves, LIKE)
    assert tree.children["list"] == Branch({"1": Branch({}, Container.TUPLE)})
    assert tree.children["7"] == Branch({"8": 2}, int_keys=frozenset({"8"}))


@pytest.mark.parametrize("paths", [[("a",), ("a", "b")], [("a", "b"), ("a",)], [(), ("a",)]], ids=str)
def test_a_leaf_that_is_also_a_subtree_is_refused(paths: list[tuple[str, ...]]) -> None:
    """In either order, and at the root."""
    with pytest.raises(NameCollisionError, match="both a leaf and a subtree"):
        from_leaves(dict.fromkeys(paths, 1))


def test_the_topmost_nodes() -> None:
    """A node with all of its leaves stands for them, but for the root."""
    tree: Any = from_leaves({("a", "x"): 1, ("a", "y"): 2, ("b", "x"): 3, ("b", "y"): 4})
    every = {path for path, _ in iter_leaves(tree)}
    assert list(topmost(tree, every)) == [("a",), ("b",)]
    assert list(topmost(tree, every - {("b", "y")})) == [("a",), ("b", "x")]


PATHS = [
    ("a/b",),
    ("a", "b"),
    ("a\\", "b"),
    ("a\\/b",),
    ("a\\\\", "b"),
    ("a", "/b"),
    ("a/", "b"),
    ("/",),
    ("", ""),
    ("a\\", "/b"),
]


def test_paths_are_shown_so_that_no_two_look_alike() -> None:
    """Also where names hold slashes and backslashes; as a regular expression, what is shown matches the joined names."""  # noqa: E501
    shown = [show_path(path) for path in PATHS]
    assert len(set(shown)) == len(PATHS) and shown[:2] == [r"a\/b", "a/b"]
    assert all(re.fullmatch(text, "/".join(path)) for text, path in zip(shown, PATHS, strict=True))
    assert show_path(()) == "<root>" and show_path(("a", "b", "0")) == "a/b/0"
