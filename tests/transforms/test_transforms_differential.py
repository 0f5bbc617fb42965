"""Transformations of random trees agree with real Orbax's, structure and errors included, but for the listed mends.

What differs on purpose, and is left out of the comparison:

- a name that means two leaves once joined with ``/`` raises here; Orbax takes the one that it happens to meet last;
- a bad regular expression, or a leaf of the transforms that is none, raises even where the new tree has no leaves;
- the functions of transforms that another one overrides are not called, so they cannot raise;
- a tuple as original_key works here; Orbax raises a TypeError.
"""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import flax
import jax
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from orbax.checkpoint import transform_utils as real
from orbax.checkpoint import tree as real_tree

from flax_ckpt_compat import transforms as ours
from tests.support.peers import version
from tests.support.profiles import examples
from tests.support.samples import Fields, Pair, Registered

pytestmark = pytest.mark.skipif(version("orbax-checkpoint") < (0, 12), reason="Orbax 0.12 is what ours are held to")


@dataclasses.dataclass(frozen=True)
class Made:
    """What a function made: its name, and what it was given, by identity."""

    by: str
    of: tuple[Any, ...]


def of_value(name: str) -> Callable[[Any], Made]:
    """A value_fn."""
    return lambda value: Made(name, (id(value),))


def of_tree(name: str) -> Callable[[str, Any], Made]:
    """A multi_value_fn."""
    return lambda key, tree: Made(name, (key, id(tree)))


NAMES = ["a", "b", "left", "a1", "0"]
LEAVES = st.one_of(st.integers(0, 9), st.sampled_from(["", "text"]), st.builds(lambda: np.arange(3)))
PATTERNS = [*NAMES, "", "a/b", "b/a", "a/0", ".*", "(.*)", "(.*)a(.*)", "(.)/(.*)", r"(\w+)/(\w+)", "(?:a|b)(.*)", "."]
PATTERNS += [r"(.*)/(\d)", "(a)|(b)", "b.*", "left/.*", "first", "(?P<first>.)/?(.*)"]
BAD_PATTERNS = ["(", "*a"]
SOURCES = [*NAMES, "", "first", "a/b", "b/a", "a/0", r"\1", r"b\1", r"\1b\2", r"\2/\1", r"\1/\2", r"a/\1"]
SOURCES += [r"\g<first>", r"\g<0>"]
BAD_SOURCES = [r"\3", "\\", r"\g<"]


