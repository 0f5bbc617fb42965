"""What happens in a restore, for every format: find, detect, match, read, place, rebuild."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from jax import monitoring

from flax_ckpt_compat import _detect, _listing, background, config, foreign, kinds, matching, placing, state
from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.backend import Format, LeafHandle, Reader
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingLeavesError,
    ShapeMismatchError,
    UnrecognizedFormatError,
)
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, map_leaves, show_path
from flax_ckpt_compat._routing import backend_for

_log = logging.getLogger("flax_ckpt_compat")


def restore(
    ckpt_dir: str,
    target: Any,
    step: Any,
    prefix: str,
    orbax_checkpointer: Any,
    orbax_transforms: Mapping[str, Any] | None,
) -> Any:
    """Restores a tree; see `flax_ckpt_compat.checkpoints.restore_checkpoint`.

    Args:
        ckpt_dir: normalised path.
    """
    monitoring.record_event("/jax/flax/checkpoint/restore")
    start = time.time()
    if orbax_transforms:
        raise CheckpointError(
            "orbax_transforms with entries are not supported by this version; pass {} to keep the target's own values "
            "for leaves that the checkpoint lacks."
        )
    where = _listing.place(ckpt_dir, prefix)
    for directory in {where.directory, os.path.dirname(os.path.abspath(ckpt_dir))}:
        foreign.settle(orbax_checkpointer, directory)
        background.raise_failures(directory)
    path = locate(ckpt_dir, step, prefix)
    if path is None:
        return target
    restored = _Restore(target, orbax_checkpointer, lenient=orbax_transforms is not None).checkpoint(path)
    monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", time.time() - start)
    return restored


def locate(ckpt_dir: str, step: Any, prefix: str) -> str | None:
    """The path of the checkpoint that a caller means, or None where there is nothing to restore.

    Raises:
        CheckpointNotFoundError: an explicit step that does not exist, or nothing at all and ``must_exist``.
    """
    where = _listing.place(ckpt_dir, prefix)
    root = os.path.abspath(ckpt_dir)
    if step is not None:
        return _step_path(root, where, steps.step_text(step))
    if not os.path.lexists(root):
        _nothing(f"{ckpt_dir} does not exist")
        return None
    if not os.path.isdir(root):
        return root
    # A stray file called "checkpoint" must not hide the checkpoints beside it, so those of the prefix go first
    # wherever the directory has no marker that only Orbax writes.
    if _detect.is_orbax_directory(root) and not _detect.is_doubtful(root):
        return root
    name = _listing.newest(where)
    if name is not None:
        return where.path(name)
    managed = _detect.step_directories(root, prefix)
    if managed:
        return managed[max(managed)]
    if _detect.is_orbax_directory(root):
        return root
    _nothing(f"{ckpt_dir} holds no checkpoint with the prefix {prefix!r}")
    return None


def _step_path(root: str, where: _listing.Place, text: str) -> str:
    path = where.path(where.prefix + text)
    if os.path.lexists(path):
        return path
    number = steps.parse_step(text)
    managed = _detect.step_directories(root, where.prefix) if os.path.isdir(root) else {}
    if number in managed:
        return managed[number]
    there = [name[len(where.prefix) :] for name in _listing.complete_steps(where)]
    there += [f"{step:g}" for step in sorted(managed)]
    known = f"the steps there are: {', '.join(there)}" if there else "there are no checkpoints of that prefix"
    raise CheckpointNotFoundError(f"Matching checkpoint not found: {path} ({known})", path=path)


def _nothing(why: str) -> None:
    if config.current().must_exist:
        raise CheckpointNotFoundError(f"nothing to restore: {why}")
    _log.warning("Nothing to restore: %s; the target is returned unchanged", why)


class _Restore:
    """One call of ``restore_checkpoint`` on a checkpoint that was found."""

    def __init__(self, target: Any, checkpointer: Any, *, lenient: bool):
        self._target, self._checkpointer, self._lenient = target, checkpointer, lenient
        self._settings = config.current()

    def checkpoint(self, path: str) -> Any:
        """Restores a checkpoint of one tree or several."""
        if self._checkpointer is not None and os.path.isdir(path):
            return self._through_checkpointer(path)
        found = _detect.detect(path)
        if found.unknown:
            _log.warning("%s: items of an unknown kind are left out: %s", path, ", ".join(found.unknown))
        if found.items.keys() == {""}:
            return self._item(found.items[""], self._target)
        if self._target is None and len(found.trees) != 1:
            return {name: self._item(item, None) for name, item in found.items.items()}
        if len(found.trees) > 1 and isinstance(self._target, Mapping) and self._target.keys() <= found.items.keys():
            return {name: self._item(found.items[name], part) for name, part in self._target.items()}
        return self._item(_main_item(found), self._target)

    def _item(self, item: _detect.Item, target: Any) -> Any:
        if item.format is None:
            return _read_json(item.path)
        with closing(_open(item)) as reader:
            return self._tree(reader.tree, target, reader, item.path)

    def _tree(self, stored: Node, target: Any, reader: Reader | foreign.Reader, path: str) -> Any:
        if target is None:
            lists = reader.format is Format.MSGPACK
            sources = map_leaves(lambda _, leaf: matching.Stored(leaf, None), stored)
            filled = _fill(sources, self._read(sources, reader), lists)
            as_stored = self._settings.structure == "stored"
            return placing.as_stored(filled) if as_stored else placing.as_state(filled, lists=lists)
        custom = state.nodes_with_own_rules(target)
        try:
            return self._into(target, stored, reader, path, custom)
        except CheckpointError:
            raise
        except Exception:  # rules of other people's types may fail in any way
            if not custom:
                raise
        # Those rules do not know this structure: leaf by leaf, so that what is missing is told or kept.
        return self._into(target, stored, reader, path, set())

    def _into(self, target: Any, stored: Node, reader: Reader | foreign.Reader, path: str, custom: set[Path]) -> Any:
        match = matching.match(
            stored, state.describe(target), lenient=self._lenient, takes_anything=custom.__contains__
        )
        self._judge(match, stored, path)
        lists = reader.format is Format.MSGPACK
        return state.rebuild(target, _fill(match.sources, self._read(match.sources, reader), lists))

    def _judge(self, match: matching.Match, stored: Node, path: str) -> None:
        """Applies the policies to what did not match."""
        if match.missing and not self._lenient and self._settings.missing_leaves != "keep":
            message = matching.explain_missing(match.missing, stored, path)
            if self._settings.missing_leaves == "error":
                raise MissingLeavesError(message, path=path, missing=tuple(show_path(leaf) for leaf in match.missing))
            _log.warning("%s\nThe target's own values were kept.", message)
        if match.shapes and self._settings.shape_mismatch != "ignore":
            lines = [f"{show_path(at)}: stored {was}, target {want}" for at, was, want in match.shapes]
            message = (
                f"{path}: shapes differ from the target's, the stored ones are returned: {matching.shorten(lines)}"
            )
            if self._settings.shape_mismatch == "error":
                raise ShapeMismatchError(message, path=path, leaf=show_path(match.shapes[0][0]))
            _log.warning(message)
        if match.unused:
            _log.info("%s: not in the target, dropped: %s", path, matching.shorten(map(show_path, match.unused)))

    def _read(self, sources: Any, reader: Reader | foreign.Reader) -> dict[int, Any]:
        """Id of a leaf handle → its value in final form, for every stored leaf among the sources."""
        wanted = [(handle, source.target) for source in _stored(sources) for handle in _handles(source.node)]
        if not wanted:
            return {}
        values = reader.read([handle for handle, _ in wanted])
        cast = self._settings.dtype == "target"
        placed = {}
        for index, (handle, target) in enumerate(wanted):
            on_device = reader.format is Format.ORBAX or handle.distributed
            value, settled = kinds.settle(values[index], handle, target)
            placed[id(handle)] = placing.place(value, settled, target, cast=cast, on_device=on_device)
            values[index] = value = None  # nothing but the result holds the bytes any longer
        return placed

    def _through_checkpointer(self, path: str) -> Any:
        try:
            item = _main_item(_detect.detect(path))
            with closing(_open(item)) as reader:
                return self._tree(
                    reader.tree, self._target, foreign.Reader(self._checkpointer, path, reader.tree), path
                )
        except UnrecognizedFormatError:
            tree = state.describe(foreign.restore_raw(self._checkpointer, path))
            return self._tree(tree, self._target, foreign.Reader(self._checkpointer, path, tree), path)


def _open(item: _detect.Item) -> Reader:
    assert item.format is not None
    try:
        return backend_for(item.format).open(item.path)
    except CorruptCheckpointError as error:
        look = _detect.looks_like(item.path) if item.format is Format.MSGPACK else None
        if look is None:
            raise
        raise UnrecognizedFormatError(
            f"{item.path} is not a checkpoint: it looks like {look}. Expected a msgpack file of Flax or an Orbax "
            "directory.",
            path=item.path,
        ) from error


def _main_item(found: _detect.Found) -> _detect.Item:
    trees = found.trees
    if len(trees) == 1:
        return next(iter(trees.values()))
    for name in _detect.USUAL_ITEMS:
        if name in trees:
            return trees[name]
    raise CheckpointError(
        f"{found.path} holds several trees ({', '.join(found.items)}) and the target is not a dict of them; restore "
        f"one by its own path, such as {os.path.join(found.path, next(iter(found.items)))}.",
        path=found.path,
    )


def _read_json(path: str) -> Any:
    import json

    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is not valid JSON: {error}", path=path) from error


def _stored(sources: Any) -> Iterator[matching.Stored]:
    if isinstance(sources, matching.Stored):
        yield sources
    children = sources.children if isinstance(sources, Branch) else sources
    if isinstance(children, dict):
        for child in children.values():
            yield from _stored(child)


def _handles(node: Node) -> Iterator[LeafHandle]:
    for _, leaf in iter_leaves(node):
        if isinstance(leaf, LeafHandle):
            yield leaf


def _fill(sources: Any, values: Mapping[int, Any], lists: bool) -> Any:
    """Sources → their values, in branches or nested dicts like those of the sources."""
    if isinstance(sources, dict):
        return {name: _fill(child, values, lists) for name, child in sources.items()}
    if isinstance(sources, Branch):
        return map_leaves(lambda _, source: _fill(source, values, lists), sources)
    if isinstance(sources, matching.Kept):
        return sources.value
    filled = map_leaves(lambda _, leaf: values[id(leaf)] if isinstance(leaf, LeafHandle) else leaf, sources.node)
    return placing.as_state(filled, lists=lists)
