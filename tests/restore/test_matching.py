"""Checkpoint tree + target tree → where each target leaf comes from."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Branch, Path, iter_leaves, map_leaves, show_path
from flax_ckpt_compat._restore import matching, placement
from flax_ckpt_compat._trees import state_dict
from tests.support.profiles import examples
from tests.support.samples import Pair


def handles(tree: Any) -> Any:
    """The neutral tree of a plain dict with a handle for every leaf but None."""

    def handle(path: Path, leaf: Any) -> Any:
        if leaf is None:
            return None
        array = np.asarray(leaf)
        kind = LeafKind.ARRAY if isinstance(leaf, np.ndarray) else LeafKind.INT
        reader: Any = None
        return LeafHandle(path, kind, array.shape, array.dtype, array.nbytes, show_path(path), reader, leaf)

    return map_leaves(handle, state_dict.describe(tree))


def match(stored: Any, target: Any, *, lenient: bool = False, own: Any = ()) -> matching.Match:
    """A match of two plain trees."""
    return matching.match(handles(stored), state_dict.describe(target), lenient=lenient, is_custom=own.__contains__)


NAMES = st.sampled_from("abcd")
TREES = st.recursive(
    st.one_of(st.integers(0, 9), st.integers(0, 3).map(np.zeros), st.none()),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)


def leaf_paths(node: Any) -> set[Path]:
    """Key paths of leaves and of branches without children."""
    return {path for path, _ in iter_leaves(node)}


def result_paths(sources: Any, path: Path = ()) -> set[Path]:
    """Key paths of the leaves of nested dicts."""
    if not isinstance(sources, dict) or not sources:
        return {path}
    return {found for name, child in sources.items() for found in result_paths(child, (*path, name))}


@settings(max_examples=examples(300), deadline=None)
@given(stored=TREES, target=TREES, lenient=st.booleans())
def test_every_target_leaf_has_one_source(stored: Any, target: Any, lenient: bool) -> None:
    """The outcome has the target's structure; kept leaves are the target's, the others are stored there."""
    outcome = match(stored, target, lenient=lenient)
    assert result_paths(outcome.sources) == leaf_paths(state_dict.describe(target))
    flat = dict(iter_leaves(state_dict.describe(target)))

    def check(sources: Any, path: Path) -> None:
        if isinstance(sources, dict):
            for name, child in sources.items():
                check(child, (*path, name))
        elif isinstance(sources, matching.FromTarget):
            assert sources.value is flat[path]
            assert path in outcome.missing or (lenient and flat[path] is None)
        else:
            assert path not in outcome.missing
            assert all(leaf is None or leaf.path[: len(path)] == path for _, leaf in _real_leaves(sources.node))

    check(outcome.sources, ())


def _real_leaves(node: Any) -> list[tuple[Path, Any]]:
    return [(path, leaf) for path, leaf in iter_leaves(node) if not isinstance(leaf, Branch)]


@settings(max_examples=examples(300), deadline=None)
@given(stored=TREES, target=TREES, lenient=st.booleans())
def test_no_stored_leaf_is_lost_in_silence(stored: Any, target: Any, lenient: bool) -> None:
    """Every stored leaf is used, or named as unused, unless a leaf that is missing or None stands in its place."""
    outcome = match(stored, target, lenient=lenient)
    used: set[Path] = set()

    def collect(sources: Any) -> None:
        if isinstance(sources, dict):
            for child in sources.values():
                collect(child)
        elif isinstance(sources, matching.FromCheckpoint):
            used.update(leaf.path for _, leaf in _real_leaves(sources.node) if leaf is not None)

    collect(outcome.sources)
    stored_paths = {path for path, leaf in _real_leaves(handles(stored)) if leaf is not None}
    lost = stored_paths - used - set(outcome.unused)
    excused = {*outcome.missing, *_kept_nones(state_dict.describe(target), lenient)}
    assert all(any(path[:n] in excused or any(m[:n] == path for m in excused) for n in range(len(path) + 1))
               for path in lost)  # fmt: skip


def _kept_nones(target: Any, lenient: bool) -> set[Path]:
    return {path for path, leaf in iter_leaves(target) if lenient and leaf is None}


@settings(max_examples=examples(100), deadline=None)
@given(tree=TREES)
def test_a_tree_matches_itself(tree: Any) -> None:
    """Nothing is missing, unused or of another shape where checkpoint and target agree."""
    outcome = match(tree, tree)
    assert (outcome.missing, outcome.unused, outcome.shapes) == ([], [], [])


def test_types_with_own_rules_take_the_whole_branch() -> None:
    """Where the structure differs below such a type, it gets the stored branch as it is; else leaf by leaf."""
    stored = {"s": {"old": 1, "n": {"x": 2}}}
    outcome = match(stored, {"s": {"new": 1}}, own={("s",)})
    assert isinstance(outcome.sources["s"], matching.FromCheckpoint)
    assert placement.as_state(map_leaves(lambda _, leaf: leaf.locator, outcome.sources["s"].node)) == stored["s"]
    assert outcome.missing == [] and outcome.unused == []
    outcome = match(stored, stored, own={("s",)})
    assert set(outcome.sources["s"]) == {"old", "n"}


def test_old_namedtuples_are_read_as_new_ones() -> None:
    """The three maps in which Flax before 0.3.6 wrote a namedtuple are taken apart for a namedtuple target only."""
    old = {"name": 0, "fields": {"0": 0, "1": 1}, "values": {"0": 7, "1": 8}}
    stored = handles({"p": old})
    for index, name in enumerate(("left", "right")):
        field = stored.children["p"].children["fields"].children[str(index)]
        field.reader = type("Reader", (), {"read": staticmethod(lambda wanted, name=name: [name])})
    outcome = matching.match(
        stored, state_dict.describe({"p": Pair(0, 0)}), lenient=False, is_custom=lambda path: False
    )
    assert [outcome.sources["p"][name].node.locator for name in Pair._fields] == [7, 8]
    assert match({"p": old}, {"p": {"name": 0}}).missing == []


def test_a_missing_whole_tree_is_called_root() -> None:
    """A bare leaf has no key path: the message says <root>."""
    outcome = match({"a": 1}, 5)
    assert isinstance(outcome.sources, matching.FromCheckpoint)
    outcome = match(5, {"a": {"b": 1}})
    assert outcome.missing == [("a", "b")]
