"""Map formats to backends, and the layouts of other programs' files to readers, imported on first use.

No other module names a backend. Those files are read by their own path and never written; look-ups take them for
something else. Their readers take nothing in them for granted, and execute none of it; their leaves are restored by the
rules of msgpack files.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, cast

from flax_ckpt_compat._core.backend import Backend, Format, Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.thread_pools import run_apart
from flax_ckpt_compat._discovery import foreign, steps

_LEGACY, _ORBAX = "flax_ckpt_compat.legacy", "flax_ckpt_compat.orbax_backend"
SAFETENSORS, STREAM, NPZ = "safetensors", "stream", "npz"  # as `CheckpointView.format` says
# Files of safetensors that `convert` wrote, now and before: read under any name.
_WRITTEN_HERE = (b'{"__metadata__":{"flax_ckpt_compat', b'{"__metadata__": {"flax_ckpt_compat')
_LENGTH = 8  # bytes of the header's length, before it


@functools.cache
def backend_for(format: Format) -> Backend:
    """Return the backend that reads and writes a format."""
    if format is Format.MSGPACK:
        return cast(Backend, _imported(_LEGACY).BACKEND)
    # Directories of Orbax before 0.5.16 hold a msgpack file.
    return cast(Backend, _imported(_ORBAX).OrbaxBackend(lambda file: _imported(_LEGACY).open_part_of_orbax(file)))


def layout_of(file: Location, look: str) -> str:
    """Return the layout of a file that looks like this (see `foreign.file_looks_like`), of those that are read; or ''.

    This imports neither numpy nor a backend."""
    name = file.name
    if name.endswith(".safetensors.index.json"):  # of Hugging Face's shards
        return SAFETENSORS if file.head()[:1] == b"{" else ""
    if look == foreign.SAFETENSORS:
        is_ours = name.endswith(".safetensors") or file.read(_LENGTH, foreign.FIRST_BYTES).startswith(_WRITTEN_HERE)
        return SAFETENSORS if is_ours else ""
    if look == foreign.STREAM:  # under a step's name it is none of Flax's checkpoints
        return "" if name.isdecimal() or steps.step_of(name, "checkpoint_") is not None else STREAM
    return NPZ if look == foreign.ZIP and name.endswith(".npz") else ""


def open_layout(layout: str, file: Location) -> Reader:
    """Open a file of a layout."""
    if layout == STREAM:  # msgpack objects one after the other, each a key path and the bytes of a leaf
        return cast(Reader, _imported(_LEGACY).open_stream(file))
    from flax_ckpt_compat._discovery import npz_and_safetensors  # numpy, which look-ups do without

    return npz_and_safetensors.NpzReader(file) if layout == NPZ else npz_and_safetensors.SafetensorsReader(file)


def _imported(name: str) -> Any:
    """Import a module on another thread: a signal handler that saves while it is imported here gets half of it."""
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return run_apart(functools.partial(importlib.import_module, name))
    return module
