"""Orbax's transforms through whole restores: the same as real Orbax and real Flax give, on both formats.

Where our results are meant to differ, they are made alike first; each such step names what decides it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import core
from flax.training import checkpoints as flax_checkpoints
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, rules, transforms
from flax_ckpt_compat._core.errors import TransformError
from tests.support.peers import version
from tests.support.profiles import examples
from tests.support.samples import Fields, Pair, assert_apart
from tests.support.saves import new_folder, use_flag

NAMES = st.sampled_from(["a", "b", "c", "b1"])
PATTERNS = [r"(.*)", r"(\w+)", r"a/(.*)", r"(.*)/(\w+)", r"b1?", r".*/\d"]
SHAPES = st.sampled_from([(), (1,), (3,), (2, 2)])


@st.composite
def arrays(draw: Any, kinds: str = "nj") -> Any:
    """A numpy (n) or jax (j) array."""
    shape, seed = draw(SHAPES), draw(st.integers(0, 50))
    # Of jax's dtypes: real Orbax restores float64 to a jax.Array by narrowing it.
    dtype = draw(st.sampled_from([np.float32, np.int32, ml_dtypes.bfloat16]))
    value = np.asarray(np.arange(int(np.prod(shape))).reshape(shape) + seed, dtype)
    return jnp.asarray(value) if draw(st.sampled_from(kinds)) == "j" else value


def trees(leaves: Any, containers: bool = False) -> st.SearchStrategy[Any]:
    """Nested dicts and lists, and where containers are asked for also dataclasses, FrozenDicts and namedtuples."""

    def wider(inner: Any) -> Any:
        several = [st.dictionaries(NAMES, inner, max_size=3), st.lists(inner, min_size=1, max_size=3)]
        if containers:
            several += [
                st.builds(Fields, inner, inner),
                st.builds(Pair, inner, inner),
                st.dictionaries(NAMES, inner, max_size=3).map(core.freeze),
            ]
        return st.one_of(several)

    return st.dictionaries(NAMES, st.recursive(leaves, wider, max_leaves=6), min_size=1, max_size=4)


def stored_trees() -> st.SearchStrategy[Any]:
    """What is saved."""
    return trees(st.one_of(arrays(), arrays(), st.integers(-9, 9), st.floats(-9, 9, width=32), st.none()))


def target_trees() -> st.SearchStrategy[Any]:
    """What is restored into."""
    return trees(st.one_of(arrays(), arrays(), st.just(-1), st.none()), containers=True)


def paths(tree: Any) -> list[str]:
    """Key paths of the leaves, joined with /."""
    return ["/".join(map(str, map(_name, keys))) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _name(key: Any) -> Any:
    return next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name))


def at(tree: Any, path: str) -> Any:
    """The leaf of nested dicts and lists at a key path."""
    for name in path.split("/"):
        tree = tree[int(name)] if isinstance(tree, list) else tree[name]
    return tree


def doubled(value: Any) -> Any:
    """A value_fn."""
    return value * 2


def summed(wanted: list[str]) -> Callable[..., Any]:
    """A multi_value_fn that adds up the sums of some leaves."""

    def function(key: str, tree: Any, args: Any) -> Any:
        # To float64, so that the order and the place of the sum do not matter.
        return np.float32(len(key) + sum(np.asarray(at(tree, path), np.float64).sum() for path in wanted))

    return function


@st.composite
def transform_trees(draw: Any, stored: Any, target: Any) -> Any:
    """Real Orbax's transforms by expressions that may match the target's leaves, flat or nested."""
    there, wanted = paths(stored) or ["a"], paths(target) or ["a"]
    some = st.sampled_from([*(there * 8)[:20], "absent"])
    whole = st.builds(
        dict,
        original_key=st.one_of(st.none(), some),
        value_fn=st.sampled_from([None, None, doubled]),
    ).map(lambda given: ocp.Transform(**given))
    several = st.lists(st.sampled_from(there), min_size=1, max_size=2).map(
        lambda names: ocp.RestoreTransform(
            multi_value_fn=summed(names), multi_value_fn_input_args={name: ocp.RestoreArgs() for name in names}
        )
    )
    fallback = st.just(ocp.Transform(use_fallback=True))
    exact = draw(st.dictionaries(st.sampled_from(wanted), st.one_of(whole, whole, several, fallback), max_size=3))
    regex = draw(st.lists(st.sampled_from(PATTERNS), max_size=1))
    sources = st.sampled_from([None, r"\1", r"a/\1", r"\1/a", "b", r"c/\1"] if "(" in str(regex) else [None, "b"])
    loose = st.builds(
        lambda source, function: ocp.Transform(original_key=source, value_fn=function),
        sources,
        st.sampled_from([None, doubled]),
    )
    regex = {pattern: draw(st.one_of(loose, fallback, several)) for pattern in regex}
    flat = {**exact, **regex}
    return nested(flat) if draw(st.booleans()) else flat


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Keys with / as nested dicts, where that does not make a key lead to others and be a transform."""
    root: dict[str, Any] = {}
    for key, value in flat.items():
        first, _, rest = key.partition("/")
        is_free = not any(other == first or (other.startswith(f"{first}/") and "(" in other) for other in flat)
        if rest and is_free and "(" not in key and first.isidentifier():
            root.setdefault(first, {})[rest] = value
        else:
            root[key] = value
    return root


