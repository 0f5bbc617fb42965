"""Write an output in its layout, and compare what was written with its source, bit by bit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import zip_longest
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._convert import safetensors
from flax_ckpt_compat._convert.jobs import FILES, Job
from flax_ckpt_compat._convert.plan_output import Output, files_below
from flax_ckpt_compat._convert.stored_trees import to_write
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import CheckpointError, UnsupportedLeafError, translated
from flax_ckpt_compat._core.local.syncing import sync_tree, write_file
from flax_ckpt_compat._core.local.temporaries import create_directory
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._save.request import write_options
from flax_ckpt_compat._view import diff, metadata

# Takes numbers of bytes that were written, or compared.
Progress = Callable[[int], None]
_PIECE = 8 << 20  # bytes
_ROOT_METADATA = "metadata/_ROOT_METADATA"  # beside the steps of a manager; of Orbax 0.12.8 (measured)
_WORDS = {"only in a": "is missing", "only in b": "is new", "values": "has other values"}


class DifferentError(CheckpointError):
    """A result does not hold what its source holds."""


def prepare(output: Output, progress: Progress, *, keep_shardings: bool) -> Any:
    """Validate that the layout can hold an output, and plan its storage; return the argument of `write`."""
    for item in output.handlers if output.has_items else ():
        if item in (os.curdir, os.pardir) or not item or "/" in item or "\0" in item:
            raise UnsupportedLeafError(f"{item!r} cannot be the name of an item, a directory of the step; rename it")
    trees = to_write(output.trees, progress, keep_shardings=keep_shardings)
    return {item: (tree, _writer(output).prepare(tree)) for item, tree in trees.items()}


def _writer(output: Output) -> Any:
    if output.to == "safetensors":
        return safetensors
    return backend_for(Format.MSGPACK if output.to == "msgpack" else Format.ORBAX)


def write(temporary: str, output: Output, prepared: Any, destination: Location) -> None:
    """Write and sync a checkpoint at a temporary path."""
    final, options = destination.path, write_options(config.current(), destination)
    if "" not in prepared:  # else the writer creates it
        with translated(final, "written"):
            create_directory(temporary)
    for item, (_, plan) in prepared.items():
        with translated(final, "saved", temporary=temporary):
            _writer(output).write(os.path.join(temporary, item) if item else temporary, plan, options)
    if output.to not in FILES:
        with translated(final, "written"):
            _write_rest(temporary, output)


def _write_rest(folder: str, output: Output) -> None:
    """Add what is no tree: files, and the metadata of trees and of the whole."""
    for name, source in output.files.items():
        path = os.path.join(folder, name)
        os.makedirs(path if source is None else os.path.dirname(path), exist_ok=True)
        if source is not None:
            with open(path, "xb") as file:
                file.writelines(_pieces(source))
    for item in output.custom_of_trees.keys() | output.rich_types.keys():
        path = os.path.join(folder, item, layout.TREE_METADATA)
        content = json.loads(Location(path).read())
        content["custom_metadata"] = {**output.custom_of_trees.get(item, {}), **(content.get("custom_metadata") or {})}
        if item in output.rich_types:
            content["value_metadata_tree"] = output.rich_types[item]
        write_file(path, json.dumps(content).encode(), new=False)
    if output.custom or "" not in output.trees:
        own = metadata.json_of(Location(folder) / layout.STEP_METADATA)  # of a tree that is the whole
        handlers = {item: handler for item, handler in output.handlers.items() if handler}
        now = time.time_ns()
        content = {
            "item_handlers": handlers if output.has_items else handlers.get("", {}),
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            **own,
            "custom_metadata": output.custom,
        }
        write_file(os.path.join(folder, layout.STEP_METADATA), json.dumps(content).encode(), new=False)
    if output.has_items:
        for item in output.trees:  # it is that of the step now
            os.unlink(os.path.join(folder, item, layout.STEP_METADATA))
        write_file(os.path.join(folder, layout.COMMIT_FILE), layout.COMMITTED)
    sync_tree(folder)


def compare(location: Location, output: Output, progress: Progress, final: Location) -> None:
    """Raise DifferentError about ``final`` unless a checkpoint holds this output; ``progress`` takes bytes compared."""
    opaque = output.handlers.keys() - output.trees.keys() - output.copied.keys()
    with closing(Opened(location, verify=False, warns=False, allows_unknown=True)) as opened:
        trees = {name: opened.reader(name).tree for name in opened.trees if name not in opaque}
        a, b = (metadata.StoredLeaves(location.path, output.to) for _ in range(2))
        for leaves, stored in (a, {**output.trees, **output.copied}), (b, trees):
            for name, tree in stored.items():
                leaves.add(tree, (name,) if name else ())
            # What else an empty node was, not every format keeps.
            leaves.empty = {path: what if what == "None" else "{}" for path, what in leaves.empty.items()}
        found = diff.compare(a, b, None, lambda _: progress).differences
        differences = [f"{one.path} {_WORDS.get(one.kind) or f'is {one.b}, expected {one.a}'}" for one in found]
    differences += _different_files(location, output)
    if output.to not in FILES and _has_other_metadata(location, output):
        differences.append("custom metadata is other JSON")
    if differences:
        raise DifferentError(
            f"{final} does not hold what its source holds: {one_line(differences)}; the source may have been "
            "replaced meanwhile: convert it again, to another place",
            path=final.path,
        )


def _different_files(location: Location, output: Output) -> Iterator[str]:
    for name, content in output.files.items():
        copied = location / name
        if content is None:
            if not location.is_remote and not copied.isdir():  # stores have no folders
                yield f"{name}/ is missing"
        elif not copied.isfile():
            yield f"{name} is missing"
        elif any(one != other for one, other in zip_longest(_pieces(content), _pieces(copied))):
            yield f"{name} has other bytes"
    for item in output.handlers.keys() - output.trees.keys():  # a user's handler may read whatever is there
        folder = location / item if item else location
        for name, _ in files_below(folder, f"{item}/" if item else "") if folder.isdir() else ():
            if name not in output.files and (item or name not in layout.STEP_FILES):
                yield f"{name} is not in the source"


def _pieces(content: Location | bytes) -> Iterator[bytes]:
    size = len(content) if isinstance(content, bytes) else content.size()
    for start in range(0, size, _PIECE):
        stop = min(size, start + _PIECE)
        yield content[start:stop] if isinstance(content, bytes) else content.read(start, stop)


def _has_other_metadata(location: Location, output: Output) -> bool:
    """Return whether a written checkpoint holds other custom metadata; compared as JSON, where NaN equals NaN."""
    trees = {item: metadata.json_of(location / item / layout.TREE_METADATA) for item in output.trees}
    found = {item: metadata.custom_of(tree) for item, tree in trees.items()}
    wanted = {item: output.custom_of_trees.get(item, {}) for item in output.trees}
    own = metadata.json_of(location / layout.STEP_METADATA).get("custom_metadata") or {}
    return json.dumps([found, own], sort_keys=True) != json.dumps([wanted, output.custom], sort_keys=True)


def copy_root_metadata(jobs: Iterable[Job]) -> None:
    """Copy the root metadata of the managers that these steps are of, where there is none yet."""
    for source, folder in {(os.path.dirname(job.source), os.path.dirname(job.destination)) for job in jobs}:
        found, final = (location_of(one) / _ROOT_METADATA for one in (source, folder))
        if found.isfile() and not final.exists():
            final.parent.prepare_directory()
            with final.temporary() as temporary:
                with translated(final.path, "written"):
                    write_file(temporary, found.read())
                final.publish(temporary, new=True)
