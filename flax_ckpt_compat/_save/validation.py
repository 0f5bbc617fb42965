"""Check what a save may replace, before it starts and again when it is published; alike for every format."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable

import jax

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import CheckpointError, StorageError, translated
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.storage import Listing
from flax_ckpt_compat._discovery import contents, opening, orbax_directory, saved_steps, steps
from flax_ckpt_compat._discovery.contents import State
from flax_ckpt_compat._save import retention
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat.errors import InvalidCheckpointError

# Names of files and folders in checkpoints of Orbax's releases, other than those of items and of single arrays: with
# the metadata of one at its root, a folder is a store of zarr arrays of others, whatever lies in it.
_ORBAX_NAMES = {
    *layout.TREE_FILES, *layout.STEP_FILES, *layout.JSON_FILES, layout.ARRAY_METADATAS, layout.DATA_DIRECTORY,
    layout.JAX_KEY, layout.NUMPY_KEY,
}.difference(layout.ARRAY_METADATA_FILES)  # fmt: skip
_SHOWN = 4  # checkpoints that an error names


def check(request: SaveRequest) -> Listing | None:
    """Raise unless the save may write, and ``overwrite`` allows what it replaces; return a store's listing, if any."""
    if why := request.location.why_too_long():
        message = f"cannot save to {request.path}: {why}; shorten the directory, the prefix or the step"
        raise StorageError(message, path=request.path, errno=errno.ENAMETOOLONG)
    listed = dataclasses.replace(request, checkpoint_dir=request.checkpoint_dir.listed())
    _check_directory(listed)
    _check_replaced(listed)
    if request.step is not None and not request.overwrite:
        _check_overwrite(listed)
    if request.orbax_checkpointer and request.location.is_remote:
        message = "an orbax_checkpointer cannot save to an object store; leave it out: the format is the same"
        raise StorageError(f"{request.path}: {message}", path=request.path)
    return listed.directory.listing


def publish(request: SaveRequest, rename: Callable[[Location, bool], None]) -> None:
    """Check again what other writers put there during the save, and give the checkpoint its final name.

    ``rename`` does so; where its second argument is True, it refuses to replace what another writer saved meanwhile."""
    if request.replace_only_checkpoints or not request.location.is_remote:  # in a store, this would be one more request
        request = dataclasses.replace(request, checkpoint_dir=request.checkpoint_dir.listed())
        _check_replaced(request)
    try:
        rename(request.location, not request.overwrite)
    except StorageError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            check(request)  # raises an error that names what is there
        raise


def _invalid(request: SaveRequest, message: str) -> InvalidCheckpointError:
    if jax.process_count() > 1 and not request.multiprocess:  # most often, they all called it
        what = f"Each of the {jax.process_count()} processes of this job that calls save_checkpoint saves for itself"
        message += f" {what}: call it in process 0 only, or save_checkpoint_multiprocess in all."
    return InvalidCheckpointError(message, path=request.path)


def _check_directory(request: SaveRequest) -> None:
    """Raise if the directory is, or is inside, a checkpoint; a file in its place raises later."""
    directory = request.directory
    is_step = steps.step_of(directory.name, request.checkpoint_dir.prefix) is not None
    if (is_step and directory.isfile()) or contents.is_certainly_orbax(directory):
        message = f"{directory} is itself a checkpoint; pass the directory that holds it, {directory.parent}"
        raise _invalid(request, f"{request.refusal}: {message}")
    if why := contents.why_inside(directory):
        raise _invalid(request, f"{request.refusal}: {why}")


def _check_replaced(request: SaveRequest) -> None:
    """Raise if something is there that may not be replaced: anything but a checkpoint, be it an incomplete one.

    With ``replace_only_checkpoints``, a save replaces only what is exactly one whole checkpoint."""
    path, strict = request.location, request.replace_only_checkpoints
    if strict and (not path.exists() or path.holds_nothing()):
        return
    if reason := _reason_against(request, path):
        hint = ", pass step= to save into this directory" if strict and request.step is None and path.isdir() else ""
        remedy = f"save under another name{hint}, or remove it yourself"
        raise _invalid(request, f"{request.refusal}: {reason}, and only checkpoints are replaced; {remedy}.")
    if strict and not request.overwrite and path.unlisted().exists():
        raise _invalid(request, f"{request.refusal}: it exists; pass overwrite=True to replace it.")


