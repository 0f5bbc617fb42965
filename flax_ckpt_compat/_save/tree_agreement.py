"""Compare the trees of processes that save one checkpoint together, by small digests.

Arrays spread over processes must agree. Of other leaves process 0's are saved. `Replicas` shares out the writing of
arrays that several processes hold whole, as data-parallel jobs hold their states.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.jax_shards import Memo
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import HostCopy, KeyData, Node, Path, iter_leaves, show_path
from flax_ckpt_compat._discovery.log_once import log_once
from flax_ckpt_compat._trees import prng_keys

# Leaves are grouped by a checksum of their names, so that messages of large trees stay small.
_GROUPS = 64
# Smaller replicated arrays are left to process 0: they are written together.
_MIN_SHARED_BYTES = 2**20


class TreeSummary:
    """Digest of one process's tree, sent to process 0."""

    def __init__(self, tree: Node):
        described = Memo[str](lambda array: f"{array[1]} {array[2]} {_layout(array[0])}")
        self._names = defaultdict[str, list[str]](list)  # of arrays that are spread, by group
        spread, count, names = Counter[str](), 0, 0
        for path, leaf in iter_leaves(tree):
            name = show_path(path)
            checksum = zlib.crc32(name.encode("utf-8", "surrogateescape"))
            count, names = count + 1, names + checksum
            array = leaf.data if isinstance(leaf, KeyData) else leaf
            if _spans_processes(array):
                group = str(checksum % _GROUPS)
                self._names[group].append(name)
                layout = described.of((array.sharding, array.shape, array.dtype))
                spread[group] += zlib.crc32(layout.encode(), checksum)
        whole, number = zlib.crc32(repr(sorted(spread.items())).encode()), sum(map(len, self._names.values()))
        # Number and digest of the arrays that are spread over processes, as text.
        self.spread = f"{number} arrays spread over processes (names, shapes, dtypes and shardings: {whole:08x})"
        # JSON-serializable: digests by group, which have to be the same in all processes; number of leaves, and a sum
        # of their names.
        digests = {group: f"{total % 2**16:x}" for group, total in spread.items()}
        self.details: dict[str, Any] = {"spread": digests, "leaves": [count, names % 2**32]}

    def why_spread_differs(self, theirs: Mapping[str, Any]) -> str:
        """Name arrays that another process, with these `details`, spreads differently, for an error; '' for none."""
        mine, other = self.details["spread"], theirs.get("spread", {})
        groups = [group for group in mine.keys() | other.keys() if mine.get(group) != other.get(group)]
        names = one_line(sorted(name for group in groups for name in self._names.get(group, ())))
        return f"; look at {names}" if names else ""

    def warn_of_more_leaves(self, path: str, others: Mapping[int, Mapping[str, Any]]) -> None:
        """Warn once of leaves that only other processes hold; ``others`` has their `details` by process."""
        mine = self.details["leaves"]
        more = {index: details["leaves"][0] for index, details in others.items() if details["leaves"] != mine}
        more = {index: count for index, count in sorted(more.items()) if count >= mine[0]}  # fewer are a part of ours
        if more:
            processes, counts = (", ".join(map(str, numbers)) for numbers in (more, more.values()))
            folder = path.rpartition("/")[0]
            log_once(
                (folder, "more leaves"),
                f"{folder}: processes hold leaves that process 0 does not hold, and these are not saved (process "
                f"{processes}: {counts} leaves; process 0: {mine[0]}). Give the tree the same keys in all processes. "
                "This warning is shown once.",
            )


class Replicas:
    """Arrays of one save that are replicated over processes, process 0 among them."""

    def __init__(self) -> None:
        self._arrays: dict[Path, tuple[tuple[int, ...], str, tuple[int, ...]]] = {}  # holders, dtype and shape

    def add(self, path: Path, array: Any, holders: Collection[int]) -> None:
        """Add a ``jax.Array``, and the processes that hold it."""
        if array.nbytes >= _MIN_SHARED_BYTES and len(holders) > 1:
            self._arrays[path] = tuple(sorted(holders)), str(array.dtype), array.shape

    def writers(self) -> dict[Path, int]:
        """Return which process writes each array, by a hash of its name."""
        return {
            path: holders[zlib.crc32(show_path(path).encode("utf-8", "surrogateescape")) % len(holders)]
            for path, (holders, _, _) in self._arrays.items()
        }

    def digest(self) -> str:
        """Return what has to be the same in all processes that share out the work."""
        text = repr(sorted(self._arrays.items()))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _spans_processes(array: Any) -> bool:
    """Return whether each process writes its own shards of an array."""
    sharding = getattr(array, "sharding", None) if isinstance(array, jax.Array | HostCopy) else None
    return sharding is not None and not sharding.is_fully_addressable


def _layout(sharding: Any) -> str:
    """Return a sharding as text, equal in all processes whose shards fit together."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return f"{type(sharding).__name__} over {sorted(device.id for device in sharding.device_set)}"
    spec = [tuple(part) if isinstance(part, tuple | list) else part and (part,) for part in sharding.spec]
    while spec and not spec[-1]:
        spec.pop()
    mesh = sharding.mesh
    return f"{dict(mesh.shape)} {[device.id for device in mesh.devices.flat]} {spec}"


def placeholder(array: jax.Array) -> Any:
    """Return a stand-in, without memory, for an array that process 0 writes and this process cannot see."""
    if prng_keys.is_prng_key(array):
        return KeyData(str(jax.random.key_impl(array)), placeholder(jax.eval_shape(jax.random.key_data, array)))
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)
