"""Saving and reading every kind of tree with everybody, and the documented differences of what comes back.

Imported by running tests only: it computes real optimizers' states.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.support.interop import EVERYBODY, FLAX, ORBAX, OURS, READERS, WRITERS, Saved, quietly
from tests.support.peers import ORBAX_HAS_TYPED_KEYS, version
from tests.support.zoo import CONTAINERS, ROOTS, ZOO, canonical, orbax_containers, state_dict, with_none

PEERS = (*FLAX, *ORBAX)
DIRECTORIES = ("ours on", "flax on", *ORBAX)
TREES = {**ZOO, **ROOTS}
EQUAL, REFUSED = "equal", "refused"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A documented difference, with its reason: what comes back instead, by kind of tree."""

    name: str
    reason: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    instead: dict[str, Any]


def _marked_key(key: Any) -> Any:
    return {
        "__flax_ckpt_compat_prng_key__": str(jax.random.key_impl(key)),
        "data": np.asarray(jax.random.key_data(key)),
    }


NUMBERS = {"np.int64": -5, "np.float32": 1.5, "np.bool_": True, "np.complex64": 1 - 2j, "np.bfloat16": 1.5}
EMPTY_NODES = ("TrainState", "masked", "EmptyState", "MaskedNode")
_KEY_DATA = {name: np.asarray(jax.random.key_data(ZOO[name])) for name in ("key", "rbg keys")}
DIFFERENCES = [
    Difference(
        "state dict",
        "without a target Flax gives nested dicts with text keys, sequences by position",
        EVERYBODY,
        (*OURS, *FLAX),
        {name: state_dict(TREES[name]) for name in (*CONTAINERS, *ROOTS)},
    ),
    Difference(
        "state dict with None",
        "Orbax's format has None for nodes without children",
        DIRECTORIES,
        (*OURS, *FLAX),
        {name: with_none(state_dict(CONTAINERS[name])) for name in EMPTY_NODES},
    ),
    Difference(
        "Orbax's containers",
        "Orbax's format has dicts with text keys, lists, and None for nodes without children",
        DIRECTORIES,
        ORBAX,
        {name: orbax_containers(TREES[name]) for name in (*CONTAINERS, *ROOTS)},
    ),
    Difference(
        "numpy scalar → Python number",
        "Orbax's format has only scalars",
        ("ours on", "flax on", "PyTree", "Manager"),
        PEERS,
        NUMBERS,
    ),
    Difference(
        "np.int64 → int",
        "Orbax stores an int as an int64, too; a target tells which it was",
        ("flax on", "PyTree", "Manager"),
        OURS,
        {"np.int64": -5},
    ),
    Difference(
        "numpy scalar → 0-d array",
        "StandardCheckpointer makes arrays of them when it saves",
        ("Standard",),
        EVERYBODY,
        {name: np.asarray(ZOO[name]) for name in NUMBERS},
    ),
    Difference(
        "complex → 0-d array",
        "our directories: Orbax has no complex scalar that all its readers take",
        ("ours on",),
        PEERS,
        {"complex": np.array(1 - 2j), "np.complex64": np.array(1 - 2j, np.complex64)},
    ),
    Difference(
        "as the integers it is stored as",
        "our directories: Orbax has no such type; the type is in metadata that only we read",
        ("ours on",),
        PEERS,
        {
            "bytes": np.array([0, 255], np.uint8),
            "np uint4": np.array([0, 15], np.uint8),
            "np datetime": np.array([2]),
            "np text": np.array([[97, 0, 0, 0, 98, 0, 0, 0], [99, 0, 0, 0, 0, 0, 0, 0]], np.uint8),
            "np bytes": np.array([[97, 98], [99, 0]], np.uint8),
            "np longdouble": ZOO["np longdouble"].view(np.uint8).reshape(2, -1),
        },
    ),
    Difference(
        "typed key → key data",
        "Orbax before 0.11.16 has no typed keys",
        ("ours on",) if not ORBAX_HAS_TYPED_KEYS else (),
        PEERS,
        _KEY_DATA,
    ),
    Difference(
        "typed key → key data",
        "Orbax 0.11 before 0.11.16 stores the data alone",
        ("flax on", *ORBAX) if not ORBAX_HAS_TYPED_KEYS else (),
        (*PEERS, *OURS),
        _KEY_DATA,
    ),
    Difference(
        "typed key → marked key data",
        "our msgpack files: Flax's have no typed keys",
        ("ours off",),
        FLAX,
        {name: _marked_key(ZOO[name]) for name in ("key", "rbg keys")},
    ),
    Difference(
        "native byte order",
        "Orbax's format has one byte order; the values are the same",
        DIRECTORIES,
        EVERYBODY,
        {"np big-endian": np.arange(3, dtype="<i4")},
    ),
    Difference(
        "lost when saved: bytes swapped",
        "Flax's msgpack has no byte order; what the array was is not in the file",
        ("flax off",),
        (*OURS, *FLAX),
        {"np big-endian": np.arange(3).astype(">i4").view("<i4")},
    ),
]
# What a peer says no to in what we wrote. It may refuse what a peer of its wrote, that is not a silent difference.
REFUSALS: dict[tuple[str, str], tuple[str, ...]] = {
    # Legacy Flax saves these dtypes, and does not know the names that it saved them by.
    **{("ours off", reader): ("np text", "np bytes") for reader in FLAX},
    # Orbax reads directories only.
    **{("ours off", reader): tuple(TREES) for reader in ORBAX},
}
REFUSED_BY_OLD_ORBAX = tuple(ROOTS) if version("orbax-checkpoint") < (0, 12) else ()


