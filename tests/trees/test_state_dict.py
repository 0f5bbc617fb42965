"""User trees as neutral trees, and back: old namedtuples, plain values, trees that contain themselves."""

import collections
import enum
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, nnx, serialization

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors, plan_restore, restore, rules
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Container, KeyData, iter_leaves, map_leaves
from flax_ckpt_compat._save import snapshot
from flax_ckpt_compat._trees import prng_keys, state_dict
from flax_ckpt_compat.errors import MissingLeavesError
from tests.support.samples import SAMPLES, Fields, Pair, Serialized, fingerprint


@pytest.mark.parametrize(
    "name", ["dict", "FrozenDict", "list", "tuple", "namedtuple", "dataclass", "TrainState", "masked", "int keys"]
)
def test_names_are_those_of_flax(name: str) -> None:
    """For everything that Flax knows, the names and their order are those of its state dict."""
    tree = SAMPLES[name]()
    assert fingerprint(state_dict.from_stored(state_dict.describe(tree), None, "flax")) == fingerprint(
        serialization.to_state_dict(tree)
    )


def test_bool_keys_are_not_int_keys() -> None:
    """A dict with bool keys is not taken for one with int keys, which would come back as other keys."""
    assert state_dict.describe({True: 1}).int_keys == frozenset()


def test_an_overridden_type_names_its_own_state() -> None:
    """A class that renames its state keeps its names, and is not taken for the containers that it is made of."""

    class Odd(tuple):
        pass

    serialization.register_serialization_state(
        Odd, lambda odd: {"all": list(odd)}, lambda odd, stored: Odd(stored["all"])
    )
    tree = state_dict.describe({"odd": Odd([1, 2])})
    assert tree.children["odd"].container is Container.DICT
    assert list(tree.children["odd"].children) == ["all"]
    assert isinstance(state_dict.TargetTree({"odd": Odd([1, 2])}).rebuild({"odd": {"all": [3]}})["odd"], Odd)


@pytest.mark.parametrize(
    "tree", [{1: 2, "1": 3}, {"a": core.freeze({1: 2, "1": 3})}, {"outer": collections.OrderedDict({1: 2, "1": 3})}]
)
def test_keys_of_one_text_are_refused(tree: Any) -> None:
    """Two keys with the same text would be one leaf: refused, of a registered pytree with the node's name."""
    with pytest.raises(
        CheckpointError, match="cannot save outer" if "outer" in tree else "unique|only have string keys"
    ):
        state_dict.describe(tree)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_are_taken_apart_and_put_together(impl: str) -> None:
    """Typed PRNG keys and batches of them survive being taken apart; raw uint32 keys are plain arrays."""
    keys = {"one": jax.random.key(3, impl=impl), "many": jax.random.split(jax.random.key(4, impl=impl), (2, 3))}
    apart = map_leaves(lambda _, leaf: prng_keys.split_key(leaf), state_dict.describe(keys))
    assert all(isinstance(leaf, KeyData) and leaf.impl == impl for _, leaf in iter_leaves(apart))
    for name, key in keys.items():
        assert fingerprint(prng_keys.join_key(apart.children[name])) == fingerprint(key)
    raw = jax.random.PRNGKey(0)
    assert prng_keys.split_key(raw) is raw


def test_types_with_own_rules() -> None:
    """Only types that somebody else registered with Flax restore by rules that we do not know, wherever they are."""
    tree = {"a": [Serialized(Serialized(1))], "o": collections.OrderedDict(x=Serialized(1)), "f": Fields(Serialized(1))}
    assert state_dict.TargetTree(tree).custom_paths == {("a", "0"), ("o", "x"), ("f", "first")}
    mixed = {"a": 1, "b": Serialized(1), "c": 1, "d": Serialized(1), "e": {"f": 1}}
    assert state_dict.TargetTree(mixed).custom_paths == {("b",), ("d",)}
    for plain in ({}, [], (), Fields(1), Pair(1, 2), core.freeze({}), optax.EmptyState(), np.ones(1), jnp.ones(1)):
        assert state_dict.TargetTree({"a": plain}).custom_paths == set()


def test_a_type_that_refuses_a_state_is_asked_once() -> None:
    """It may have taken things out of the state, so that a second attempt would give something else."""

    class Takes:
        pass

    def take(_: Takes, state: dict[str, Any]) -> Takes:
        if state.pop("all", None) is not None:
            raise ValueError("of another release")
        return Takes()

    serialization.register_serialization_state(Takes, lambda _: {"all": np.ones(2)}, take)
    with pytest.raises(ValueError, match="of another release"):
        state_dict.TargetTree({"takes": Takes()}).rebuild({"takes": {"all": np.ones(2)}})


