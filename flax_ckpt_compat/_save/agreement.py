"""Compare, by small digests, the trees of processes that are about to save one checkpoint together.

What they spread has to be the same in all; what each of them has whole should be, and process 0's is saved. In large
trees leaves fall into groups by a checksum of their names, so that what is sent stays small, and so that a leaf that
only one process has changes one group.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.folding import one_line
from flax_ckpt_compat._core.memo import Memo
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Node, iter_leaves, normalize_index, show_path
from flax_ckpt_compat._trees import state_dict

_log = logging.getLogger("flax_ckpt_compat")
_GROUPS = 64
# Up to so many leaves have groups of their own.
_FEW, _OWN_GROUPS = 128, 2**24
# The values of about so many leaves are looked at; of 5,000, all would take as long as saving them.
_LOOKED_AT = 1024
# Bytes of an array that are looked at: all of a small one, else evenly spaced elements; of one that has to be copied
# from an accelerator nothing unless it is small.
_SMALL, _SAMPLES = 4096, 64
_told: set[tuple[str, str]] = set()


class Summary:
    """What one process tells the others of its tree.

    Attributes:
        spread: number and digest of the arrays that are spread over processes, as text.
        details: by group, as JSON takes it: ``spread`` is what has to be the same; ``values`` has what is held, and its
            values, which should be the same in all processes that hold the same.
    """

    def __init__(self, tree: Node):
        self._names: dict[str, list[str]] = defaultdict(list)
        self._layouts = Memo(_layout)
        spread: dict[str, int] = defaultdict(int)
        held: dict[str, int] = defaultdict(int)
        values: dict[str, int] = defaultdict(int)
        leaves = list(iter_leaves(tree))
        self._is_exact = len(leaves) <= _FEW
        groups = _OWN_GROUPS if self._is_exact else _GROUPS
        # A mask, so that processes whose trees differ by a few leaves look at the same ones, or at all of these.
        left_out = (1 << (len(leaves) // _LOOKED_AT).bit_length()) - 1
        number = 0
        with jax.transfer_guard_device_to_host("allow"):
            for path, leaf in leaves:
                name = show_path(path)
                text = name.encode("utf-8", "surrogateescape")
                checksum = zlib.crc32(text)
                group = str(checksum % groups)
                array = leaf.data if isinstance(leaf, KeyData) else leaf
                if is_spread(array):
                    number += 1
                    layout = self._layouts.of(array.sharding)
                    spread[group] += zlib.crc32(f"{array.shape} {array.dtype} {layout}".encode(), checksum)
                self._names[group].append(name)
                if checksum >> 8 & left_out:
                    continue
                of, digest = _digest(array)
                held[group] += zlib.crc32(of, checksum)
                values[group] += zlib.crc32(digest, checksum)
        whole = zlib.crc32(repr(sorted(spread.items())).encode())
        self.spread = f"{number} arrays spread over processes (names, shapes, dtypes and shardings: {whole:08x})"
        self.details = {
            "spread": {group: f"{total % 2**16:x}" for group, total in spread.items()},
            "values": {group: f"{held[group] % 2**16:x} {total % 2**16:x}" for group, total in values.items()},
        }

    def differences(self, theirs: Mapping[str, Any]) -> str:
        """Return which arrays may be what another process spreads in another way, as part of a sentence, or ''."""
        mine, other = self.details["spread"], theirs.get("spread", {})
        groups = [group for group in mine.keys() | other.keys() if mine.get(group) != other.get(group)]
        names = sorted(name for group in groups for name in self._names.get(group, ()))
        return f"; look at {'' if self._is_exact else 'some of '}{one_line(names)}" if names else ""

    def warn_of_values(self, path: str, others: Mapping[int, Mapping[str, Any]]) -> None:
        """Warn once that processes hold different values of what is saved once; nothing is warned of what looks equal.

        Args:
            path: of the checkpoint.
            others: what the other processes told, by number.
        """
        first = {(group, *told.split()[:1]): told for group, told in self.details["values"].items()}
        groups: set[str] = set()
        processes = []
        for index, details in sorted(others.items()):
            found = {
                group
                for group, told in details.get("values", {}).items()
                if first.setdefault((group, *told.split()[:1]), told) != told
            }
            if found:
                processes.append(index)
                groups |= found
        names = one_line(sorted(name for group in groups for name in self._names.get(group, ())))
        key = path.rpartition("/")[0], names
        if groups and key not in _told:
            _told.add(key)
            _log.warning(
                "%s: processes hold different values of %s (process %s differs). Process 0's values are saved, and of "
                "arrays that are split those of the first replica. This is said once for these leaves.",
                path,
                f"{'' if self._is_exact else 'some of '}{names}" if names else "some leaves",
                ", ".join(map(str, processes)),
            )


def is_spread(array: Any) -> bool:
    """Whether it is an array of which each process writes its own shards."""
    sharding = getattr(array, "sharding", None) if isinstance(array, jax.Array | HostCopy) else None
    return sharding is not None and not sharding.is_fully_addressable


def _layout(sharding: Any) -> str:
    """What has to be the same for shards to fit together."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return f"{type(sharding).__name__} over {sorted(device.id for device in sharding.device_set)}"
    spec = [tuple(part) if isinstance(part, tuple | list) else part and (part,) for part in sharding.spec]
    while spec and not spec[-1]:
        spec.pop()
    mesh = sharding.mesh
    return f"{dict(mesh.shape)} {[device.id for device in mesh.devices.flat]} {spec}"


def _digest(leaf: Any) -> tuple[bytes, bytes]:
    """What of a leaf this process holds, and the values of it, as far as they are cheap to know."""
    if leaf is None or (isinstance(leaf, np.ndarray) and is_unseen(leaf)):
        return b"nothing", b""
    if isinstance(leaf, Branch):
        return b"all", leaf.container.value.encode()
    if isinstance(leaf, jax.Array) and is_spread(leaf):
        shards = {
            str(normalize_index(shard.index, leaf.shape)): shard.data for shard in reversed(leaf.addressable_shards)
        }
        return repr(sorted(shards)).encode(), b"".join(_array(shards[box]) for box in sorted(shards))
    if isinstance(leaf, HostCopy):
        boxes = sorted((str(shard.index), shard.data) for shard in leaf.shards) if is_spread(leaf) else []
        if boxes or is_spread(leaf):
            return repr([box for box, _ in boxes]).encode(), b"".join(_array(data) for _, data in boxes)
        return b"all", _array(leaf.data)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return b"all", _array(leaf)
    return b"all", f"{type(leaf).__name__} {leaf!r}".encode("utf-8", "surrogatepass")


def _array(array: Any) -> bytes:
    nbytes = array.size * np.dtype(array.dtype).itemsize
    if isinstance(array, jax.Array) and nbytes > _SMALL and next(iter(array.devices())).platform != "cpu":
        return b""
    host = np.asarray(array)
    if nbytes > _SMALL:
        host = host.flat[np.linspace(0, host.size - 1, _SAMPLES).astype(np.int64)]
    return host.tobytes()


def unseen(array: jax.Array) -> Any:
    """Return what stands for an array of which this process sees nothing and process 0 writes; it takes no memory."""
    if state_dict.is_prng_key(array):
        return KeyData(str(jax.random.key_impl(array)), unseen(jax.eval_shape(jax.random.key_data, array)))
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def is_unseen(array: np.ndarray[Any, Any]) -> bool:
    """Whether it may be what `unseen` gave."""
    return not array.flags.writeable and not any(array.strides)