def as_ours(given: Any) -> Any:
    """The same transforms, of our classes."""

    def one(transform: Any) -> Any:
        kind = transforms.RestoreTransform if isinstance(transform, ocp.RestoreTransform) else transforms.Transform
        return kind(**vars(transform))

    return jax.tree.map(one, given)


class Leaked(Exception):
    """Real Orbax gave its own metadata in the place of a value, or gave it to a function (format.md 5.4)."""


def attempt(restore: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What it gives, or the error."""
    try:
        restored = restore()
    except Exception as error:
        return None, Leaked() if "ValueMetadataEntry" in str(error) else error
    leaks = any(type(leaf).__name__ == "ValueMetadataEntry" for leaf in jax.tree.leaves(restored))
    return (None, Leaked()) if leaks else (restored, None)


def real_orbax(path: str, target: Any, given: Any, default_to_original: bool, args: Any) -> Any:
    """What real Orbax restores."""
    return ocp.PyTreeCheckpointer().restore(
        path, item=target, restore_args=args, transforms=given, transforms_default_to_original=default_to_original
    )


def same(ours: Any, theirs: Any, wanted: Any = None) -> None:
    """Structure, shapes, dtypes and values agree.

    Python numbers stay Python numbers in ours (contract, section 5, "Python int, float, bool, str").
    Arrays are numpy or jax by the target, not by what was saved (section 5, "leaf kind").

    Args:
        ours, theirs: the results.
        wanted: the target, if the setting ``dtype="target"`` is on: then our arrays have its dtypes (section 5,
            "dtypes differ"), whereas real Orbax casts what goes into functions and not what they give, and what
            several leaves come from only once.
    """
    (one, structure), (two, other) = map(jax.tree_util.tree_flatten_with_path, (ours, theirs))
    assert structure == other
    targets = [None] * len(one) if wanted is None else jax.tree.leaves(wanted)
    for (keys, mine), (_, real), target in zip(one, two, targets, strict=True):
        if hasattr(mine, "dtype") and hasattr(real, "dtype"):
            dtype = real.dtype if target is None else target.dtype
            assert (mine.dtype, mine.shape) == (dtype, real.shape), keys
            real = np.asarray(real).astype(dtype)  # 259 has no bfloat16
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(real), err_msg=str(keys))


def compare(theirs: tuple[Any, Exception | None], mine: tuple[Any, Exception | None], wanted: Any = None) -> None:
    """Both gave the same, or both raised; except where real Orbax leaks its metadata."""
    (value, refused), (own, error) = theirs, mine
    event(f"real: {type(refused).__name__}, ours: {type(error).__name__}")
    if isinstance(refused, Leaked):
        return
    assert (refused is None) == (error is None), (refused, error)
    if error is None:
        same(own, value, wanted)


def write(path: Path, tree: Any, writer: str) -> str:
    """Saves with real Orbax or with ours; returns the path."""
    if writer == "orbax":
        ocp.PyTreeCheckpointer().save(path, tree)
    else:
        flax_ckpt_compat.save(path, tree, format="msgpack" if writer == "msgpack" else "orbax")
    return str(path)


def ours(path: str, target: Any, given: Any, default_to_original: bool = True, dtype: Any = "stored") -> Any:
    """What we restore, whatever the shapes and kinds, with the target's values for what is missing, as in Orbax."""
    return flax_ckpt_compat.restore(
        path,
        target,
        transforms=given,
        transforms_default_to_original=default_to_original,
        missing_leaves="ignore",
        shape_mismatch="ignore",
        kind_mismatch="ignore",
        dtype=dtype,
    )


@pytest.mark.slow
@pytest.mark.skipif(version("orbax-checkpoint") < (0, 12), reason="Orbax 0.12 is what ours are held to")
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(120), phases=[Phase.generate, Phase.shrink])
@given(st.data())
def test_as_real_orbax(data: Any) -> None:
    """Any tree, target and transforms: real Orbax and we give the same values or both refuse; msgpack the same."""
    stored, target = data.draw(stored_trees()), data.draw(target_trees())
    given, default = data.draw(transform_trees(stored, target)), data.draw(st.booleans())
    own = data.draw(st.sampled_from([given, as_ours(given)]))
    with new_folder() as directory:
        path = write(Path(directory, "real"), stored, data.draw(st.sampled_from(["orbax", "ours"])))
        args = jax.tree.map(lambda _: ocp.RestoreArgs(), target)
        theirs = attempt(lambda: real_orbax(path, target, given, default, args))
        mine = attempt(lambda: ours(path, target, own, default))
        file = write(Path(directory, "file"), stored, "msgpack")
        compare(mine, attempt(lambda: ours(file, target, own, default)))
    compare(theirs, mine)


