"""User trees as neutral trees, and back."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, iter_leaves, map_leaves
from flax_ckpt_compat._trees import prng_keys, state_dict
from tests.support.peers import FROZEN_DICT_TAKES_INT_KEYS
from tests.support.profiles import examples
from tests.support.samples import SAMPLES, Fields, Keyed, Pair, Registered, Serialized, fingerprint, train_state_sample
from tests.support.trees import keys, leaves

TREES = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.dictionaries(keys(), inner, max_size=4),
        st.dictionaries(st.integers(-5, 50), inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys(), inner, max_size=3).map(core.freeze),
        st.dictionaries(keys(), inner, max_size=3).map(collections.OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.tuples(inner, inner).map(lambda pair: Fields(*pair)),
        st.tuples(inner, inner).map(lambda pair: Registered(*pair)),
        st.tuples(inner, inner).map(lambda pair: Keyed(*pair)),
        inner.map(Serialized),
    ),
    max_leaves=12,
)


@settings(max_examples=examples(200), deadline=None)
@given(tree=TREES)
def test_random_trees_are_rebuilt(tree: Any) -> None:
    """rebuild undoes describe, whatever containers are nested in which."""
    try:
        described = state_dict.describe(tree)
    except CheckpointError:
        assert not FROZEN_DICT_TAKES_INT_KEYS
        return
    assert fingerprint(
        state_dict.TargetTree(tree).rebuild(state_dict.from_stored(described, None, "flax"))
    ) == fingerprint(tree)


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_trees_are_rebuilt(name: str) -> None:
    """rebuild undoes describe for every kind of tree that users save."""
    tree = SAMPLES[name]()
    rebuilt = state_dict.TargetTree(tree).rebuild(state_dict.from_stored(state_dict.describe(tree), None, "flax"))
    assert fingerprint(rebuilt) == fingerprint(tree)


@pytest.mark.parametrize(
    "name", ["dict", "FrozenDict", "list", "tuple", "namedtuple", "dataclass", "TrainState", "masked", "int keys"]
)
def test_names_are_those_of_flax(name: str) -> None:
    """For everything that Flax knows, the names and their order are those of its state dict."""
    tree = SAMPLES[name]()
    assert fingerprint(state_dict.from_stored(state_dict.describe(tree), None, "flax")) == fingerprint(
        serialization.to_state_dict(tree)
    )


def test_containers_are_remembered() -> None:
    """Lists, tuples, namedtuples and int keys are told apart at every depth, below dataclasses too."""
    tree = state_dict.describe(Fields({1: [0], "x": (0,)}, Pair([], {"a": collections.OrderedDict(b=[1])})))
    first, second = tree.children["first"], tree.children["second"]
    assert first.int_keys == {"1"}
    assert first.children["1"].container is Container.LIST
    assert first.children["x"].container is Container.TUPLE
    assert second.container is Container.NAMEDTUPLE
    assert second.children["left"].container is Container.LIST
    assert second.children["right"].children["a"].children["b"].container is Container.LIST


def test_empty_pytrees_are_no_lists() -> None:
    """A registered pytree without children is an empty dict, an empty list an empty list."""
    assert state_dict.describe(collections.OrderedDict()).container is Container.DICT
    assert state_dict.describe([]).container is Container.LIST


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


@pytest.mark.parametrize("tree", [{1: 2, "1": 3}, {"a": core.freeze({1: 2, "1": 3})}])
def test_keys_of_one_text_are_refused(tree: Any) -> None:
    """Two keys with the same text would be one leaf: refused."""
    with pytest.raises(CheckpointError, match=r"unique|only have string keys"):
        state_dict.describe(tree)


def test_children_of_a_pytree_with_one_text_are_refused() -> None:
    """Two children of a registered pytree with the same name are refused, naming the node."""
    with pytest.raises(CheckpointError, match="cannot save outer"):
        state_dict.describe({"outer": collections.OrderedDict({1: 2, "1": 3})})


def test_leaves_are_untouched() -> None:
    """describe copies nothing: the leaves are the caller's own objects."""
    tree = train_state_sample()
    described = {id(leaf) for _, leaf in iter_leaves(state_dict.describe(tree)) if not isinstance(leaf, Branch)}
    assert {id(leaf) for leaf in jax.tree_util.tree_leaves(tree) if hasattr(leaf, "dtype")} <= described


def test_work_does_not_grow_with_depth() -> None:
    """Each node of nested dataclasses is asked for its state a bounded number of times."""
    calls = 0

    class Counted:
        pass

    def to_state(_: Any) -> Any:
        nonlocal calls
        calls += 1
        return {"v": 1}

    serialization.register_serialization_state(Counted, to_state, lambda node, _: node)
    tree: Any = Counted()
    for _ in range(50):
        tree = Fields(tree)
    state_dict.describe(tree)
    assert calls == 1


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


def test_abstract_targets_are_described() -> None:
    """Trees of jax.eval_shape have the structure of the real ones."""
    tree = jax.eval_shape(train_state_sample)
    described = state_dict.describe(tree)
    real = state_dict.describe(train_state_sample())
    assert [path for path, _ in iter_leaves(described)] == [path for path, _ in iter_leaves(real)]
    assert prng_keys.is_prng_key(jax.eval_shape(lambda: jax.random.key(0)))


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
