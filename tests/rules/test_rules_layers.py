"""Rules that make one layer of several, or several of one: values against numpy, bytes read, refusals."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, rules
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import Container, iter_leaves
from flax_ckpt_compat._discovery import opening
from flax_ckpt_compat._trees import leaf_sources
from tests.support.stored import Memory, count, flat, same, stored, value_of, values

DTYPES = [np.dtype(name) for name in ("f4", ">f4", "i8", "c8", "?", "U3")] + [
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.int4),
]


@st.composite
def arrays(draw: Any, ndim: int = 0) -> np.ndarray[Any, Any]:
    """Arrays with at least so many axes."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=3)))
    return count(shape, np.int64).astype(draw(st.sampled_from(DTYPES)))


def layers(arrays_: list[dict[str, Any]], name: str = "layer_{}") -> dict[str, Any]:
    """Numbered siblings."""
    return {name.format(number): tree for number, tree in enumerate(arrays_)}


@given(st.dictionaries(st.sampled_from("abc"), arrays(), min_size=1), st.integers(1, 12), st.data())
def test_stack_is_numpys(tree: dict[str, Any], number: int, data: Any) -> None:
    """Each array of the stack is np.stack of the layers', in the order of their numbers; unstacked, all are back."""
    least = min(array.ndim for array in tree.values())
    axis = data.draw(st.integers(-least - 1, least))
    all_layers = [{name: np.roll(array, shift) for name, array in tree.items()} for shift in range(number)]
    mixed = dict(data.draw(st.permutations(list(layers(all_layers).items()))))
    after = rules.stack(r"layer_(\d+)", "layers", axis).apply(stored({"x": mixed}), None)
    stacked = {}
    for name, array in tree.items():
        expected = np.stack([layer[name] for layer in all_layers], axis)
        stacked[f"x/layers/{name}"] = expected.astype(array.dtype, order="C")
    same(values(after), {f"x/layers/{name}": stacked[f"x/layers/{name}"] for name in mixed["layer_0"]})
    same(values(rules.unstack("layers", "layer_{}", axis).apply(after, None)), flat({"x": layers(all_layers)}))
    whole = {"x": {"layers": {name: stacked[f"x/layers/{name}"] for name in tree}}}
    apart = rules.unstack("layers", "layer_{}", axis).apply(stored(whole), None)
    same(values(apart), flat({"x": layers(all_layers)}))
    same(values(rules.stack(r"layer_(\d+)", "layers", axis).apply(apart, None)), flat(whole))


@given(arrays(1), st.data())
def test_split_is_numpys(array: Any, data: Any) -> None:
    """Each part is what np.split gives, and fuse puts the parts together again."""
    axis = data.draw(st.integers(-array.ndim, array.ndim - 1))
    length = array.shape[axis]
    cuts = sorted(data.draw(st.lists(st.integers(0, length), min_size=1, max_size=3)))
    sizes = np.diff([0, *cuts, length]).tolist()
    into = [f"p{number}" for number in range(len(sizes))]
    parts = rules.split("w", into, axis, sizes).apply(stored({"w": array}), None)
    expected = [part.copy() for part in np.split(array, cuts, axis)]
    same(values(parts), dict(zip(into, expected, strict=True)))
    same(values(rules.fuse(into, "w", axis).apply(parts, None)), {"w": array})


def test_equal_parts() -> None:
    """Without sizes the parts are equal, in every leaf of a subtree and wherever the name occurs."""
    dense = {"kernel": count((4, 6)), "bias": count((6,))}
    tree = {"params": {"att": {"qkv": dense}}, "mu": {"att": {"qkv": dense}}}
    after = values(rules.split("qkv", ["q", "k", "v"]).apply(stored(tree), None))
    expected = {}
    for top in ("params", "mu"):
        for number, name in enumerate("qkv"):
            for leaf, array in dense.items():
                expected[f"{top}/att/{name}/{leaf}"] = array[..., 2 * number : 2 * number + 2].copy()
    same(after, expected)


def test_everywhere_with_neighbours() -> None:
    """Layers are stacked in params and moments, each by themselves, below several levels; neighbours stay."""
    block = {"w": count((2,))}
    tree = {
        "params": {"enc": {**layers([block] * 3), "norm": count((1,))}, "dec": layers([block] * 2)},
        "opt_state": {"0": {"mu": {"enc": layers([block] * 3)}, "count": np.int32(4)}},
    }
    after = values(rules.stack(r"layer_(\d+)", "layers/cell").apply(stored(tree), None))
    assert {name: value.shape for name, value in after.items()} == {
        "params/enc/layers/cell/w": (3, 2),
        "params/enc/norm": (1,),
        "params/dec/layers/cell/w": (2, 2),
        "opt_state/0/mu/enc/layers/cell/w": (3, 2),
        "opt_state/0/count": (),
    }
    back = rules.unstack("layers/cell", "layer_{}").apply(
        rules.stack(r"layer_(\d+)", "layers/cell").apply(stored(tree), None), None
    )
    assert values(back).keys() == flat(tree).keys()