@pytest.mark.slow
@pytest.mark.skipif(version("orbax-checkpoint") < (0, 12), reason="Orbax 0.12 is what ours are held to")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", ["orbax", "ours", "msgpack"])
@pytest.mark.parametrize("empty", [{}, [], (), None])
@pytest.mark.parametrize("exact", [ocp.Transform(), ocp.Transform(original_key="b"), ocp.Transform(use_fallback=True)])
def test_sources_that_are_empty(tmp_path: Path, exact: Any, empty: Any, writer: str) -> None:
    """A transform may ask for one if a later one replaces it; what it gives is refused."""
    stored, target = {"a": np.float32([5]), "b": empty}, {"a": np.float32([7])}
    given = {"(.*)": ocp.Transform(original_key="b"), "a": exact}
    path, args = write(tmp_path / "real", stored, "orbax"), {"a": ocp.RestoreArgs()}
    theirs = attempt(lambda: real_orbax(path, target, given, False, args))
    own = attempt(lambda: ours(write(tmp_path / "own", stored, writer), target, given, False))
    if exact.original_key:
        assert isinstance(theirs[1], Leaked)
        assert isinstance(own[1], TransformError)
    else:
        assert (theirs[1], own[1]) == (None, None)
        same(own[0], theirs[0])


@pytest.mark.slow
@pytest.mark.skipif(version("orbax-checkpoint") < (0, 12), reason="Orbax 0.12 is what ours are held to")
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(60, 12), phases=[Phase.generate, Phase.shrink])
@given(st.data())
def test_as_real_flax(data: Any) -> None:
    """restore_checkpoint with orbax_transforms gives what real Flax gives with its flag on, in the target's dtypes."""
    stored, target = data.draw(trees(arrays())), data.draw(trees(st.one_of(arrays(), arrays(), st.none()), True))
    given = data.draw(transform_trees(stored, target))
    with new_folder() as directory, use_flag(True):
        writer = data.draw(st.sampled_from([checkpoints, flax_checkpoints]))
        writer.save_checkpoint(directory, stored, 1)
        theirs = attempt(lambda: flax_checkpoints.restore_checkpoint(directory, target, orbax_transforms=given))
        # Flax asks for dtypes only where some leaf of the target has a sharding (format.md 5.5).
        casts = any(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(target))
        with config.override(dtype="target" if casts else "stored", shape_mismatch="ignore"):
            mine = attempt(lambda: checkpoints.restore_checkpoint(directory, target, orbax_transforms=given))
    compare(theirs, mine, target if casts else None)