Table = collections.namedtuple("Table", ["name", "fields", "values"])
COLUMNS = {"name": "m", "fields": {"0": "left", "1": "right"}, "values": {"0": 1, "1": 2}}
LISTS = {"name": "m", "fields": ["left", "right"], "values": [1.5, 2]}


@pytest.mark.parametrize("table", [COLUMNS, LISTS], ids=["dicts", "lists"])
@pytest.mark.parametrize("beside", [None, Pair(1, 2)], ids=["alone", "beside such a namedtuple"])
def test_a_users_dict_with_these_keys_survives_rules(table: Any, beside: Any, flag: bool, tmp_path: Path) -> None:
    """A rule about something else does not take it apart, also where the target has a namedtuple of its fields."""
    checkpoints.save_checkpoint(tmp_path, {"table": table, "old": np.ones(2), "pair": beside}, 1)
    target = {"table": table, "new": np.zeros(2), "pair": beside}
    given = [rules.rename("old", "new")]
    assert not plan_restore(tmp_path, target, transforms=given).missing
    restored = checkpoints.restore_checkpoint(tmp_path, target, orbax_transforms=given)
    assert fingerprint(restored) == fingerprint({"table": table, "new": np.ones(2), "pair": beside})


def test_a_namedtuple_with_these_fields(flag: bool, tmp_path: Path) -> None:
    """Flax saves it and cannot restore it; ours gives it back, one inside of the other and inside of other pytrees."""
    inner = Table("in", {"0": "a"}, {"0": 1})
    tree = {"t": Table("out", collections.OrderedDict(inner=inner), (inner, 3)), "w": np.ones(2)}
    checkpoints.save_checkpoint(tmp_path, tree, 1)
    for transforms in (None, [rules.cast("w", "float32")]):
        restored = checkpoints.restore_checkpoint(tmp_path, tree, orbax_transforms=transforms)
        assert fingerprint(restored["t"]) == fingerprint(tree["t"])


BAD = {
    "a subtree as a name": {"fields": {"0": {"z": "left"}, "1": "right"}, "values": {"0": 1, "1": 2}},
    "one name twice": {"fields": {"0": "left", "1": "left"}, "values": {"0": 1, "1": 2}},
    "more values": {"fields": {"0": "left", "1": "right"}, "values": {"0": 1, "1": 2, "2": 3}},
    "numbers as names": {"fields": {"0": 1, "1": 2}, "values": {"0": 1, "1": 2}},
    "no names": {"fields": 3, "values": {"0": 1, "1": 2}},
    "no values": {"fields": {"0": "left", "1": "right"}, "values": 3},
    "a list that is none": {"fields": {"a": "left", "b": "right"}, "values": {"a": 1, "b": 2}},
}


@pytest.mark.parametrize("case", BAD)
def test_what_no_old_flax_wrote_is_not_taken_apart(case: str, flag: bool, tmp_path: Path) -> None:
    """Over a namedtuple target it is a dict like others: what the target asks for is missing, and nothing crashes."""
    checkpoints.save_checkpoint(tmp_path, {"p": {"name": "Pair", **BAD[case]}}, 1)
    for transforms in (None, [rules.rename("name", "name")]):
        with pytest.raises(MissingLeavesError) as caught:
            checkpoints.restore_checkpoint(tmp_path, {"p": Pair(0, 0)}, orbax_transforms=transforms)
        assert caught.value.missing == ("p/left", "p/right")


def test_old_namedtuples_that_moved(tmp_path: Path) -> None:
    """Rules find the fields of an old namedtuple also where the target has it at another path."""
    adam = optax.scale_by_adam().init({"v": np.zeros(3)})
    moments = {"1": {"w": np.full(3, 2.0)}, "2": {"w": np.full(3, 3.0)}}
    old = {"name": "ScaleByAdamState", "fields": {"0": "count", "1": "mu", "2": "nu"}}
    old["values"] = {"0": np.array(5), **moments}
    (tmp_path / "checkpoint_1").write_bytes(serialization.msgpack_serialize({"opt": old, "table": COLUMNS}))
    given = [rules.rename("(mu|nu)/w", r"\1/v"), rules.move("opt", "opt_state/0")]
    found = checkpoints.restore_checkpoint(tmp_path, {"opt_state": (adam,)}, orbax_transforms=given)["opt_state"][0]
    assert int(found.count) == 5 and found.mu["v"].tolist() == [2.0] * 3 and found.nu["v"].tolist() == [3.0] * 3


