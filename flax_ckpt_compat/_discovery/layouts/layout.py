"""Define `ReadOnlyLayout`, what is known of a layout that another program writes, and what several readers share."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Set

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import CorruptCheckpointError, DepthError, IncompleteCheckpointError
from flax_ckpt_compat._core.local.presence import stays_inside
from flax_ckpt_compat._core.location import Location

JSON_ITEM = "metadata"
_MAX_INDEX = 100_000_000  # bytes, as of a header of safetensors
DECODE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOnlyLayout:
    """A layout that is read, and never written.

    No save evicts, counts or replaces it without need. Recognizing it decodes no more than a small JSON file, and
    imports neither numpy nor a backend.
    """

    name: str  # as `CheckpointView.format` says it
    open: Callable[[Location], Reader]  # opens what `is_file` accepts, or `in_folder` returns
    # Whether a file is one, by its name and by what its first bytes look like (see `foreign.file_looks_like`).
    is_file: Callable[[Location, str], bool] = lambda _, look: False  # noqa: ARG005
    # Name of an item → the file or folder to open, in a folder with these names; empty if that is something else. The
    # only item, or tree, is ''; the item `JSON_ITEM` is JSON.
    in_folder: Callable[[Location, Set[str]], Mapping[str, Location]] = lambda _, names: {}  # noqa: ARG005
    # Its folders are named like steps, and look-ups take it for one. All others are read by their own path alone, and
    # are something else than a checkpoint for look-ups.
    is_step: bool = False
    reads_msgpack: bool = True  # leaves are restored by the rules of msgpack files: numpy arrays, on the host


def damaged(
    file: Location, what: str, leaf: str | None = None, kind: type[CorruptCheckpointError] = CorruptCheckpointError
) -> CorruptCheckpointError:
    """Return the error for a file of another program that is damaged; ``what`` says how."""
    message = f"{file}: {what}; restore the file from a backup, or download it again"
    return kind(message, path=file.path, leaf=leaf)


def raise_for_unsupported(leaves: Iterable[LeafHandle]) -> None:
    """Raise the error that is the first of a locator of an unsupported leaf, if there is one."""
    for leaf in leaves:
        if leaf.kind is LeafKind.UNSUPPORTED:
            raise leaf.locator[0]


def is_step(name: str) -> bool:
    """Return whether a name is that of a step of Flax's checkpoints, by its default prefix, or of a manager.

    Files of other programs under such names are none of their checkpoints."""
    return name.isdecimal() or steps.step_of(name, "checkpoint_") is not None


def check_depth(file: Location, levels: int) -> None:
    """Raise DepthError for a key path that no restore can follow, before time is spent on its many names."""
    if levels > sys.getrecursionlimit():
        raise DepthError(
            f"{file}: a name of {levels} levels is nested too deeply for Python's recursion limit; raise the limit "
            "with sys.setrecursionlimit",
            path=file.path,
        )


def files_of(index: Location, suffix: str) -> list[Location]:
    """Return the files that an index of Hugging Face names, which end in a suffix; raise if one is missing."""
    try:
        names = sorted(set(json.loads(index.read(0, _MAX_INDEX))["weight_map"].values()))
        bad = [name for name in names if not name.endswith(suffix) or not stays_inside(name)]
    except DECODE_ERRORS as error:
        raise damaged(index, f"it is not an index of {suffix} files ({error!r:.200})") from error
    if bad:
        raise damaged(index, f"it names {bad[0]!r:.100}, which is not a {suffix} file beside it")
    files = [index.parent / name for name in names]
    if lost := [file.name for file in files if not file.isfile()]:
        raise IncompleteCheckpointError(
            f"{index}: {len(lost)} of {len(files)} shards are missing, such as {lost[0]}; copy them beside it, or "
            "download them again",
            path=index.path,
        )
    return files
