"""What we write comes back from our own reader with its exact type, to the last bit."""

import json
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.errors import NameCollisionError, UnsupportedLeafError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import Container
from tests.support.orbax_trees import BACKEND, change_metadata, load, save
from tests.support.peers import needs
from tests.support.profiles import examples
from tests.support.saves import new_folder
from tests.support.trees import fingerprint, state_dicts, to_branches

Empty = namedtuple("Empty", "")
SCALARS = [
    0, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, True, False, 1.5, -0.0, float("inf"), 1j, complex(-0.0, 2),
    "", "text", "nul\0", "\ud800", b"", b"\0bytes\0", None,
    np.int64(5), np.float32(1.5), np.bool_(True), np.complex128(1j), np.longdouble(1) / 3, np.uint8(255),
    ml_dtypes.bfloat16(1.5), ml_dtypes.int4(-3), np.datetime64("2020-01-01"), np.timedelta64(5, "ms"),
    np.str_("a\0"), np.str_(""), np.bytes_(b"a\0"), np.bytes_(b""), np.float64(sys.float_info.max),
]  # fmt: skip


@pytest.mark.parametrize("leaf", [*SCALARS, np.arange(3), np.zeros((2, 0))], ids=repr)
def test_every_leaf_keeps_its_exact_type(tmp_path: Path, leaf: Any) -> None:
    """And its bits, in a list, and alone: a single leaf is a tree."""
    for number, tree in enumerate((leaf, [leaf])):
        assert fingerprint(load(save(tmp_path / str(number), tree))) == fingerprint(tree)


def test_every_layout_in_memory_is_stored_in_c_order(tmp_path: Path) -> None:
    """Transposed, strided, reversed, broadcast and read-only arrays are stored as their values."""
    base = np.arange(60_000.0).reshape(200, 300)
    locked = base.copy()
    locked.flags.writeable = False
    tree = {"t": base.T, "s": base[::3, 1::7], "r": base[::-1], "b": np.broadcast_to(base[0], (5, 300)), "l": locked}
    expected = {name: np.ascontiguousarray(array) for name, array in tree.items()}
    assert fingerprint(load(save(tmp_path / "c", tree))) == fingerprint(expected)


def test_containers_come_back_as_they_were(tmp_path: Path) -> None:
    """Lists, tuples, empty ones, int keys and empty namedtuples are told apart."""
    tree = {"l": [1, (2, [])], "t": (), "i": {10: "a", 9: {2: 3}}, "d": {}, "n": None, "e": Empty()}
    path = save(tmp_path / "c", tree)
    expected = {"l": [1, (2, [])], "t": (), "i": {10: "a", 9: {2: 3}}, "d": {}, "n": None, "e": {}}
    assert load(path) == expected
    root = BACKEND.open(location_of(path)).tree
    assert root.children["e"].container is Container.NAMEDTUPLE
    assert root.children["t"].container is Container.TUPLE


@pytest.mark.parametrize("tree", [{}, [], (), None, Empty()], ids=repr)
def test_an_empty_tree_round_trips(tmp_path: Path, tree: Any) -> None:
    """Nothing at all is stored as what it was, in a directory that its `_METADATA` gives away."""
    path = save(tmp_path / "c", tree)
    node, expected = BACKEND.open(location_of(path)).tree, to_branches(tree)
    assert node == expected
    assert (tmp_path / "c" / "_METADATA").is_file()


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(state_dicts())
def test_random_trees_round_trip(tree: Any) -> None:
    """Any tree of any leaves under any names is refused for a name collision, or comes back to the last bit."""
    with new_folder() as folder:
        try:
            path = save(Path(folder) / "c", tree)
        except NameCollisionError:
            return
        assert fingerprint(load(path)) == fingerprint(tree)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_arrays_are_writable_aligned_and_own_their_memory(tmp_path: Path, compression: str | None) -> None:
    """What was read may be changed, stays valid after closing, and jax can take it over without a copy."""
    tree = {"small": np.arange(10), "mid": np.arange(1000), "big": np.arange(100_000)}
    path = save(tmp_path / "c", tree, compression)
    for name, array in load(path).items():
        assert array.flags.writeable and array.flags.c_contiguous, name
        assert array.ctypes.data % 64 == 0, name
        array += 1
    assert fingerprint(load(path)) == fingerprint(tree)


pytestmark = needs("orbax-checkpoint", 0, 11, 10, why="has no rich types")


class Pair(NamedTuple):
    """Fields that are not in the order of the alphabet."""

    second: Any
    first: Any


TREE = {
    "tuple": (np.ones(2), 3),
    "pair": Pair(np.ones(1), {"inner": (1, [2, (3,)])}),
    "list": [np.zeros(1), ()],
    "opt": optax.adam(1e-3).init({"w": np.ones(2, np.float32)}),
    # Names that the format uses itself.
    "category": {"category": {"clazz": (1,)}, "entries": [2]},
}


