"""Kinds of leaves: casts while reading, which stored kind fits which leaf of a target, and scalars."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, restore, rules, save, transforms
from flax_ckpt_compat._restore import casting
from flax_ckpt_compat.errors import CorruptCheckpointError, KindMismatchError
from tests.support.logs import warnings_logged
from tests.support.peers import skip_without_typed_keys
from tests.support.samples import fingerprint
from tests.support.saves import use_flag

COMPLEX = {dtype: np.array([1.5 - 2j, -3 + 4j], dtype) for dtype in ("complex64", "complex128")}
VALUES = {f"l{n}": np.linspace(-n, n, 100 + n, dtype=np.float32).reshape(2, -1) for n in range(0, 20, 2)} | COMPLEX


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.int8, np.complex64, np.complex128, np.float32])
def test_values_are_those_of_numpy(
    dtype: Any, mapped: bool, compression: str | None, flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read together, every array is cast as numpy casts it, and is writable memory of its own.

    A real dtype takes the real part of complex values."""
    monkeypatch.setattr(casting, "_AT_ONCE", 1000)
    with use_flag(flag), config.override(compression=compression, dtype="target", mapped=mapped):
        path = checkpoints.save_checkpoint(tmp_path, VALUES, 1)
        target = {name: np.zeros(array.shape, dtype) for name, array in VALUES.items()}
        restored = checkpoints.restore_checkpoint(path, target)
    for name, array in VALUES.items():
        assert restored[name].dtype == dtype and restored[name].flags.writeable
        expected = array if np.dtype(dtype).kind == "c" else array.real
        np.testing.assert_array_equal(restored[name], expected.astype(dtype))


def test_one_leaf_in_two_dtypes(flag: bool, tmp_path: Path) -> None:
    """A stored leaf that two of the target's leaves are made of has the dtype of each of them."""
    with use_flag(flag), config.override(dtype="target"):
        path = checkpoints.save_checkpoint(tmp_path, {"a": np.arange(6, dtype=np.float32) / 2}, 1)
        target = {"a": np.zeros(6, np.float16), "b": np.zeros(6, np.int32)}
        copies = {"b": transforms.Transform(original_key="a")}
        restored = checkpoints.restore_checkpoint(path, target, orbax_transforms=copies)
    assert {name: value.dtype for name, value in restored.items()} == {"a": np.float16, "b": np.int32}
    assert restored["a"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5] and restored["b"].tolist() == [0, 0, 1, 1, 2, 2]


