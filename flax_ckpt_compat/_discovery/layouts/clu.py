"""Read a folder of CLU: ``ckpt-7.flax``, a msgpack file of Flax, beside TensorFlow's state of the input pipeline.

TensorFlow's text file ``checkpoint`` names the latest step. Each ``.flax`` file also restores by its own path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from flax_ckpt_compat._core.backend import Format, Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._discovery.layouts.layout import ReadOnlyLayout, is_step

_LOOK_UP_FILE, _SUFFIX = "checkpoint", ".flax"
_LATEST = re.compile(rb'\s*model_checkpoint_path:\s*"(?:[^"\\\n]*/)?([^"\\\n/]+)"')
_FIRST_BYTES = 4096


def _open(location: Location) -> Reader:
    return backend_for(Format.MSGPACK).open(location)


def _latest(path: Location, names: Set[str]) -> Mapping[str, Location]:
    """Return the file of the latest step; none if the folder is something else, or that file is not there."""
    if is_step(path.name) or _LOOK_UP_FILE not in names or not any(name.endswith(_SUFFIX) for name in names):
        return {}
    file = path / _LOOK_UP_FILE
    if not file.isfile():
        return {}
    found = _LATEST.match(file.read(0, _FIRST_BYTES))
    name = found[1].decode(errors="replace") + _SUFFIX if found else ""
    return {"": path / name} if name in names else {}


LAYOUT = ReadOnlyLayout("clu", _open, in_folder=_latest)