def trees_of(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Trees of dicts, lists, tuples, namedtuples, dataclasses and nameless pytrees, with empty ones and None."""

    def inside(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
            st.dictionaries(st.integers(0, 2), inner, max_size=2),
            st.dictionaries(st.sampled_from(NAMES), inner, max_size=3).map(flax.core.freeze),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=2).map(tuple),
            st.builds(Pair, inner, inner),
            st.builds(Fields, inner, inner),
            st.builds(Registered, inner, inner),
        )

    return st.recursive(st.one_of(leaves, st.none(), st.builds(dict)), inside, max_leaves=10)


TREES = trees_of(LEAVES)


def fields_of_transforms(sources: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """The arguments of one transform that makes sense."""
    source, value = st.sampled_from(sources), st.sampled_from("fgh").map(of_value)
    return st.one_of(
        st.just({}),
        st.just({"use_fallback": True}),
        st.fixed_dictionaries({"original_key": source}),
        st.fixed_dictionaries({"original_key": source, "value_fn": value}),
        st.fixed_dictionaries({"value_fn": value}),
        st.fixed_dictionaries({"multi_value_fn": st.sampled_from("xyz").map(of_tree)}),
    )


@dataclasses.dataclass(frozen=True)
class Given:
    """A transform to be made by both sides."""

    fields: dict[str, Any]
    for_restore: bool

    def made_by(self, side: Any) -> Any:
        """By ours or Orbax's classes."""
        return (side.RestoreTransform if self.for_restore else side.Transform)(**self.fields)


def given_transforms(patterns: list[str], sources: list[str]) -> st.SearchStrategy[Any]:
    """Flat dicts of patterns, or trees, of transforms to be made; None is none."""
    one = st.builds(Given, fields_of_transforms(sources), st.booleans())
    return st.one_of(
        st.dictionaries(st.sampled_from(patterns), one, max_size=5),
        st.dictionaries(st.sampled_from(patterns), trees_of(one), max_size=3),
        trees_of(one),
    )


def made(tree: Any, side: Any) -> Any:
    """The tree with its transforms made."""
    return jax.tree.map(lambda one: one.made_by(side), tree)


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns, or the exception that it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def same_leaf(a: Any, b: Any) -> bool:
    """Equal, and arrays the same object."""
    return a is b or (type(a) is type(b) and not isinstance(a, np.ndarray) and a == b)


def assert_same(got: Any, expected: Any) -> None:
    """The same structure and leaves, or an exception on both sides: a ValueError where Orbax's is one."""
    if isinstance(expected, Exception) or isinstance(got, Exception):
        assert isinstance(expected, Exception) and isinstance(got, Exception), (got, expected)
        assert isinstance(got, ValueError | TypeError | KeyError)
        assert isinstance(got, ValueError) or not isinstance(expected, ValueError)
        return
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    assert all(same_leaf(a, b) for a, b in leaves), (got, expected)


def has_unique_names(tree: Any) -> bool:
    """False where two key paths are the same when joined with ``/``."""
    names = Counter("/".join(path) for path in real_tree.to_flat_dict(tree))
    return not names or max(names.values()) == 1


@pytest.fixture(autouse=True, scope="module")
def quiet_orbax() -> Iterator[None]:
    """Orbax logs a warning with every call."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def compare(original: Any, transformations: Any, new: Any, default_to_original: bool) -> Any:
    """Applies both sides' transformations and returns what Orbax's gave."""
    expected = outcome(
        real.apply_transformations, original, made(transformations, real), new, default_to_original=default_to_original
    )
    for side in (ours, real):  # Orbax's own objects as well
        got = outcome(ours.apply_transformations, original, made(transformations, side), new, default_to_original)
        assert_same(got, expected)
    return expected


@settings(max_examples=examples(600), deadline=None)
@given(TREES, st.data(), st.booleans())
def test_apply_to_names_that_are_there(tree: Any, data: st.DataObject, default_to_original: bool) -> None:
    """The same with transforms for names that the trees have, several for each leaf, so that most succeed."""
    paths = ["/".join(path) for path in real_tree.to_flat_dict(tree)]
    assume(paths)
    sources = [*map(re.escape, paths), r"\g<0>"]
    patterns = [*map(re.escape, paths), ".*", "(?s:.*)", f"(?:{re.escape(paths[0])})|(?:{re.escape(paths[-1])})"]
    transformations = data.draw(
        st.dictionaries(
            st.sampled_from(patterns), st.builds(Given, fields_of_transforms(sources), st.booleans()), max_size=6
        )
    )
    new = jax.tree.map(lambda _: object(), tree)
    if data.draw(st.booleans()):
        new = {"new": 1, "old": new, **(new if isinstance(new, dict) and all(isinstance(k, str) for k in new) else {})}
    compare(tree, transformations, new, default_to_original)


def is_expression(text: str) -> bool:
    """Whether a text is a regular expression."""
    try:
        re.compile(text)
    except re.error:
        return False
    return True


SENSIBLE = given_transforms(PATTERNS, SOURCES)
ANY = given_transforms(PATTERNS + BAD_PATTERNS, SOURCES + BAD_SOURCES)


@settings(max_examples=examples(800, 50), deadline=None)
@given(TREES, SENSIBLE | ANY, TREES, st.booleans())
@example({"a": 1}, {"a": Given({}, False)}, {"a": None, "b": 2}, True)  # None in the new tree stays
@example({"a": 1, "b": 2}, {"a": Given({}, False), "a?": Given({"original_key": "b"}, False)}, {"a": 0}, True)
@example({"a": None}, {}, {"a": 5}, True)  # and in the old one is not there
@example({"a": None}, {"a": Given({}, False)}, {"a": 5}, True)
def test_apply(original: Any, transformations: Any, new: Any, default_to_original: bool) -> None:
    """Renames, fallbacks, functions and overlaps of them give what Orbax's give; what makes no sense raises in both."""
    assume(has_unique_names(transformations))
    bad = not all(map(is_expression, real_tree.to_flat_dict(transformations, sep="/")))
    assume(not bad or jax.tree.leaves(new) or not new)
    compare(original, transformations, new, default_to_original)


@settings(max_examples=examples(300, 50), deadline=None)
@given(st.lists(TREES, max_size=4), st.booleans(), st.one_of(st.none(), TREES))
def test_merge_and_intersect(trees: list[Any], alike: bool, target: Any) -> None:
    """Merged and intersected trees are Orbax's, with and without a target; merged ones in its order of names."""
    if alike and trees:  # trees that share much
        trees = [ours.merge_trees({"a": trees[-1]}, {"b": tree}) for tree in trees]
    for name in ("merge_trees", "intersect_trees"):
        got, expected = (outcome(getattr(side, name), *trees, target=target) for side in (ours, real))
        assert_same(got, expected)
        if isinstance(got, dict) and target is None and name == "merge_trees":
            assert list(real_tree.to_flat_dict(got)) == list(real_tree.to_flat_dict(expected))
            assert list(got) == list(expected)
    # A target of the same structure gets back its own containers.
    inside = [{"a": tree} for tree in trees]
    fitting = jax.tree.map(lambda _: 0, inside[-1]) if trees else {}
    assert_same(ours.merge_trees(*inside, target=fitting), real.merge_trees(*inside, target=fitting))
