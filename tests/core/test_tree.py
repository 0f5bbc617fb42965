"""Trees from their leaves, how their paths are shown, and the shards of their arrays."""

import re
from pathlib import Path
from typing import Any

import pytest

from flax_ckpt_compat._core.errors import NameCollisionError
from flax_ckpt_compat._core.tree import Branch, Container, from_leaves, iter_leaves, show_path, topmost
from tests.support.interpreters import devices
from tests.support.saves import run_saving

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
    with pytest.raises(NameCollisionError, match="below a leaf or above one"):
        from_leaves(dict.fromkeys(paths, 1))


def test_the_topmost_nodes() -> None:
    """A node with all of its leaves stands for them, but for the root."""
    tree: Any = from_leaves({("a", "x"): 1, ("a", "y"): 2, ("b", "x"): 3, ("b", "y"): 4})
    every = {path for path, _ in iter_leaves(tree)}
    assert list(topmost(tree, every)) == [("a",), ("b",)]
    assert list(topmost(tree, every - {("b", "y")})) == [("a",), ("b", "x")]


PATHS = [
    ("a/b",), ("a", "b"), ("a\\", "b"), ("a\\/b",), ("a\\\\", "b"), ("a", "/b"), ("a/", "b"), ("/",), ("", ""),
    ("a\\", "/b"),
]  # fmt: skip


def test_paths_are_shown_so_that_no_two_look_alike() -> None:
    """Also where names hold slashes and backslashes; as a regular expression, what is shown matches the joined names."""  # noqa: E501
    shown = [show_path(path) for path in PATHS]
    assert len(set(shown)) == len(PATHS) and shown[:2] == [r"a\/b", "a/b"]
    assert all(re.fullmatch(text, "/".join(path)) for text, path in zip(shown, PATHS, strict=True))
    assert show_path(()) == "<root>" and show_path(("a", "b", "0")) == "a/b/0"


MOVING = """
from jax._src import xla_bridge
checkpoints.save_checkpoint(folder, {"a": np.ones(3)}, 0)
assert checkpoints.restore_checkpoint(folder, {"a": np.zeros(3)})["a"].tolist() == [1, 1, 1]
assert not xla_bridge.backends_are_initialized()
"""


def test_trees_of_numpy_arrays_do_not_start_jax(flag: bool, tmp_path: Path) -> None:
    """A program that only moves checkpoints around must not take the memory of a GPU."""
    run_saving(MOVING, tmp_path, flag)


MIXED_UP = """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
values = np.arange(16.0, dtype=np.float32)

def listed_by_two_threads():
    array, both = jax.device_put(values, sharding), threading.Barrier(2)
    threads = [threading.Thread(target=lambda: (both.wait(), array.addressable_data(0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return array

def is_mixed_up(array):
    return any(array.addressable_data(at).devices() != {device} for at, device in enumerate(jax.devices()))

sys.setswitchinterval(1e-6)
made = (listed_by_two_threads() for _ in range(300))
mixed_up = next(filter(is_mixed_up, made), None)  # None if this jax has locks
sys.setswitchinterval(0.005)
for step, array in enumerate([mixed_up, jax.device_put(values, sharding), mixed_up]):
    for manager in (None, checkpoints.AsyncManager()) if array is not None else ():
        place = f"{folder}/{step}{manager is None}"
        checkpoints.save_checkpoint(place, {"a": array}, 1, async_manager=manager)
        if manager is not None:
            manager.wait_previous_save()
        np.testing.assert_array_equal(checkpoints.restore_checkpoint(place, None)["a"], values)
"""


def test_an_array_whose_shards_two_threads_listed_at_once(flag: bool, tmp_path: Path) -> None:
    """jax then has some shards twice, at other places; each is saved where it belongs, and so are the next arrays."""
    run_saving(MIXED_UP, tmp_path, flag, **devices(8))
