"""What happens in a restore, for every format: find, detect, match, read, place, rebuild."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from jax import monitoring

from flax_ckpt_compat import _detect, _listing, background, config, foreign, matching, opening, placing, state
from flax_ckpt_compat._core.backend import Format, LeafHandle, Reader
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    MissingLeavesError,
    ShapeMismatchError,
    UnrecognizedFormatError,
)
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, map_leaves, show_path

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
    settle(ckpt_dir, prefix, orbax_checkpointer)
    path = opening.locate(ckpt_dir, step, prefix)
    if path is None:
        return target
    restored = _Restore(target, orbax_checkpointer, lenient=orbax_transforms is not None).checkpoint(path)
    monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", time.time() - start)
    return restored


def settle(ckpt_dir: str, prefix: str, orbax_checkpointer: Any = None) -> None:
    """Waits for background saves of real Orbax to where a restore will look, and raises what ours failed with."""
    where = _listing.place(ckpt_dir, prefix)
    for directory in {where.directory, os.path.dirname(os.path.abspath(ckpt_dir))}:
        foreign.settle(orbax_checkpointer, directory)
        background.raise_failures(directory)


def read_state(opened: opening.Opened, chosen: Mapping[str, Node]) -> Any:
    """What a restore without a target gives.

    Args:
        chosen: item name → its tree of leaf handles, or a part of it.
    """
    restore = _Restore(None, None, lenient=False)
    values = {name: restore.item(opened, name, None, node) for name, node in chosen.items()}
    return values if opened.is_mapping else next(iter(values.values()))


class _Restore:
    """One call of ``restore_checkpoint`` on a checkpoint that was found."""

    def __init__(self, target: Any, checkpointer: Any, *, lenient: bool):
        self._target, self._checkpointer, self._lenient = target, checkpointer, lenient
        self._settings = config.current()

    def checkpoint(self, path: str) -> Any:
        """Restores a checkpoint of one tree or several."""
        if self._checkpointer is not None and os.path.isdir(path):
            return self._through_checkpointer(path)
        with closing(opening.Opened(path)) as opened:
            if self._target is None:
                return read_state(opened, {name: opened.reader(name).tree for name in opened.parts})
            is_mapping = len(opened.trees) > 1 and isinstance(self._target, Mapping)
            if is_mapping and self._target.keys() <= opened.items.keys():
                return {name: self.item(opened, name, part) for name, part in self._target.items()}
            return self.item(opened, "" if "" in opened.items else _main_item(opened), self._target)

    def item(self, opened: opening.Opened, name: str, target: Any, part: Node | None = None) -> Any:
        """Restores one item, or a part of its tree."""
        reader = opened.reader(name)
        # A target says nothing about a JSON item, which is restored as it is.
        target = target if name in opened.trees else None
        return self._tree(reader.tree if part is None else part, target, reader, opened.items[name].path)

    def _tree(self, stored: Node, target: Any, reader: Reader | foreign.Reader, path: str) -> Any:
        if target is None:
            lists = opening.gives_lists(reader)
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
        lists = opening.gives_lists(reader)
        return state.rebuild(target, _fill(match.sources, self._read(match.sources, reader), lists))

    def _judge(self, match: matching.Match, stored: Node, path: str) -> None:
        """Applies the policies to what did not match."""
        if match.missing and not self._lenient and self._settings.missing_leaves != "keep":
            message = matching.explain_missing(match, stored, path)
            if self._settings.missing_leaves == "error":
                raise MissingLeavesError(message, path=path, missing=tuple(show_path(leaf) for leaf in match.missing))
            _log.warning("%s\nThe target's own values were kept.", message)
        if match.shapes and self._settings.shape_mismatch != "ignore":
            refused = self._settings.shape_mismatch == "error"
            message = matching.explain_shapes(match, path, refused=refused)
            if refused:
                raise ShapeMismatchError(message, path=path, leaf=show_path(match.shapes[0][0]))
            _log.warning(message)
        if match.unused:
            _log.info("%s: not in the target, dropped: %s", path, matching.shorten(map(show_path, match.unused)))

    def _read(self, sources: Any, reader: Reader | foreign.Reader) -> dict[int, Any]:
        """Id of a leaf handle → its value in final form, for every stored leaf among the sources."""
        cast = self._settings.dtype == "target"
        wishes = [
            placing.Wish(handle, source.target, cast, reader.format is Format.ORBAX or handle.distributed)
            for source in _stored(sources)
            for handle in _handles(source.node)
        ]
        if not wishes:
            return {}
        narrowed = [] if cast else [text for wish in wishes if (text := wish.narrowed) is not None]
        if narrowed:
            _log.warning(
                "%s: cast to what the abstract target says, which cannot hold every value that was saved: %s",
                reader.path,
                matching.shorten(narrowed),
            )
        values = reader.read([one for wish in wishes for one in wish.asked])
        values.reverse()
        # Popped, so that nothing but the result holds the bytes any longer.
        return {id(wish.handle): wish.grant([values.pop() for _ in wish.asked]) for wish in wishes}

    def _through_checkpointer(self, path: str) -> Any:
        try:
            with closing(opening.Opened(path)) as opened:
                reader = opened.reader(_main_item(opened))
                return self._tree(
                    reader.tree, self._target, foreign.Reader(self._checkpointer, path, reader.tree), path
                )
        except UnrecognizedFormatError:
            tree = state.describe(foreign.restore_raw(self._checkpointer, path))
            return self._tree(tree, self._target, foreign.Reader(self._checkpointer, path, tree), path)


def _main_item(opened: opening.Opened) -> str:
    if len(opened.trees) == 1:
        return next(iter(opened.trees))
    for name in _detect.USUAL_ITEMS:
        if name in opened.trees:
            return name
    raise CheckpointError(
        f"{opened.path} holds several trees ({', '.join(opened.items)}) and the target is not a dict of them; restore "
        f"one by its own path, such as {os.path.join(opened.path, next(iter(opened.items)))}.",
        path=opened.path,
    )


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