NOTHING = object()


@functools.cache
def accepted(writer: str, folder: Path) -> tuple[str, ...]:
    """The kinds of trees that a writer saves, found by saving ever smaller halves, or each on its own."""

    def search(names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            save(writer, names, folder)
        except Exception:
            half = len(names) // 2
            return search(names[:half]) + search(names[half:]) if half else ()
        return names

    # v1's threads wait for minutes, also at exit, for what failed beside them.
    tries = TREES if writer == "v1" else [tuple(ZOO), *ROOTS]
    return tuple(name for part in tries for name in search((part,) if isinstance(part, str) else part))


@functools.cache
def save(writer: str, names: tuple[str, ...], folder: Path) -> Saved:
    """One checkpoint of these kinds of trees, or of one that is a whole tree."""
    into = folder / f"{writer} {len(list(folder.iterdir()))}"
    into.mkdir()
    tree = ROOTS[names[0]] if names[0] in ROOTS else {name: ZOO[name] for name in names}
    return quietly(WRITERS[writer], into, tree)


def read(writer: str, reader: str, names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """What a reader gives back, by kind of tree; what it refuses is not there."""
    try:
        got = quietly(READERS[reader], save(writer, names, folder), None)
    except Exception:
        half = len(names) // 2
        halves = (names[:half], names[half:]) if half else ()
        return {name: value for part in halves for name, value in read(writer, reader, part, folder).items()}
    if got is None:
        return dict.fromkeys(names, NOTHING)
    return {names[0]: got} if names[0] in ROOTS else {name: got[name] for name in names}


def outcome(writer: str, reader: str, kind: str, got: Any) -> str:
    """Equal, the name of a documented difference, or what came back instead."""
    if got is NOTHING and reader in FLAX and writer in ("Manager", "v1"):
        return "nothing"  # Flax takes neither for a checkpoint, and returns the target, here None
    found = canonical(got)
    if found == canonical(TREES[kind]):
        return EQUAL
    for difference in DIFFERENCES:
        applies = writer in difference.writers and reader in difference.readers and kind in difference.instead
        if applies and found == canonical(difference.instead[kind]):
            return difference.name
    return f"UNDOCUMENTED: {TREES[kind]!r} came back as {got!r}"