STORED = {"a": {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float32)}, "n": 3, "s": "text", "z": None}


@pytest.fixture
def saved(flag: bool, tmp_path: Path) -> str:
    """A checkpoint of STORED, in each format."""
    return flax_ckpt_compat.save(tmp_path / "saved", STORED)


@pytest.mark.parametrize("kind", [transforms, ocp], ids=["ours", "orbax"])
def test_regular_expressions_of_inputs(kind: Any, saved: str) -> None:
    """A multi_value_fn sees the stored leaves that its expressions match, and the RestoreArgs of its target."""
    seen: dict[str, Any] = {}

    def function(key: str, tree: Any, args: Any) -> Any:
        seen[key] = (tree["a"], args)
        return np.concatenate([tree["a"]["w"].ravel(), tree["a"]["b"]])

    inputs = {r"a/[wb]": None, "a/.*": kind.RestoreArgs(dtype="none")}  # the first that matches a leaf decides
    given = {"new": kind.RestoreTransform(multi_value_fn=function, multi_value_fn_input_args=inputs)}
    restored = ours(saved, {"new": jnp.zeros(9, np.float16)}, given)
    assert restored["new"].tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1] and restored["new"].dtype == np.float64
    assert seen["new"][1].dtype == np.float16 and seen["new"][1].restore_type is jax.Array


@pytest.mark.parametrize("kind", [transforms, ocp], ids=["ours", "orbax"])
def test_the_documented_argument_of_value_fn(kind: Any, saved: str) -> None:
    """The value_fn of a RestoreTransform may take the RestoreArgs that its documentation promises (section 5)."""

    def function(value: Any, args: Any) -> Any:
        return value.astype(args.dtype)

    given = {"a/w": kind.RestoreTransform(value_fn=function)}
    restored = ours(saved, {"a": {"w": np.zeros((2, 3), np.int16)}}, given)
    assert restored["a"]["w"].dtype == np.int16 and restored["a"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_real_orbax_fails_on(saved: str) -> None:
    """A tuple of names is a key path taken literally, as documented (section 5).

    A stored None counts as missing, where real Orbax gives its own metadata (format.md 5.4): the target keeps its
    value."""
    given = {"new": transforms.Transform(original_key=("a", "b"))}
    restored = ours(saved, {"new": np.zeros(3), "z": 5}, given)
    assert (restored["new"].tolist(), restored["z"]) == ([1, 1, 1], 5)


def sum_of_b(key: str, tree: Any, *_: Any) -> Any:
    """A multi_value_fn."""
    return tree["a"]["b"] + 1


class OwnError(Exception):
    """Of the user."""


def fail(value: Any) -> Any:
    """A value_fn."""
    raise OwnError("no")


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        # A group that is not there, sources that are not stored, and what is no transform.
        *((transforms.Transform(key), TransformError, "a/b") for key in (r"\1", "absent", ("a/b",))),
        (transforms.Transform("z"), TransformError, "a/b.* no such leaf"),
        (3, TransformError, "a/b"),
        # A restore cannot know what to read for it.
        *(
            (kind(multi_value_fn=sum_of_b), TransformError, r"^a/b: a multi_value_fn has to say which stored leaves it")
            for kind in (ocp.Transform, ocp.RestoreTransform, transforms.RestoreTransform)
        ),
        (transforms.RestoreTransform(multi_value_fn=sum_of_b, multi_value_fn_input_args={"a/w": None}), TypeError, "."),
        (transforms.Transform(value_fn=fail), OwnError, "^no"),
    ],
)
def test_errors_name_the_leaf(given: Any, error: type[Exception], told: str, saved: str) -> None:
    """What makes no sense is told; what functions raise, also for lack of a leaf that they did not ask for, is kept."""
    with pytest.raises(error, match=told) as caught:
        ours(saved, {"a": {"b": np.zeros(3)}}, {"a/b": given})
    assert error is TransformError or "a/b" in "".join(caught.value.__notes__)