class Mode(enum.IntEnum):
    EVAL = 3


class Name(enum.StrEnum):
    BEST = "best"


class Text(str):
    def __str__(self) -> str:
        return "something else"


class Number(float):
    def __float__(self) -> float:
        return 7.0


class Whole(int):
    def __int__(self) -> int:
        return 7


class Complex(complex):
    def __complex__(self) -> complex:
        return 7j


class Raw(bytes):
    def __bytes__(self) -> bytes:
        return b"seven"


VALUES: list[tuple[Any, Any]] = [
    (Mode.EVAL, 3),
    (Name.BEST, "best"),
    (Text("q"), "q"),
    (Number(-0.0), -0.0),
    (Whole(4), 4),
    (Complex(1 - 2j), 1 - 2j),
    (Raw(b"\0x"), b"\0x"),
    (bytearray(b"ab"), b"ab"),
    (memoryview(b"abcd")[::2], b"ac"),
]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("value", "plain"), VALUES, ids=[type(value).__name__ for value, _ in VALUES])
def test_the_plain_value_is_saved(flag: bool, tmp_path: Path, value: Any, plain: Any, background: bool) -> None:
    """The base type's own value, whatever the subclass would convert to."""
    manager = checkpoints.AsyncManager() if background else None
    checkpoints.save_checkpoint(tmp_path, {"a": value, "b": [value, value]}, 1, async_manager=manager)
    if manager is not None:
        manager.wait_previous_save()
    restored = checkpoints.restore_checkpoint(tmp_path, None)
    again = restore(tmp_path, {"a": value, "b": [value, value]})
    for found in (restored["a"], restored["b"]["0"], restored["b"]["1"], again["a"], *again["b"]):
        assert type(found) is type(plain) and found == plain
        assert not isinstance(plain, float) or math.copysign(1, found) == math.copysign(1, plain)


def test_it_is_told_once_for_each_type(
    flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact types and numpy's scalars, which are also Python numbers, are not mentioned."""
    monkeypatch.setattr(snapshot, "_warned", set())
    caplog.set_level(logging.WARNING)
    tree = {"mode": Mode.EVAL, "again": Mode.EVAL, "scalar": np.float64(1), "text": np.str_("x"), "n": True}
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, tree, step)
    (record,) = caplog.records
    assert record.getMessage().startswith("mode: a ") and "Mode is saved as the plain int 3" in record.getMessage()
    restored = checkpoints.restore_checkpoint(tmp_path, tree)
    assert type(restored["scalar"]) is np.float64 and type(restored["text"]) is np.str_ and restored["n"] is True


@flax.struct.dataclass
class State:
    """A user's node."""

    params: Any


CALLS: dict[str, Callable[[Path, Any], Any]] = {
    "save_checkpoint": lambda run, tree: checkpoints.save_checkpoint(run, tree, 2),
    "save": lambda run, tree: flax_ckpt_compat.save(run, tree, step=2, format="orbax"),
    "restore_checkpoint": lambda run, tree: checkpoints.restore_checkpoint(run, tree),
    "restore": lambda run, tree: flax_ckpt_compat.restore(run, tree),
    "plan_restore": lambda run, tree: flax_ckpt_compat.plan_restore(run, tree),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_tree_that_contains_itself(call: str, tmp_path: Path) -> None:
    """It is no tree; nothing is written."""
    checkpoints.save_checkpoint(tmp_path, {"a": {"params": {"b": [np.ones(2)]}}}, 1)
    inner: dict[str, Any] = {"b": [np.ones(2)]}
    tree = {"a": State(inner)}
    inner["b"].append(inner)
    with pytest.raises(errors.DepthError, match=r"contains itself"):
        CALLS[call](tmp_path, tree)
    assert checkpoints.available_steps(tmp_path) == [1]


class Ring(nnx.Module):
    """A module that holds itself."""

    def __init__(self) -> None:
        self.w = nnx.Param(np.ones(2))
        self.me = self


@pytest.mark.skipif(not hasattr(nnx, "Pytree"), reason="modules of this Flax are no trees")
@pytest.mark.parametrize("call", ["save_checkpoint", "save"])
def test_a_module_that_contains_itself(call: str, tmp_path: Path) -> None:
    """The error names the way out, which works."""
    with pytest.raises(errors.DepthError, match=r"contains itself.* take nnx\.state\(module\)"):
        CALLS[call](tmp_path, {"a": Ring()})
    CALLS[call](tmp_path, {"a": nnx.state(Ring())})
    assert checkpoints.available_steps(tmp_path) == [2]
