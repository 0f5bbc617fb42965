"""Which stored kind of leaf fits which leaf of a target."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_ckpt_compat import restore, rules, save
from flax_ckpt_compat.errors import KindMismatchError
from tests.support.peers import skip_without_typed_keys


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
    """A typed key fits a typed key, and an array of the dtype of its data."""
    skip_without_typed_keys()
    key = jax.random.key(3)
    path = save(tmp_path / "saved", {"a": key})
    assert jax.random.key_data(restore(path, {"a": jax.random.key(0)})["a"]).tolist() == [0, 3]
    assert jax.random.key_data(restore(path, {"a": np.zeros(2, np.uint32)})["a"]).tolist() == [0, 3]
    for target in (1.5, np.zeros(2, np.float32)):
        with pytest.raises(KindMismatchError, match="stored a typed PRNG key"):
            restore(path, {"a": target})
