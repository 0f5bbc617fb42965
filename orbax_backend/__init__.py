"""Read and write Orbax's on-disk format, as TensorStore writes it, without importing orbax."""

from __future__ import annotations

import os

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format, ProcessInfo, Reader
from flax_ckpt_compat._core.errors import CheckpointError, MissingPathError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.memory import pause_gc
from flax_ckpt_compat._core.tree import Node

from . import multiprocess, writer
from .open_index import holds_array, open_database
from .reader import OrbaxReader
from .save_plan import SavePlan, make_plan
from .tree_structure import OpenMsgpack

__all__ = ["OrbaxBackend"]


class OrbaxBackend:
    """Flat Orbax PyTree directories: what `orbax.checkpoint.PyTreeCheckpointer` writes."""

    format = Format.ORBAX
    uses_gda_folder = False

    def __init__(self, open_msgpack: OpenMsgpack) -> None:
        """Store the opener for the msgpack file of old releases."""
        self._open_msgpack = open_msgpack

    def prepare(self, tree: Node, process: ProcessInfo | None = None) -> SavePlan:
        """Plan how each leaf is stored; see `flax_ckpt_compat._core.backend.Backend.prepare`."""
        return make_plan(tree, multiprocess=process is not None and process.count > 1)

    write = staticmethod(writer.write)
    begin_multiprocess = staticmethod(multiprocess.begin)
    write_process_part = staticmethod(multiprocess.write)
    finish_multiprocess = staticmethod(multiprocess.finish)

    def open(self, location: Location, *, verify: bool = False) -> Reader:
        """Open a directory of any Orbax release; read the structure, and small arrays inline in its database."""
        listed = location.listed()
        try:
            with pause_gc(enabled=not location.is_remote):
                return OrbaxReader(listed, self._open_msgpack, verify=verify)
        finally:
            listed.forget_contents()

    def missing_file(self, location: Location) -> str | None:
        """Return a file that a directory with an array database needs and lacks; None if it does not decode."""
        try:
            if not any((location / name).isfile() for name in (layout.TREE_METADATA, layout.MSGPACK_FILE)):
                return None if holds_array(location) else layout.TREE_METADATA
            files = open_database(location).ends()
        except CheckpointError as error:
            lost = os.path.relpath(str(error.path), location.path)
            return lost if isinstance(error.__cause__, MissingPathError) else None
        return next((file for file in files if not (location / file).isfile()), None)