def _reason_against(request: SaveRequest, path: Location) -> str | None:
    """Return why a path may not be replaced, looked for again while other writers replace what is there."""
    for _ in range(saved_steps.ROUNDS):
        before = path.identity()
        try:
            reason = _why_not_replaced(request, path) if path.exists() else None
            if reason is None or path.identity() == before:
                is_gone = reason is not None and path.is_remote and not path.unlisted().exists()
                return None if is_gone else reason
        except OSError as error:  # such as IsADirectoryError, where a directory has taken the place of a file
            is_stale = path.is_remote and error.errno == errno.ESTALE  # in a store, this tells, and no identity
            if path.identity() == before and not is_stale:
                with translated(path.path):
                    raise
            path = path.unlisted()
    return "other writers keep replacing it"


def _why_not_replaced(request: SaveRequest, path: Location) -> str | None:
    """Return why a save does not replace what is there, or None."""
    strict = request.replace_only_checkpoints
    if strict and path.isdir():
        if not contents.is_certainly_orbax(path):
            return "nothing in that directory marks it as one checkpoint"
        extra = _extra_files(path)
        return f"it holds {', '.join(extra[:3])} besides a checkpoint" if extra else None
    found = contents.contents_of(path)
    if found.state is State.FOREIGN:
        return f"it is not a checkpoint of Flax or Orbax, but looks like {found.why}"
    if strict:
        try:
            opening.open_item(orbax_directory.Item(Format.MSGPACK, path)).close()
        except StorageError:  # it tells nothing of what is there
            raise
        except CheckpointError as error:
            return f"it does not open as a checkpoint ({error})"
        return None
    may_go = found.may_be_removed(with_items=request.orbax_checkpointer is not None)
    if found.is_complete and not may_go and found.layout is not None:
        return f"it is not certainly one checkpoint of Flax or Orbax (it looks like {found.layout.value})"
    return None


def _extra_files(path: Location) -> list[str]:
    """Return the names in an Orbax checkpoint that are not part of it."""
    items, extra = dict[str, orbax_directory.Item](), list[str]()
    try:
        items.update(contents.checkpoint_at(path).items)
    except CheckpointError as error:
        if isinstance(error, StorageError):
            raise
    for name in sorted(path.listdir()):
        if name in _ORBAX_NAMES or layout.is_upload_marker(name) or name.startswith(layout.PROCESS_PREFIX):
            continue
        if name in items and (path / name).isdir():
            extra += [os.path.join(name, inner) for inner in _extra_files(path / name)]
        elif not orbax_directory.is_array(path / name):
            extra.append(name)
    return extra


def _check_overwrite(request: SaveRequest) -> None:
    """Raise, for a save without ``overwrite``, if its step exists or is older than the newest."""
    path, checkpoint_dir = request.location, request.checkpoint_dir
    if path.exists() and not path.holds_nothing():
        found = contents.contents_of(path)
        why = "already exists;" if found.is_complete else f"is {found.state.value} ({found.why}); save another step, or"
        raise _invalid(request, f"cannot save step {request.step}: {path} {why} pass overwrite=True to replace it.")
    if (step := request.number) is None:
        return
    last = saved_steps.newest_step(checkpoint_dir, step, but=retention.saved_by_other_prefixes(checkpoint_dir))
    if last is not None:
        state = "is newer" if request.is_newer(last) else "is the same step"
        removed = "" if request.replace_only_checkpoints else _removed(request)
        message = f"{checkpoint_dir.directory / last} {state}; pass overwrite=True to save it anyway{removed}."
        raise _invalid(request, f"cannot save step {request.step}: {message}")


def _removed(request: SaveRequest) -> str:
    """Return the end of a sentence: which checkpoints ``overwrite`` removes."""
    checkpoint_dir, prefix, number = request.checkpoint_dir, request.checkpoint_dir.prefix, request.number or 0
    others = retention.saved_by_other_prefixes(checkpoint_dir)
    names = [name for name in steps.in_order(saved_steps.all_names(checkpoint_dir), prefix) if name not in others]
    newer = [name for name in names if (steps.step_of(name, prefix) or 0) >= number]
    found = saved_steps.counted_steps(checkpoint_dir, newer[:_SHOWN], with_items=request.orbax_checkpointer is not None)
    shown = [name for name, may_go in found.items() if may_go]
    shown += [f"newer ones up to {newer[-1]}"] if len(newer) > _SHOWN else []
    return f" and to remove {', '.join(shown)}" if shown else ""