def test_x64_is_switched_within_a_process(flag: bool, tmp_path: Path) -> None:
    """Each restore goes by what jax holds when it is called: 64 bits come to a device, or whole as numpy."""
    values = np.array([1 + 2**-40, 2.0])
    checkpoints.save_checkpoint(tmp_path, {"w": values}, 1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    before = jax.config.jax_enable_x64
    try:
        for on in (False, True, False, True):
            jax.config.update("jax_enable_x64", on)
            target = {"w": jax.ShapeDtypeStruct((2,), np.float64, sharding=sharding)}
            restored = checkpoints.restore_checkpoint(tmp_path, target)["w"]
            assert isinstance(restored, jax.Array if on else np.ndarray)
            assert restored.dtype == np.float64
            assert np.asarray(restored).tobytes() == values.tobytes()
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("value", [2**63 + 5, 2**64 - 1, -(2**63), 7])
@pytest.mark.parametrize("kind", [int, np.uint64])
def test_integers_of_python_have_no_limit(kind: Any, value: int, flag: bool, tmp_path: Path) -> None:
    """A target's int takes each stored one, though int64, numpy's dtype of an int, ends at 2**63."""
    if kind is np.uint64 and value < 0:
        value += 2**64
    with use_flag(flag), config.override(dtype="target"):
        checkpoints.save_checkpoint(tmp_path, {"seed": kind(value)}, 1)
        restored = checkpoints.restore_checkpoint(tmp_path, {"seed": 0})["seed"]
    assert type(restored) is int and restored == value


def test_leaves_that_are_kept_and_abstract_are_told(flag: bool, tmp_path: Path, caplog: Any) -> None:
    """They have no values: the state came back with a ShapeDtypeStruct in it, without a word."""
    path = checkpoints.save_checkpoint(tmp_path, {"body": np.ones(2, np.float32)}, 1)
    target = jax.eval_shape(lambda: {"body": jnp.zeros(2), "head": {"w": jnp.zeros(3)}})
    restored = restore(path, target, transforms=[rules.from_target("head")])
    assert isinstance(restored["head"]["w"], jax.ShapeDtypeStruct)
    (message,) = caplog.messages
    assert "head/w" in message and "no values" in message and "body" not in message


# Stored dtype, wanted dtype, values that survive, and others of which each is lost. float64 has all integers up to
# 2**53, and float16 ends at 65504, to which what is up to half a step above it rounds (IEEE 754).
LOSSES: list[tuple[Any, Any, list[Any], list[Any]]] = [
    (np.complex128, np.float64, [1 + 0j], [1 + 2j]),
    (np.complex128, np.float32, [1 + 0j], [1e300 + 0j]),
    (np.complex128, np.complex64, [1 + 2j], [1e300 + 1j, 1 + 1e300j]),
    (np.int64, np.float64, [2**53, 2**53 + 2], [2**53 + 1, -(2**53) - 1, 2**63 - 1]),
    (np.int64, np.complex128, [2**53, 2**53 + 2], [2**53 + 1, -(2**53) - 1, 2**63 - 1]),
    (np.int64, np.int8, [-128, 127], [-129, 128]),
    (np.float32, np.float16, [1.5, 65510.0, np.inf, -np.inf, np.nan], [65536.0, -65536.0]),
    (np.float16, np.int32, [3.0, -4.0], [0.5, np.inf, -np.inf, np.nan]),
    (jnp.bfloat16, np.float16, [65024.0], [1e38]),
    (jnp.bfloat16, np.float32, [65024.0, 1e38], []),
    (np.float32, bool, [0.0, 1.0], [2.0, np.nan]),
]


@pytest.mark.parametrize(("stored", "wanted", "kept", "lost"), LOSSES)
def test_what_a_cast_loses(
    stored: Any, wanted: Any, kept: list[Any], lost: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restore warns of each leaf that has other values afterwards, and of no other."""
    tree = {f"kept_{at}": np.array([value], stored) for at, value in enumerate(kept)}
    lossy = {f"lost_{at}": np.array([value], stored) for at, value in enumerate(lost)}
    for name, value in (tree | lossy).items():
        caplog.clear()
        path = save(tmp_path / name, {name: value}, format="msgpack")
        restore(path, {name: np.zeros(1, wanted)}, dtype="target")
        assert ["does not hold all values" in text for text in caplog.messages] == [True] * (name in lossy)


def test_text_of_numpy(flag: bool, tmp_path: Path) -> None:
    """Numpy's text and bytes fit the targets that were saved, and no numbers."""
    tree = {"text": np.str_("a"), "bytes": np.bytes_(b"ab")}
    save(tmp_path / "saved", tree)
    restored = restore(tmp_path / "saved", tree)
    assert restored == tree and list(map(type, restored.values())) == [np.str_, np.bytes_]
    assert restore(tmp_path / "saved", {"text": "", "bytes": b""}) == tree
    with pytest.raises(KindMismatchError, match="text: stored text, target a number"):
        restore(tmp_path / "saved", {"text": 1})


def test_a_number_of_the_target_takes_a_cast_one(tmp_path: Path) -> None:
    """A rule's result for it is no difference, also where differences are errors."""
    path = save(tmp_path / "c", {"n": np.array(3.0)}, format="msgpack")
    assert restore(path, {"n": 1.5}, transforms=[rules.cast("n", "float32")]) == {"n": 3.0}


# A stored leaf, leaves of a target that it fits, and others. Numbers become arrays of an abstract target.
FITTING: list[tuple[Any, list[Any], list[Any]]] = [
    (np.float32(1), [1.0, np.float32(0), np.zeros((), np.float32)], ["text", b"", object()]),
    (np.ones((), np.float32), [1.0, np.zeros((), np.float32)], ["text"]),
    (np.ones(1, np.float32), [np.zeros(1)], [1.0, "text"]),
    (3, [1, 1.5, jax.ShapeDtypeStruct((), jnp.float32)], [np.zeros(()), "text", b""]),
    ("a", ["", np.str_("")], [1, b"", np.zeros(())]),
    (b"a", [b"", bytearray(), memoryview(b""), np.bytes_(b"")], [1, ""]),
]


@pytest.mark.parametrize(("stored", "fitting", "others"), FITTING)
def test_kinds(stored: Any, fitting: list[Any], others: list[Any], flag: bool, tmp_path: Path) -> None:
    """What fits is restored as it is, and anything else is an error that names both kinds."""
    path = save(tmp_path / "saved", {"a": stored})
    for target in fitting:
        assert np.asarray(restore(path, {"a": target})["a"]).tolist() == np.asarray(stored).tolist()
    for target in others:
        with pytest.raises(KindMismatchError, match=r"a: stored .*, target "):
            restore(path, {"a": target})


def test_keys_and_their_data(flag: bool, tmp_path: Path) -> None:
    """A typed key fits a typed key, and an array of the dtype of its data; its two words are one key, and not two."""
    skip_without_typed_keys()
    key = jax.random.key(3)
    path = save(tmp_path / "saved", {"a": key})
    assert jax.random.key_data(restore(path, {"a": jax.random.key(0)})["a"]).tolist() == [0, 3]
    assert jax.random.key_data(restore(path, {"a": np.zeros(2, np.uint32)})["a"]).tolist() == [0, 3]
    for target in (1.5, np.zeros(2, np.float32)):
        with pytest.raises(KindMismatchError, match="stored a typed PRNG key"):
            restore(path, {"a": target})
    path = save(tmp_path / "data", {"a": jax.random.key_data(key)})
    with pytest.raises(KindMismatchError, match="target a typed PRNG key"):
        restore(path, {"a": jax.random.split(key, 2)})


SCALARS = {"i": 3, "f": 2.5, "b": True, "i64": np.int64(4), "f64": np.float64(0.5), "f32": np.float32(1.5)}
KINDS: dict[str, Any] = {
    "python": {"i": 0, "f": 0.0, "b": False, "i64": 0, "f64": 0.0, "f32": 0.0},
    "numpy scalar": {name: np.asarray(value).dtype.type(0) for name, value in SCALARS.items()},
    "array": {name: np.zeros((), np.asarray(value).dtype) for name, value in SCALARS.items()},
}


@pytest.fixture(autouse=True)
def real_orbax_may_warn() -> Any:
    """Deprecations inside Orbax are not ours to mend."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(orbax|jax|etils|flax)\b.*")
        yield


@pytest.mark.parametrize("is_typed", [True, False], ids=["with types", "without types"])
@pytest.mark.parametrize("kind", KINDS)
def test_scalars_of_directories(tmp_path: Path, kind: str, is_typed: bool) -> None:
    """A stored scalar is the Python number or the numpy scalar that the target has, and never becomes an array.

    Before ``_METADATA`` all of them were stored alike, so the target decides among all three."""
    ocp.PyTreeCheckpointer().save(tmp_path / "c", SCALARS)
    asked = {"python": lambda a: a.item(), "numpy scalar": lambda a: a[()], "array": lambda a: a}[kind]
    expected = {name: asked(np.asarray(value)) for name, value in SCALARS.items()}
    if is_typed and kind == "array":
        expected = SCALARS | {"i64": 4, "f64": 0.5}
    if not is_typed:
        (tmp_path / "c" / "_METADATA").unlink()
        (tmp_path / "c" / "checkpoint").write_bytes(msgpack.packb({name: f"PLACEHOLDER://{name}" for name in SCALARS}))
        narrow = np.asarray(np.float32(1.5))  # no Python number was ever stored so
        expected |= {"f32": narrow} if kind == "python" else {}
        alone = checkpoints.restore_checkpoint(tmp_path / "c", None)
        assert fingerprint(alone) == fingerprint({"i": 3, "f": 2.5, "b": True, "i64": 4, "f64": 0.5, "f32": narrow})
    assert fingerprint(checkpoints.restore_checkpoint(tmp_path / "c", KINDS[kind])) == fingerprint(expected)


def test_what_may_be_a_key(tmp_path: Path) -> None:
    """Where the files that tell keys from their data are lost, only a plain array in the target gets the data."""
    skip_without_typed_keys()
    ocp.PyTreeCheckpointer().save(tmp_path / "c", {"key": jax.random.key(3), "a": jnp.arange(3)})
    shutil.rmtree(tmp_path / "c" / "array_metadatas")
    with warnings_logged() as logged:
        for target in (None, {"key": jax.random.key(0)}):
            with pytest.raises(CorruptCheckpointError, match="array_metadatas") as caught:
                checkpoints.restore_checkpoint(tmp_path / "c", target)
            assert caught.value.leaf == "key"
        raw = checkpoints.restore_checkpoint(tmp_path / "c", {"key": np.zeros(2, np.uint32)})["key"]
        assert checkpoints.restore_checkpoint(tmp_path / "c", {"a": np.zeros(3)})["a"].tolist() == [0, 1, 2]
        with (
            flax_ckpt_compat.open_checkpoint(tmp_path / "c") as opened,
            pytest.raises(CorruptCheckpointError, match="array_metadatas"),
        ):
            opened.read("key")
    assert sum("array_metadatas" in text for text in logged) == 5
    assert fingerprint(raw) == fingerprint(np.asarray(jax.random.key_data(jax.random.key(3))))


def test_numbers_behind_arrays_for_numbers(tmp_path: Path) -> None:
    """What was stored as an array, and may have been a number, is one where the target has one; an array stays one."""
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            checkpointer.save(tmp_path / "c", {"a": jnp.float32(1.5), "b": np.float32(2.5)})
        except ValueError:  # 0.10.3
            pytest.skip("this Orbax saves no numpy scalars")
    restored = checkpoints.restore_checkpoint(tmp_path / "c", {"a": np.float32(0), "b": np.float32(0)})
    assert (type(restored["b"]), restored["b"], restored["a"]) == (np.float32, 2.5, 1.5)
