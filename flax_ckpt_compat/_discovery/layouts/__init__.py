"""Files of other programs that are read by their own path and never written; look-ups take them for something else.

Readers take nothing in the files for granted, and execute none of it; their leaves are restored by the rules of
msgpack files. Recognition imports neither numpy nor a backend.
"""

from __future__ import annotations

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.backend import Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import foreign, formats

SAFETENSORS, STREAM, NPZ = "safetensors", "stream", "npz"  # as `CheckpointView.format` says
# Files of safetensors that `convert` wrote, now and before: read under any name.
_WRITTEN_HERE = (b'{"__metadata__":{"flax_ckpt_compat', b'{"__metadata__": {"flax_ckpt_compat')
_LENGTH = 8  # bytes of the header's length, before it


def of_file(path: Location, look: str) -> str:
    """Return the name of the layout of a file that looks like this (see `foreign.file_looks_like`); '' if none is."""
    name = path.name
    if name.endswith(".safetensors.index.json"):  # of Hugging Face's shards
        return SAFETENSORS if path.head()[:1] == b"{" else ""
    if look == foreign.SAFETENSORS:
        is_ours = name.endswith(".safetensors") or path.read(_LENGTH, foreign.FIRST_BYTES).startswith(_WRITTEN_HERE)
        return SAFETENSORS if is_ours else ""
    if look == foreign.STREAM:  # under a step's name it is none of Flax's checkpoints
        return "" if name.isdecimal() or steps.step_of(name, "checkpoint_") is not None else STREAM
    return NPZ if look == foreign.ZIP and name.endswith(".npz") else ""


def open_file(layout: str, path: Location) -> Reader:
    """Open a file of a layout."""
    if layout == STREAM:
        return formats.open_stream(path)
    from flax_ckpt_compat._discovery.layouts import npz, safetensors  # numpy, which look-ups do without

    return npz.NpzReader(path) if layout == NPZ else safetensors.SafetensorsReader(path)
