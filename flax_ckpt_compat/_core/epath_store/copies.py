"""Copy files of a store to the local disk, for readers that take nothing but local files."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping

from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.local.safe_open import stays_inside
from flax_ckpt_compat._core.storage import Location, Stat
from flax_ckpt_compat._core.thread_pools import in_parallel

_PIECE = 32 * 2**20
_AT_ONCE = 16


@functools.cache
def _root() -> str:
    """Return a folder for copies, which goes when the process ends."""
    root = tempfile.mkdtemp(prefix="flax_ckpt_compat-copies-")
    atexit.register(_remove, root, os.getpid())
    return root


def _remove(root: str, owner: int) -> None:
    if os.getpid() == owner:  # not at the end of a forked process
        shutil.rmtree(root, ignore_errors=True)


def kvstore_of_copy(folder: Location, there: Mapping[str, Stat]) -> dict[str, str]:
    """Return TensorStore's spec of a local copy of a folder as it is now; what was copied before is not copied again.

    ``there`` is a new list of its files."""
    if bad := [name for name in there if not stays_inside(name)]:
        raise CorruptCheckpointError(f"{folder}: it has a file named {bad[0]!r:.100}; do not use it", path=folder.path)
    versions = "\n".join(f"{name}\0{stat.version}" for name, stat in sorted(there.items()))
    copied = os.path.join(_root(), hashlib.sha256(f"{folder}\n{versions}".encode()).hexdigest()[:32])

    def copy(name: str) -> None:
        target = os.path.join(copied, name)
        if os.path.exists(target):
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        source = (folder / name).open_file()
        handle, temporary = tempfile.mkstemp(dir=_root())
        with os.fdopen(handle, "wb") as file:
            for start in range(0, source.size, _PIECE):
                file.write(source.read(start, start + _PIECE))
        os.replace(temporary, target)

    os.makedirs(copied, exist_ok=True)
    in_parallel(copy, list(there), _AT_ONCE)
    return {"driver": "file", "path": copied + "/"}
