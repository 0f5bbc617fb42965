"""What happens in a save, for every format: checks, snapshot, write, atomic commit, clean-up."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import jax
import numpy as np
from jax import monitoring

from flax_ckpt_compat import _listing, background, config, foreign, retention, state
from flax_ckpt_compat._core import files, steps
from flax_ckpt_compat._core.backend import Backend, Format, WriteOptions
from flax_ckpt_compat._core.errors import CheckpointError, StepError, UnsupportedLeafError
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Node, Path, Shard, box_of, map_leaves, show_path
from flax_ckpt_compat._listing import Place
from flax_ckpt_compat._routing import backend_for
from flax_ckpt_compat.errors import MPACheckpointingRequiredError

_last_saved = time.time()


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One save after its arguments were checked.

    Attributes:
        where: directory and prefix.
        name: of the checkpoint.
        step: as the caller gave it, for messages; None for a checkpoint that is no step of a directory.
        overwrite: replace what has that name.
        keep: how many to keep; 0 keeps all.
        careful: replace nothing but checkpoints, and remove none that are newer.
        format: what to write.
        sort_keys: write the maps of a msgpack file sorted.
        start: of the call, in seconds since the epoch.
    """

    where: Place
    name: str
    step: Any
    overwrite: bool
    keep: int
    keep_every_n_steps: float | None
    careful: bool
    format: Format
    sort_keys: bool
    start: float

    @property
    def path(self) -> str:
        """Absolute final path."""
        return self.where.path(self.name)

    def check(self) -> None:
        """Refuses what ``overwrite`` does not allow."""
        if self.careful:
            retention.check_replaceable(self.where, self.name, self.step, overwrite=self.overwrite)
        if self.step is not None and not self.overwrite:
            retention.check_overwrite(self.where, self.name, self.step, removes_newer=not self.careful)

    def check_again(self) -> None:
        """Refuses to replace what came into this place during a careful save."""
        if self.careful:
            retention.check_replaceable(self.where, self.name, self.step, overwrite=self.overwrite)

    def clean_up(self) -> None:
        """What overwrite and retention remove, after the commit."""
        if self.step is not None:
            newer = self.overwrite and not self.careful
            retention.clean_up(self.where, self.name, self.keep, self.overwrite, self.keep_every_n_steps, newer)


def save(
    ckpt_dir: str,
    target: Any,
    step: Any,
    prefix: str,
    keep: Any,
    overwrite: bool,
    keep_every_n_steps: float | None,
    async_manager: Any,
    orbax_checkpointer: Any,
    *,
    sort_keys: bool = False,
    careful: bool = False,
    format: Format | None = None,
) -> str:
    """Saves a tree as one step of a directory; see `flax_ckpt_compat.checkpoints.save_checkpoint`.

    Args:
        ckpt_dir: normalised directory.
        sort_keys: write the maps of a msgpack file sorted, as Flax does in ``save_checkpoint_multiprocess``.
        careful: replace nothing but checkpoints, and remove none that are newer.
        format: None writes what Flax's flag says.

    Returns:
        The checkpoint's path in the caller's form.
    """
    start = _begin(async_manager)
    text, where = steps.step_text(step), _place(ckpt_dir, prefix)
    name = steps.check_name(where.prefix + text)
    kept, every = steps.check_keep(keep), steps.check_every(keep_every_n_steps)
    request = Request(
        where, name, step, bool(overwrite), kept, every, careful, format or _flags_format(), sort_keys, start
    )
    _carry_out(request, target, async_manager, orbax_checkpointer)
    return os.path.join(ckpt_dir, f"{prefix}{text}")


def save_at(path: str, target: Any, overwrite: bool, async_manager: Any, format: Format) -> str:
    """Saves a tree at exactly this path, and looks at no other checkpoint; see `flax_ckpt_compat.save`.

    Args:
        path: normalised path.

    Returns:
        The path.
    """
    start = _begin(async_manager)
    directory, name = os.path.split(path)
    if name in ("", os.curdir, os.pardir):
        raise StepError(f"{path!r} names no file or directory to write a checkpoint to; give it a name, or pass step=")
    _place(path, "")  # refuses a URL, of which the directory alone may not look like one
    where = _place(directory, "")
    request = Request(where, steps.check_name(name), None, overwrite, 0, None, True, format, False, start)
    _carry_out(request, target, async_manager, None)
    return path


def _begin(async_manager: Any) -> float:
    """When the save began, which it does once the manager's previous one has ended."""
    monitoring.record_event("/jax/flax/checkpoint/save")
    start = time.time()
    if async_manager:
        background.wait(async_manager)
    return start


def _flags_format() -> Format:
    return Format.ORBAX if config.use_orbax_format() else Format.MSGPACK