def test_scalars_stack() -> None:
    """Numpy scalars and arrays without axes become a vector."""
    after = rules.stack(r"l(\d)", "l").apply(stored({"l0": np.float32(1), "l1": np.float32(2)}), None)
    same(values(after), {"l": np.array([1, 2], np.float32)})


def test_what_holds_no_value_stays() -> None:
    """None, empty subtrees and leaves left to the target need no stacking, and no cutting."""
    tree = stored(layers([{"w": count((2,)), "none": None, "empty": {}}] * 2))
    for node in tree.children.values():
        node.children["own"] = leaf_sources.Own.KEEP_TARGET
    after = rules.stack(r"layer_(\d+)", "layers").apply(tree, None)
    found = values(after)
    assert (found["layers/none"], found["layers/empty"], found["layers/own"]) == (
        None,
        {},
        leaf_sources.Own.KEEP_TARGET,
    )
    assert values(rules.unstack("layers", "layer_{}").apply(after, None))["layer_1/own"] is leaf_sources.Own.KEEP_TARGET


@pytest.mark.parametrize("rule", [rules.unstack("w", "w_{}"), rules.split("w", ["a", "b", "c", "d"], axis=0)], ids=str)
def test_each_piece_reads_its_own_part(rule: rules.Rule) -> None:
    """One piece of a stored array reads as many bytes as it has."""
    reader = Memory({"w": count((4, 1000))})
    name, leaf = next(iter(iter_leaves(rule.apply(reader.tree, None))))
    assert value_of(leaf).nbytes == reader.bytes_read == 4000, name


def test_pieces_are_memory_of_their_own() -> None:
    """Writing to one piece changes no other, also where they were computed."""
    before = stored(layers([{"w": count((2,))}] * 2))
    stacked = rules.stack(r"layer_(\d+)", "x").apply(before, None).children["x"].children["w"]
    whole = value_of(stacked)
    for rule in (rules.unstack("x", "x_{}"), rules.split("x", ["a", "b"])):
        tree = rule.apply(rules.stack(r"layer_(\d+)", "x").apply(before, None), None)
        for _, leaf in iter_leaves(tree):
            part = leaf.inputs[0]
            assert isinstance(part, leaf_sources.Derived)
            assert not np.shares_memory(leaf.function(part.function(whole)), whole)


def test_what_is_joined_keeps_its_container() -> None:
    """A subtree whose keys are ints has them again, where a restore gives ints back; a namedtuple keeps its class."""
    for rule in (rules.stack(r"l_(\d)", "l"), rules.fuse(["l_0", "l_1"], "l"), rules.rename("l_0", "l")):
        whole = stored({f"l_{n}": {"0": count((2,)), "1": {"x": count((3,))}} for n in range(2)})
        for layer in whole.children.values():
            layer.int_keys = frozenset({"0", "1"})
            layer.children["1"].container, layer.children["1"].type_name = Container.NAMEDTUPLE, "module.Pair"
        after = rule.apply(whole, None).children["l"]
        assert after.int_keys == {"0", "1"}
        assert (after.children["1"].container, after.children["1"].type_name) == (Container.NAMEDTUPLE, "module.Pair")


def test_from_real_checkpoints(flag: bool, tmp_path: Path) -> None:
    """On checkpoints of both formats the values are numpy's, for arrays of several dtypes."""
    tree = {
        "layers": {"w": count((3, 4, 6)), "b": count((3, 6), ml_dtypes.bfloat16)},
        "layer_0": {"q": count((2, 4), np.int32)},
        "layer_1": {"q": count((2, 4), np.int32, start=9)},
    }
    checkpoints.save_checkpoint(tmp_path / "c", tree, 1)
    path = checkpoints.latest_checkpoint(str(tmp_path / "c"))
    assert path is not None, flag
    with closing(opening.Opened(location_of(path), verify=True)) as opened:
        after = opened.reader(opened.parts[0]).tree
        for rule in (
            rules.stack(r"layer_(\d+)", "att", axis=-1),
            rules.unstack("layers", "block_{}"),
            rules.split("w", ["k", "v"], axis=-1, sizes=[2, 4]),
            rules.cut("block_2/b", 5),
        ):
            after = rule.apply(after, None)
        found = values(after)
    expected = {"att/q": np.stack([tree["layer_0"]["q"], tree["layer_1"]["q"]], axis=-1).copy(order="C")}
    for number in range(3):
        whole = tree["layers"]["w"][number]
        expected |= {f"block_{number}/k": whole[:, :2].copy(), f"block_{number}/v": whole[:, 2:].copy()}
        expected[f"block_{number}/b"] = tree["layers"]["b"][number][: 5 if number == 2 else 6].copy()
    same(found, expected)