def test_any_result_of_a_function(saved: str, flag: bool) -> None:
    """jax arrays, Python values and None are given as returned; numpy scalars are arrays where the target's are."""
    results = {"jax": jnp.ones(2), "scalar": 3, "text": "x", "none": None, "numpy": np.float32(2), "jax target": 0}
    results["jax target"] = np.float32(2)
    given = {key: transforms.Transform("n", value_fn=lambda _, key=key: results[key]) for key in results}
    target = {**dict.fromkeys(results, np.zeros(2)), "numpy": np.zeros(()), "jax target": jnp.zeros(())}
    restored = ours(saved, target, given)
    assert restored["jax"] is results["jax"] and restored["none"] is None
    assert (restored["scalar"], restored["text"]) == (3, "x")
    assert isinstance(restored["numpy"], np.ndarray) and restored["numpy"].shape == ()
    assert isinstance(restored["jax target"], jax.Array if flag else np.ndarray)


@pytest.mark.parametrize("result", [np.ones(2, np.float32), jnp.ones(2)], ids=["numpy", "jax"])
def test_results_are_cast_and_placed(result: Any, saved: str, flag: bool, caplog: pytest.LogCaptureFixture) -> None:
    """dtype="target" and abstract targets cast what functions give; only the latter say what that may lose."""
    given = {"new": transforms.Transform("n", value_fn=lambda _: result)}
    assert ours(saved, {"new": np.zeros(2, np.float16)}, given)["new"].dtype == np.float32
    assert ours(saved, {"new": np.zeros(2, np.float16)}, given, dtype="target")["new"].dtype == np.float16
    assert not caplog.records
    sharding = jnp.zeros(1).sharding
    abstract = {"new": jax.ShapeDtypeStruct((2,), jnp.bfloat16, sharding=sharding)}
    new = ours(saved, abstract, given)["new"]
    assert new.dtype == jnp.bfloat16 and "new: float32 to bfloat16" in caplog.text
    assert getattr(new, "sharding", None) == sharding or not flag


def test_results_keep_64_bits(saved: str) -> None:
    """What jax computed is cast on the host to a dtype that jax would narrow."""
    given = {"new": transforms.Transform("n", value_fn=lambda _: jnp.array([1, 3]))}
    new = ours(saved, {"new": np.zeros(2)}, given, dtype="target")["new"]
    assert (new.dtype, new.tolist()) == (np.float64, [1.0, 3.0])