def _place(ckpt_dir: str, prefix: str) -> Place:
    if "\0" in prefix or "\0" in ckpt_dir:
        raise StepError("a directory or prefix cannot contain the NUL character")
    return _listing.place(ckpt_dir, prefix)


def _carry_out(request: Request, target: Any, async_manager: Any, orbax_checkpointer: Any) -> None:
    foreign.settle(orbax_checkpointer, request.where.directory)
    background.settle(request.where.directory)
    request.check()
    if orbax_checkpointer:
        _prepare_directory(request.where)
        foreign.save(orbax_checkpointer, request.path, target, on_commit=lambda: _committed(request))
    else:
        _save_ourselves(request, target, async_manager)
    monitoring.record_event_duration_secs("/jax/checkpoint/write/durations_sec", time.time() - request.start)


def _save_ourselves(request: Request, target: Any, async_manager: Any) -> None:
    backend = backend_for(request.format)
    tree = state.describe(target)
    tree = map_leaves(lambda path, leaf: _host_local(path, leaf, request), tree)
    in_order = request.sort_keys and backend.format is Format.MSGPACK
    tree = state.take_keys_apart(_sorted(tree) if in_order else tree)
    prepared = backend.prepare(map_leaves(lambda _, leaf: _frozen(leaf), tree) if async_manager else tree)
    options = WriteOptions(compression=config.current().compression)

    def task() -> None:
        _write_and_commit(request, backend, prepared, options)

    if async_manager:
        background.start(async_manager, request.where.directory, task)
    else:
        task()


def _write_and_commit(request: Request, backend: Backend, prepared: Any, options: WriteOptions) -> None:
    if backend.format is Format.MSGPACK:
        monitoring.record_event("/jax/flax/checkpoint/save_main_ckpt_task")
    _prepare_directory(request.where)
    temporary = files.temporary_path(request.path)
    try:
        # Saving is an explicit request to move data to the host, also under jax.transfer_guard("disallow").
        with files.translated(request.path), jax.transfer_guard_device_to_host("allow"):
            backend.write(temporary, prepared, options)
        request.check_again()
        files.publish(temporary, request.path)
    except BaseException:
        _forget(temporary)
        raise
    _committed(request)


def _prepare_directory(where: Place) -> None:
    files.make_directory(where.directory)
    files.reclaim(where.directory)


def _committed(request: Request) -> None:
    global _last_saved
    request.clean_up()
    monitoring.record_event_duration_secs(
        "/jax/checkpoint/write/duration_since_last_checkpoint_secs", request.start - _last_saved
    )
    _last_saved = request.start


def _forget(temporary: str) -> None:
    """Removes what a failed save wrote; the failure itself is what the caller has to hear about."""
    try:
        if os.path.lexists(temporary):
            files.discard(temporary)
    except CheckpointError:
        pass  # a later save reclaims it


def _host_local(path: Path, leaf: Any, request: Request) -> Any:
    """The leaf, checked to be wholly readable from this process."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise UnsupportedLeafError(f"{show_path(path)} is abstract (a ShapeDtypeStruct) and has no values to save")
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedLeafError(
            f"{show_path(path)} has no value yet (a Tracer): save_checkpoint was called inside of jit or another "
            "transformation; return the state from it, and save outside of it",
            leaf=show_path(path),
        )
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.is_deleted():
        raise UnsupportedLeafError(
            f"{show_path(path)} was deleted, most likely donated to a jitted function; save before that call"
        )
    if leaf.is_fully_addressable:
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    what = "" if request.step is None else f"step {request.step} "
    raise MPACheckpointingRequiredError(
        f"cannot save {what}to {request.path}: {show_path(path)} is spread over several processes and "
        "this one sees only a part of it; use save_checkpoint_multiprocess, called by all processes.",
        path=request.path,
        step=request.step,
        leaf=show_path(path),
    )


def _frozen(leaf: Any) -> Any:
    """The leaf's values as they are now, whatever is mutated or donated later."""
    if isinstance(leaf, KeyData):
        return KeyData(leaf.impl, _frozen(leaf.data))
    if isinstance(leaf, jax.Array):
        return _host_copy(leaf)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _host_copy(array: jax.Array) -> HostCopy:
    if array.is_fully_replicated:
        return HostCopy.whole(np.array(array.addressable_data(0), order="C"), array.sharding)
    array.copy_to_host_async()
    # Replicas hold the same values, so one of them is enough.
    shards = tuple(
        Shard(box_of(shard.index, array.shape), np.array(shard.data, order="C"))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    )
    return HostCopy(array.shape, array.dtype, shards, array.sharding)


def _sorted(tree: Node) -> Node:
    """The tree with all names sorted as text; '10' before '2' in lists too, as Flax 0.12.8 writes them (measured)."""
    if not isinstance(tree, Branch):
        return tree
    return Branch({name: _sorted(tree.children[name]) for name in sorted(tree.children)}, int_keys=tree.int_keys)
