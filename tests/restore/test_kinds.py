"""Which stored kind of leaf fits which leaf of a target."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_ckpt_compat import restore, rules, save
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._restore import leaf_kinds
from flax_ckpt_compat._restore.leaf_kinds import TargetKind
from flax_ckpt_compat._trees.leaf_sources import Derived
from flax_ckpt_compat.errors import KindMismatchError


def handle_of(kind: LeafKind, shape: tuple[int, ...], dtype: Any, **more: Any) -> LeafHandle:
    """A stored leaf, of no checkpoint."""
    reader: Any = None
    return LeafHandle(("a",), kind, shape, dtype and np.dtype(dtype), 0, "a", reader, None, **more)


def fits(kind: LeafKind, shape: tuple[int, ...], dtype: Any, target: Any, *, cast: bool = False, **more: Any) -> bool:
    """Whether a stored leaf fits a leaf of the target."""
    return leaf_kinds.find(("a",), handle_of(kind, shape, dtype, **more), target, cast) is None


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (np.float32(1), TargetKind.NUMBER),
        (1j, TargetKind.NUMBER),
        (np.bytes_(b"a"), TargetKind.BYTES),
        (bytearray(b"a"), TargetKind.BYTES),
        (memoryview(b"a"), TargetKind.BYTES),
        (np.str_("a"), TargetKind.TEXT),
        (np.zeros(()), TargetKind.ARRAY),
        (jax.random.key(0), TargetKind.KEY),
        (object(), TargetKind.OTHER),
    ],
    ids=lambda value: value.name if isinstance(value, TargetKind) else type(value).__name__,
)
def test_kinds_of_the_target(leaf: Any, kind: TargetKind) -> None:
    """Numpy's text and bytes are text and bytes, and no numbers."""
    assert leaf_kinds.target_kind(leaf) is kind


def test_text_of_numpy(flag: bool, tmp_path: Path) -> None:
    """Numpy's text and bytes fit the targets that were saved, and no numbers."""
    tree = {"text": np.str_("a"), "bytes": np.bytes_(b"ab")}
    save(tmp_path / "saved", tree)
    restored = restore(tmp_path / "saved", tree)
    assert restored == tree and list(map(type, restored.values())) == [np.str_, np.bytes_]
    assert restore(tmp_path / "saved", {"text": "", "bytes": b""}) == tree
    with pytest.raises(KindMismatchError, match="text: stored text, target a number"):
        restore(tmp_path / "saved", {"text": 1})


def test_arrays_for_numbers() -> None:
    """Only such without axes."""
    assert fits(LeafKind.ARRAY, (), np.float32, 1.0)
    assert not fits(LeafKind.ARRAY, (1,), np.float32, 1.0)


def test_numbers_for_arrays() -> None:
    """Where it becomes one: for an abstract target, or by a cast; or may have been saved as one."""
    assert not fits(LeafKind.INT, (), None, np.zeros(()))
    assert fits(LeafKind.INT, (), None, np.zeros(()), cast=True)
    assert fits(LeafKind.INT, (), None, jax.ShapeDtypeStruct((), jnp.float32))
    assert fits(LeafKind.INT, (), None, np.zeros(()), possible_kinds=frozenset({LeafKind.ARRAY}))


def test_keys_for_arrays() -> None:
    """Their data is an array of its dtype, and of no other."""
    assert fits(LeafKind.PRNG_KEY, (2,), np.uint32, np.zeros(2, np.uint32))
    assert not fits(LeafKind.PRNG_KEY, (2,), np.uint32, np.zeros(2, np.float32))


def test_which_numbers_a_cast_converts() -> None:
    """To Python's and to numpy's numbers; text is none."""
    for target in (1.0, np.float32(1), np.zeros(())):
        assert leaf_kinds.is_converted(LeafKind.INT, target, True)
        assert not leaf_kinds.is_converted(LeafKind.INT, target, False)
    assert not leaf_kinds.is_converted(LeafKind.STR, 1.0, True)


def test_what_rules_compute_fits_numbers_and_arrays() -> None:
    """A 0-d result is taken for a number, as a stored one is; what nobody can foresee fits all."""
    cases = [
        (
            Derived((), lambda: 1, (), np.dtype("f4"), "cast"),
            [1.5, np.float32(1), np.zeros(())],
            ["text", jax.random.key(0)],
        ),
        (Derived((), lambda: 1, None, None, "computed"), [1.5, "text", b"", jax.random.key(0)], []),
    ]
    for derived, fitting, others in cases:
        assert [leaf_kinds.find(("a",), derived, target, False) for target in fitting] == [None] * len(fitting)
        assert None not in [leaf_kinds.find(("a",), derived, target, False) for target in others]
    keys = Derived((), lambda: 1, (), None, "wrapped")
    assert leaf_kinds.find(("a",), keys, jax.random.key(0), False) is None
    for target, shown in ((1.5, "a number"), (np.zeros(()), "an array () float64")):
        difference = leaf_kinds.find(("a",), keys, target, False)
        assert difference is not None
        assert difference.what == f"stored a typed PRNG key, target {shown}"
    stored = handle_of(LeafKind.ARRAY, (2, 3), np.float32)
    for array in (stored, Derived((stored,), lambda value: value, (2, 3), stored.dtype, "computed")):
        difference = leaf_kinds.find(("a",), array, "text", False)
        assert difference is not None and difference.what == "stored an array (2, 3) float32, target text"


def test_a_number_of_the_target_takes_a_cast_one(tmp_path: Path) -> None:
    """A rule's result for it is no difference, also where differences are errors."""
    path = save(tmp_path / "c", {"n": np.array(3.0)}, format="msgpack")
    assert restore(path, {"n": 1.5}, transforms=[rules.cast("n", "float32")]) == {"n": 3.0}
