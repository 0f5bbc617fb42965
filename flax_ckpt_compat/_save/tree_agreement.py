"""Compare the trees of processes that save one checkpoint together, by small digests.

Two rules: arrays spread over processes must agree (`TreeSummary.why_spread_differs`); other leaves should, as
process 0's are saved (`TreeSummary.warn_of_differences`). Where all agree, `Replicas` shares out the writing of arrays
that several processes hold whole, as data-parallel jobs hold their states.

In large trees leaves are grouped by a checksum of their names, so that messages stay small and a leaf of one process
alone changes one group only.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.jax_shards import Memo, normalize_index
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Node, Path, iter_leaves, show_path
from flax_ckpt_compat._trees import prng_keys

_log = logging.getLogger("flax_ckpt_compat")
_GROUPS = 64
# Trees of up to so many leaves get one group for each leaf.
_MAX_EXACT_LEAVES, _EXACT_GROUPS = 128, 2**24
# Digest the values of about so many leaves; all of 5,000 would take as long as saving them.
_SAMPLED_LEAVES = 1024
# Digest all bytes of a small array, else evenly spaced elements; of a large one on an accelerator, nothing.
_SMALL_BYTES, _SAMPLED_ELEMENTS = 4096, 64
# Smaller replicated arrays are left to process 0: they are written together.
_MIN_SHARED_BYTES = 2**20
_warned: set[tuple[str, str]] = set()


class TreeSummary:
    """Digest of one process's tree, sent to process 0."""

    def __init__(self, tree: Node):
        """Sample the leaves."""
        self._names: dict[str, list[str]] = defaultdict(list)
        described = Memo[str](lambda array: f"{array[1]} {array[2]} {_layout(array[0])}")
        spread: dict[str, int] = defaultdict(int)
        held: dict[str, int] = defaultdict(int)
        values: dict[str, int] = defaultdict(int)
        leaves = list(iter_leaves(tree))
        self._is_exact = len(leaves) <= _MAX_EXACT_LEAVES
        groups = _EXACT_GROUPS if self._is_exact else _GROUPS
        # A mask: processes whose trees differ by a few leaves sample the same ones, or a superset.
        skip_mask = (1 << (len(leaves) // _SAMPLED_LEAVES).bit_length()) - 1
        number, names = 0, 0
        with jax.transfer_guard_device_to_host("allow"):
            for path, leaf in leaves:
                name = show_path(path)
                text = name.encode("utf-8", "surrogateescape")
                checksum = zlib.crc32(text)
                group, names = str(checksum % groups), names + checksum
                array = leaf.data if isinstance(leaf, KeyData) else leaf
                if spans_processes(array):
                    number += 1
                    layout = described.of((array.sharding, array.shape, array.dtype))
                    spread[group] += zlib.crc32(layout.encode(), checksum)
                self._names[group].append(name)
                if checksum >> 8 & skip_mask:
                    continue
                of, digest = _digest(array)
                held[group] += zlib.crc32(of, checksum)
                values[group] += zlib.crc32(digest, checksum)
        whole = zlib.crc32(repr(sorted(spread.items())).encode())
        # Number and digest of the arrays that are spread over processes, as text.
        self.spread = f"{number} arrays spread over processes (names, shapes, dtypes and shardings: {whole:08x})"
        # JSON-serializable digests by group. ``spread`` has to be the same in all processes; ``values`` is "<what is
        # held> <its values>", whose values should agree between processes that hold the same; ``leaves`` is the number
        # and a sum of the names.
        self.details: dict[str, Any] = {
            "spread": {group: f"{total % 2**16:x}" for group, total in spread.items()},
            "values": {group: f"{held[group] % 2**16:x} {total % 2**16:x}" for group, total in values.items()},
        }
        self.details["leaves"] = [len(leaves), names % 2**32]

    def why_spread_differs(self, theirs: Mapping[str, Any]) -> str:
        """Name arrays that another process, with these `details`, spreads differently, for an error; '' for none."""
        mine, other = self.details["spread"], theirs.get("spread", {})
        groups = [group for group in mine.keys() | other.keys() if mine.get(group) != other.get(group)]
        names = sorted(name for group in groups for name in self._names.get(group, ()))
        return f"; look at {'' if self._is_exact else 'some of '}{one_line(names)}" if names else ""

    def warn_of_differences(self, path: str, others: Mapping[int, Mapping[str, Any]]) -> bool:
        """Warn once of leaves that other processes hold with other values, or alone; return whether values differ.

        ``others`` has their `details` by process.
        """
        self._warn_of_more_leaves(path, others)
        first = {(group, *digest.split()[:1]): digest for group, digest in self.details["values"].items()}
        groups: set[str] = set()
        processes = []
        for index, details in sorted(others.items()):
            found = {
                group
                for group, digest in details.get("values", {}).items()
                if first.setdefault((group, *digest.split()[:1]), digest) != digest
            }
            if found:
                processes.append(index)
                groups |= found
        names = one_line(sorted(name for group in groups for name in self._names.get(group, ())))
        key = path.rpartition("/")[0], names
        if groups and key not in _warned:
            _warned.add(key)
            _log.warning(
                "%s: processes hold different values of %s (process %s differs). Process 0's values are saved, and "
                "the first replica's of arrays that are split. This warning is shown once for these leaves.",
                path,
                f"{'' if self._is_exact else 'some of '}{names}" if names else "some leaves",
                ", ".join(map(str, processes)),
            )
        return bool(groups)

    def _warn_of_more_leaves(self, path: str, others: Mapping[int, Mapping[str, Any]]) -> None:
        """Warn once of leaves that only others hold; in large trees, only if another has at least as many leaves."""
        mine, count = self.details["values"], self.details["leaves"][0]
        found = {}
        for index, details in sorted(others.items()):
            theirs = details.get("leaves", self.details["leaves"])
            is_exact = self._is_exact and theirs[0] <= _MAX_EXACT_LEAVES
            has_more = details["values"].keys() - mine.keys() if is_exact else theirs[0] >= count
            if theirs != self.details["leaves"] and has_more:
                found[index] = theirs[0]
        key = path.rpartition("/")[0], f"{count} {found}"
        if found and key not in _warned:
            _warned.add(key)
            _log.warning(
                "%s: processes hold leaves that process 0 does not hold, and these are not saved (process %s: %s "
                "leaves; process 0: %d). Give the tree the same keys in all processes. This warning is shown once.",
                path,
                ", ".join(map(str, found)),
                ", ".join(map(str, found.values())),
                count,
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


def spans_processes(array: Any) -> bool:
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


def _digest(leaf: Any) -> tuple[bytes, bytes]:
    """Return which parts of a leaf this process holds, and a sample of their values."""
    if leaf is None or is_placeholder(leaf):
        return b"nothing", b""
    if isinstance(leaf, Branch):
        return b"all", leaf.container.value.encode()
    if spans_processes(leaf):
        shards = leaf.shards if isinstance(leaf, HostCopy) else leaf.addressable_shards
        parts = {str(normalize_index(shard.index, leaf.shape)): shard.data for shard in reversed(shards)}
        return repr(sorted(parts)).encode(), b"".join(_sample(parts[index]) for index in sorted(parts))
    if isinstance(leaf, HostCopy | jax.Array | np.ndarray | np.generic):
        return b"all", _sample(leaf.data if isinstance(leaf, HostCopy) else leaf)
    return b"all", f"{type(leaf).__name__} {leaf!r}".encode("utf-8", "surrogatepass")


def _sample(array: Any) -> bytes:
    nbytes = array.size * np.dtype(array.dtype).itemsize
    if isinstance(array, jax.Array) and nbytes > _SMALL_BYTES and next(iter(array.devices())).platform != "cpu":
        return b""
    host = np.asarray(array)
    if nbytes > _SMALL_BYTES:
        host = host.flat[np.linspace(0, host.size - 1, _SAMPLED_ELEMENTS).astype(np.int64)]
    return host.tobytes()


def placeholder(array: jax.Array) -> Any:
    """Return a stand-in, without memory, for an array that process 0 writes and this process cannot see."""
    if prng_keys.is_prng_key(array):
        return KeyData(str(jax.random.key_impl(array)), placeholder(jax.eval_shape(jax.random.key_data, array)))
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def is_placeholder(leaf: Any) -> bool:
    """Return whether a leaf may be a result of `placeholder`."""
    return isinstance(leaf, np.ndarray) and not leaf.flags.writeable and not any(leaf.strides)
