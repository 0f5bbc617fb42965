"""Compare the trees of processes that save one checkpoint together, by small digests.

Two rules: arrays spread over processes must agree; other leaves should, as process 0's are saved. Where all agree,
`Replicas` shares out the writing of arrays that several processes hold whole, as data-parallel jobs hold their states.

In large trees leaves are grouped by a checksum of their names, so that messages stay small.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.jax_shards import Memo
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Node, Path, iter_leaves, show_path
from flax_ckpt_compat._discovery.log_once import log_once
from flax_ckpt_compat._trees import prng_keys

# Trees of up to so many leaves get one group for each leaf.
_MAX_EXACT_LEAVES, _EXACT_GROUPS, _GROUPS = 128, 2**24, 64
# Digest the values of about so many leaves; all of 5,000 would take as long as saving them.
_SAMPLED_LEAVES = 1024
# Digest all bytes of a small array, else evenly spaced elements; of a large one on an accelerator, nothing.
_SMALL_BYTES, _SAMPLED_ELEMENTS = 4096, 64
# Smaller replicated arrays are left to process 0: they are written together.
_MIN_SHARED_BYTES = 2**20


class TreeSummary:
    """Digest of one process's tree, sent to process 0."""

    def __init__(self, tree: Node):
        """Sample the leaves."""
        described = Memo[str](lambda array: f"{array[1]} {array[2]} {_layout(array[0])}")
        self._names = defaultdict[str, list[str]](list)  # by group
        spread, held, values = Counter[str](), Counter[str](), Counter[str]()
        leaves = list(iter_leaves(tree))
        groups = _EXACT_GROUPS if len(leaves) <= _MAX_EXACT_LEAVES else _GROUPS
        # A mask: processes whose trees differ by a few leaves sample the same ones, or a superset.
        skip_mask = (1 << (len(leaves) // _SAMPLED_LEAVES).bit_length()) - 1
        number, names = 0, 0
        for path, leaf in leaves:
            name = show_path(path)
            checksum = zlib.crc32(name.encode("utf-8", "surrogateescape"))
            group, names = str(checksum % groups), names + checksum
            self._names[group].append(name)
            array = leaf.data if isinstance(leaf, KeyData) else leaf
            if _spans_processes(array):
                number += 1
                layout = described.of((array.sharding, array.shape, array.dtype))
                spread[group] += zlib.crc32(layout.encode(), checksum)
            elif not checksum >> 8 & skip_mask and not _is_absent(array):
                held[group] += checksum
                values[group] += zlib.crc32(_sample(array), checksum)
        whole = zlib.crc32(repr(sorted(spread.items())).encode())
        # Number and digest of the arrays that are spread over processes, as text.
        self.spread = f"{number} arrays spread over processes (names, shapes, dtypes and shardings: {whole:08x})"
        # JSON-serializable digests by group. ``spread`` has to be the same in all processes; ``values`` is "<names of
        # what is held whole> <its values>", whose values should agree between processes that hold the same; ``leaves``
        # is the number and a sum of the names.
        self.details: dict[str, Any] = {
            "spread": {group: f"{total % 2**16:x}" for group, total in spread.items()},
            "values": {group: f"{held[group] % 2**16:x} {total % 2**16:x}" for group, total in values.items()},
            "leaves": [len(leaves), names % 2**32],
        }

    def _shown(self, groups: Iterable[str]) -> str:
        return one_line(sorted(name for group in groups for name in self._names.get(group, ())))

    def why_spread_differs(self, theirs: Mapping[str, Any]) -> str:
        """Name arrays that another process, with these `details`, spreads differently, for an error; '' for none."""
        mine, other = self.details["spread"], theirs.get("spread", {})
        names = self._shown(group for group in mine.keys() | other.keys() if mine.get(group) != other.get(group))
        return f"; look at {names}" if names else ""

    def warn_of_differences(self, path: str, others: Mapping[int, Mapping[str, Any]]) -> bool:
        """Warn once of leaves that other processes hold with other values, or alone; return whether values differ.

        ``others`` has their `details` by process.
        """
        folder, (count, _) = path.rpartition("/")[0], self.details["leaves"]
        first = {(group, digest.split()[0]): digest for group, digest in self.details["values"].items()}
        differing, more = dict[int, set[str]](), dict[int, int]()
        for index, details in sorted(others.items()):
            digests = {(group, digest.split()[0]): digest for group, digest in details.get("values", {}).items()}
            groups = {key[0] for key, digest in digests.items() if first.setdefault(key, digest) != digest}
            differing |= {index: groups} if groups else {}
            theirs = details.get("leaves", self.details["leaves"])
            more |= {index: theirs[0]} if theirs != self.details["leaves"] and theirs[0] >= count else {}
        if more:
            log_once(
                (folder, "more leaves"),
                f"{folder}: processes hold leaves that process 0 does not hold, and these are not saved (process "
                f"{_joined(more)}: {_joined(more.values())} leaves; process 0: {count}). Give the tree the same keys "
                "in all processes. This warning is shown once.",
            )
        if differing:
            names = self._shown(set().union(*differing.values()))
            log_once(
                (folder, names),
                f"{folder}: processes hold different values of {names or 'some leaves'} (process {_joined(differing)} "
                "differs). Process 0's values are saved. This warning is shown once for these leaves.",
            )
        return bool(differing)


def _joined(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


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


def _sample(leaf: Any) -> bytes:
    """Return a sample of a leaf's values, the same in all processes that hold the same."""
    if isinstance(leaf, Branch):
        return leaf.container.value.encode()
    array = leaf.data if isinstance(leaf, HostCopy) else leaf
    if not isinstance(array, jax.Array | np.ndarray | np.generic):
        return f"{type(leaf).__name__} {leaf!r}".encode("utf-8", "surrogatepass")
    nbytes = array.size * np.dtype(array.dtype).itemsize
    if isinstance(array, jax.Array) and nbytes > _SMALL_BYTES and next(iter(array.devices())).platform != "cpu":
        return b""
    with jax.transfer_guard_device_to_host("allow"):
        host = np.asarray(array)
    if nbytes > _SMALL_BYTES:
        host = host.flat[np.linspace(0, host.size - 1, _SAMPLED_ELEMENTS).astype(np.int64)]
    return host.tobytes()


def placeholder(array: jax.Array) -> Any:
    """Return a stand-in, without memory, for an array that process 0 writes and this process cannot see."""
    if prng_keys.is_prng_key(array):
        return KeyData(str(jax.random.key_impl(array)), placeholder(jax.eval_shape(jax.random.key_data, array)))
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _is_absent(leaf: Any) -> bool:
    """Return whether this process has no values of a leaf: None, or perhaps a result of `placeholder`."""
    return leaf is None or (isinstance(leaf, np.ndarray) and not leaf.flags.writeable and not any(leaf.strides))