def rich(path: Path, tree: Any) -> tuple[Path, Any]:
    """A directory as Orbax writes it when it is told to record types, and what it restores."""
    from orbax.checkpoint._src.metadata import pytree_metadata_options

    options = pytree_metadata_options.PyTreeMetadataOptions(support_rich_types=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(pytree_metadata_options=options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
        theirs = checkpointer.restore(path)
    return path, theirs


def shape(tree: Any) -> Any:
    """The containers of a tree: a namedtuple by its fields."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return "namedtuple", [(name, shape(child)) for name, child in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, dict):
        return {name: shape(child) for name, child in tree.items()}
    return type(tree), [shape(child) for child in tree] if isinstance(tree, list | tuple) else tree is None


def test_stored_structure(tmp_path: Path) -> None:
    """Those of real Orbax, but for empty namedtuples; the names of the classes are theirs."""
    path, theirs = rich(tmp_path / "saved", TREE)
    ours = flax_ckpt_compat.restore(path)
    assert isinstance(theirs["opt"], tuple) and isinstance(theirs["pair"], tuple)
    for name in ("tuple", "pair", "list", "category"):
        assert shape(jax.tree.map(np.asarray, ours[name])) == shape(jax.tree.map(np.asarray, theirs[name]))
    assert (ours["pair"]._fields, type(ours["pair"]).__name__) == (("second", "first"), "Pair")
    assert (ours["opt"][0]._fields, type(ours["opt"][0]).__name__) == (("count", "mu", "nu"), "ScaleByAdamState")
    assert ours["pair"].first == {"inner": (1, [2, (3,)])}
    np.testing.assert_array_equal(ours["opt"][0].mu["w"], np.zeros(2))
    with flax_ckpt_compat.open_checkpoint(path) as view:
        assert view.tree["pair"].second.shape == (1,)
    # Flax's structure is of dicts; a target has its own types.
    flat = checkpoints.restore_checkpoint(path, None)["pair"]["first"]
    assert flat == {"inner": {"0": 1, "1": {"0": 2, "1": {"0": 3}}}}
    assert jax.tree.structure(flax_ckpt_compat.restore(path, TREE)) == jax.tree.structure(TREE)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '{"category": "namedtuple"}', '{"category": "custom"}', 3, "null"]
)
def test_what_does_not_decode_is_not_recorded(tmp_path: Path, text: Any) -> None:
    """The tree is told by its entries all the same."""
    path, _ = rich(tmp_path / "saved", {"a": (1, 2)})
    change_metadata(path, value_metadata_tree=text)
    assert flax_ckpt_compat.restore(path) == {"a": [1, 2]}


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": np.ones(2)}, "a.b": np.zeros(2)},
        {"a": {"b": "text"}, "a.b": np.zeros(2)},
        {"l": [1], "l.0": 2},
        {"a": 1, "a/": 2},
        {"": 1, "/": 2},
        {"a": {"": 1}, "a.": 2},
    ],
    ids=repr,
)
def test_two_leaves_with_one_name_are_refused(tmp_path: Path, tree: Any) -> None:
    """Real Orbax loses one of them; we name both, and write nothing."""
    with pytest.raises(NameCollisionError, match="both be stored"):
        save(tmp_path / "c", tree)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("tree", [{"a": np.ones(2), "a/0": np.zeros(3)}, {"a": {"b": None}, "a.b": 1}], ids=repr)
def test_names_that_only_look_alike_are_stored(tmp_path: Path, tree: Any) -> None:
    """A chunk's key is not another array's key, and a marker has no value to lose."""
    restored, real = load(save(tmp_path / "c", tree)), ocp.PyTreeCheckpointer().restore(tmp_path / "c")
    assert str(restored) == str(tree) == str({name: real[name] for name in tree})


def test_a_key_longer_than_the_index_takes(tmp_path: Path) -> None:
    """One that TensorStore stores is restored; a longer one is refused with its name, and not by the disk's space."""
    for size in (65_000, 65_001):
        tree = {"k" * size: np.ones(2)}
        if size == 65_000:
            np.testing.assert_array_equal(load(save(tmp_path / "c", tree))["k" * size], np.ones(2))
        else:
            with pytest.raises(UnsupportedLeafError, match=r"has 65001 bytes.*shorten the keys"):
                save(tmp_path / "d", tree)


def test_half_a_surrogate_pair_is_refused_as_a_name() -> None:
    """It has no UTF-8 form."""
    with pytest.raises(UnsupportedLeafError, match="surrogate"):
        BACKEND.prepare(to_branches({"a\ud800": 1}))


def test_texts_lie_where_real_orbax_looks(tmp_path: Path) -> None:
    """Slashes nest and escapes are resolved, as TensorStore does with a JSON pointer."""
    tree = {"a": {"b": "1"}, "c/d": "2", "x~1y": "3", "q~0r": "4", "": "5"}
    path = Path(save(tmp_path / "c", tree))
    stored = json.loads((path / "_strings.json").read_text())
    assert stored == {"a.b": "1", "c": {"d": "2"}, "x/y": "3", "q~r": "4", "": "5"}
    assert ocp.PyTreeCheckpointer().restore(path) == load(path) == tree


@pytest.mark.parametrize("tree", [{"a": "", "a/b": "y"}, {"a": {"b/c": ""}, "a.b": "y"}, {"~": "x", "~2": "", "": "y"}])
def test_texts_that_a_pointer_cannot_reach_round_trip(tmp_path: Path, tree: Any) -> None:
    """They are stored as bytes; real Orbax still reads the checkpoint."""
    path = save(tmp_path / "c", tree)
    assert load(path) == tree
    assert set(ocp.PyTreeCheckpointer().restore(path)) == set(tree)