@pytest.mark.parametrize("policy", ["warn", "error", "ignore"])
def test_shapes_that_only_functions_know(policy: Any, saved: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another shape than the target's is judged as any other, by the target's key path."""
    given = {"new/(.*)": transforms.Transform(r"a/\1", value_fn=lambda value: value[:1])}
    target = {"new": {"w": np.zeros((2, 3)), "b": np.zeros(1)}}

    def restore() -> Any:
        return flax_ckpt_compat.restore(saved, target, transforms=given, shape_mismatch=policy)

    if policy == "error":
        with pytest.raises(flax_ckpt_compat.errors.ShapeMismatchError, match=r"new/w: stored \(1, 3\), target \(2, 3"):
            restore()
        return
    assert restore()["new"]["w"].tolist() == [[0, 1, 2]]
    assert ("new/w" in caplog.text) == (policy == "warn") and "new/b" not in caplog.text


def test_results_are_memory_of_their_own(saved: str) -> None:
    """Copies, a transpose, inputs, and a result of two leaves: writable, in C order, and none shows in another."""
    several = transforms.RestoreTransform(
        multi_value_fn=lambda key, tree: tree["a"]["w"], multi_value_fn_input_args={"a/w": None}
    )
    given = {
        "copy.": transforms.Transform("a/w"),
        "turned": transforms.Transform("a/w", value_fn=np.transpose),
        "fixed": transforms.Transform("a/w", value_fn=lambda value: np.broadcast_to(value, (2, 2, 3))),
        "input.": several,
        "same.": transforms.Transform("n", value_fn=lambda _: result),
    }
    whole, result = STORED["a"]["w"], np.ones(3)
    expected = dict.fromkeys(["copy1", "copy2", "input1", "input2", "input3"], whole)
    expected |= dict.fromkeys(["same1", "same2"], np.ones(3))
    expected |= {"turned": whole.T, "fixed": np.broadcast_to(whole, (2, 2, 3))}
    assert_apart(ours(saved, jax.tree.map(np.zeros_like, expected), given), expected)


@pytest.mark.parametrize("shared", [False, True])
def test_a_result_that_jax_made_of_its_input(shared: bool, flag: bool, tmp_path: Path) -> None:
    """On the CPU it may be the input's memory, which is no other leaf's then; nor where one read serves both."""
    path = flax_ckpt_compat.save(tmp_path / "c", {"a": np.arange(32.0, dtype=np.float32)})
    functions: dict[str, Any] = {"x": jax.device_put, "y": lambda value: value}
    given = {name: transforms.Transform("a", value_fn=one) for name, one in functions.items()}
    if shared:
        of_both = transforms.RestoreTransform(
            multi_value_fn=lambda key, tree: functions[key](tree["a"]), multi_value_fn_input_args={"a": None}
        )
        given = {"[xy]": of_both}
    restored = ours(path, {name: np.zeros(32, np.float32) for name in functions}, given)
    restored["y"][...] = 9
    assert restored["x"].tolist() == list(range(32))


def test_groups_that_no_key_asks_for(tmp_path: Path) -> None:
    """A key that matches stored names alone is filled for none, so a group that it lacks is no error, as in Orbax."""
    state = {"a": {"c": np.ones(2)}, "q": np.zeros(2)}
    path = flax_ckpt_compat.save(tmp_path / "saved", state, format="msgpack")
    given = {"[^/]*": transforms.Transform(original_key=r"\2")}
    target = {"a": {"c": np.zeros(2)}}
    expected = ocp.apply_transformations(state, {"[^/]*": ocp.Transform(original_key=r"\2")}, target)
    np.testing.assert_equal(flax_ckpt_compat.restore(path, target, transforms=given), expected)


def test_without_a_target(saved: str, caplog: pytest.LogCaptureFixture) -> None:
    """Transforms say nothing without a target, as in Flax; that is told."""
    restored = checkpoints.restore_checkpoint(saved, None, orbax_transforms={"b": transforms.Transform("a")})
    assert sorted(restored) == ["a", "n", "s", "z"] and "without a target" in caplog.text


@pytest.mark.parametrize("target", [None, {"new": {1: 0, 2: {10: 0}}, "other": 0}])
def test_int_keys_below_a_renamed_name(flag: bool, tmp_path: Path, target: Any) -> None:
    """They stay ints, with a target and without one, for which Flax's msgpack files have text."""
    path = flax_ckpt_compat.save(tmp_path / "saved", {"old": {1: 5, 2: {10: 6}}, "other": 7})
    restored = flax_ckpt_compat.restore(path, target, transforms=[rules.rename("old", "new")])
    names = {1: 5, 2: {10: 6}} if flag or target else {"1": 5, "2": {"10": 6}}
    assert restored == {"new": names, "other": 7}
