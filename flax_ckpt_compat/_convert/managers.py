"""Copy what belongs to a CheckpointManager's directory as a whole: its root metadata."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flax_ckpt_compat._convert.jobs import Job
from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.local.syncing import write_file
from flax_ckpt_compat._core.storage_errors import translated

_FOLDER, _FILE = "metadata", "_ROOT_METADATA"  # as Orbax 0.12.8 names them (measured)


def copy_root_metadata(jobs: Sequence[Job]) -> None:
    """Copy the metadata of the managers that these steps are of, where there is none yet."""
    for source, folder in {(os.path.dirname(job.source), os.path.dirname(job.destination)) for job in jobs}:
        found = os.path.join(source, _FOLDER, _FILE)
        final = os.path.join(folder, _FOLDER, _FILE)
        if not paths.isfile(found) or paths.lexists(final):
            continue
        paths.prepare_directory(os.path.dirname(final))
        temporary = paths.storage_of(final).temporary_path(final)
        with translated(final, "written"):
            write_file(temporary, paths.read(found))
        paths.publish(temporary, final, new=True)
