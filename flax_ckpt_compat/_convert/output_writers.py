"""Write contents in a layout, and read them again to compare."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._convert import safetensors
from flax_ckpt_compat._convert.jobs import TO_STEPS, Job
from flax_ckpt_compat._convert.output_trees import Contents
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import StorageError, UnsupportedLeafError
from flax_ckpt_compat._core.local.syncing import sync_directory, write_file
from flax_ckpt_compat._core.location import LOCAL, Location, of_text
from flax_ckpt_compat._core.storage_errors import translated, writing
from flax_ckpt_compat._core.tree import Path, iter_leaves
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._save.request import write_options
from flax_ckpt_compat._view import metadata

_FILES = ("msgpack", "safetensors")  # layouts of one file
_HANDLERS = "orbax.checkpoint._src.handlers."
_V1 = "orbax.checkpoint.experimental.v1._src.handlers."
# What Orbax 0.12.8 writes (measured): layout → handler of trees, handler of JSON.
_HANDLER_NAMES = {
    "manager": (
        f"{_HANDLERS}standard_checkpoint_handler.StandardCheckpointHandler",
        f"{_HANDLERS}json_checkpoint_handler.JsonCheckpointHandler",
    ),
    "v1": (f"{_V1}pytree_handler.PyTreeHandler", f"{_V1}json_handler.MetricsHandler"),
}


def check(contents: Contents, to: str) -> Any:
    """Validate that a layout can hold the contents, and plan their storage; return the argument of `write`."""
    if not contents.trees:
        raise UnsupportedLeafError("it holds only JSON, and no tree of arrays to convert; copy it instead")
    for item in contents.trees if to in TO_STEPS else ():
        if item in (os.curdir, os.pardir) or not item or "/" in item or "\0" in item:
            raise UnsupportedLeafError(f"{item!r} cannot be the name of an item, a directory of the step; rename it")
    if to == "safetensors":
        safetensors.check(contents.trees[""])
        return contents.trees
    backend = backend_for(Format.MSGPACK if to == "msgpack" else Format.ORBAX)
    return {item: backend.prepare(tree) for item, tree in contents.trees.items()}


def write(temporary: str, to: str, contents: Contents, prepared: Any, final: str) -> None:
    """Write and sync a checkpoint at a temporary path."""
    options = write_options(config.current())
    if to == "safetensors":
        with writing(final, temporary, contents.trees[""]):
            safetensors.write(temporary, prepared[""])
        return
    if to in TO_STEPS:
        with translated(final, "written"):
            os.mkdir(temporary)
    backend = backend_for(Format.MSGPACK if to == "msgpack" else Format.ORBAX)
    for item, plan in prepared.items():
        with writing(final, temporary, contents.trees[item]):
            backend.write(os.path.join(temporary, item) if item else temporary, plan, options)
    with translated(final, "written"):
        if to in TO_STEPS:
            _finish_step(temporary, to, contents)
        elif contents.custom:
            _edit_metadata(temporary, temporary, custom_metadata=contents.custom)


def _finish_step(temporary: str, to: str, contents: Contents) -> None:
    """Move the metadata of the items up to the step, copy JSON items, and write the commit file."""
    tree_handler, json_handler = _HANDLER_NAMES[to]
    handlers = {**dict.fromkeys(contents.trees, tree_handler), **dict.fromkeys(contents.json, json_handler)}
    for item in contents.trees:
        folder = os.path.join(temporary, item)
        _edit_metadata(folder, temporary, item_handlers=handlers, custom_metadata=contents.custom)
        os.unlink(os.path.join(folder, layout.STEP_METADATA))
        sync_directory(folder)
    committed = (Location(temporary, LOCAL) / next(iter(contents.trees)) / layout.COMMIT_FILE).read()
    for item, file in contents.json.items():
        os.mkdir(os.path.join(temporary, item))
        write_file(os.path.join(temporary, item, file.name), file.read())
        write_file(os.path.join(temporary, item, layout.COMMIT_FILE), committed)
        sync_directory(os.path.join(temporary, item))
    write_file(os.path.join(temporary, layout.COMMIT_FILE), committed)
    sync_directory(temporary)


def has_other_metadata(location: Location, to: str, contents: Contents) -> bool:
    """Return whether a written checkpoint holds other custom metadata; compared as JSON, where NaN equals NaN."""
    if to in _FILES:
        return False
    found, expected = metadata.read_step_metadata(location).get("custom_metadata"), contents.custom
    return json.dumps(found or {}, sort_keys=True) != json.dumps(expected, sort_keys=True)


def check_kept(location: Location, to: str) -> None:
    """Raise StorageError if what is there is a file and the layout is a directory, or the reverse."""
    if location.isdir() == (to in _FILES):
        found, expected = ("a directory", "a file") if to in _FILES else ("a file", "a directory")
        message = f"{location} is {found} of another conversion, and {to!r} writes {expected}; pass another destination"
        raise StorageError(message, path=location.path)


def copy_root_metadata(jobs: Iterable[Job]) -> None:
    """Copy the root metadata of the managers that these steps are of, where there is none yet."""
    for source, folder in {(os.path.dirname(job.source), os.path.dirname(job.destination)) for job in jobs}:
        found, final = (of_text(one) / layout.ROOT_METADATA for one in (source, folder))
        if not found.isfile() or final.exists():
            continue
        final.parent.prepare_directory()
        with final.temporary() as temporary:
            with translated(final.path, "written"):
                write_file(temporary, found.read())
            final.publish(temporary, new=True)


def _edit_metadata(source: str, destination: str, **changed: Any) -> None:
    with open(os.path.join(source, layout.STEP_METADATA), encoding="utf-8") as file:
        found = json.load(file)
    write_file(os.path.join(destination, layout.STEP_METADATA), json.dumps({**found, **changed}).encode(), new=False)
    sync_directory(destination)


@contextmanager
def reading(location: Location, to: str, contents: Contents) -> Iterator[dict[tuple[str, Path], Any]]:
    """Open a written checkpoint: (item, key path) → `LeafHandle`, `safetensors.FileArray`, value or empty container."""
    if to == "safetensors":
        # The names of such a file do not tell the key paths.
        known = {layout.leaf_name(keys): keys for _, keys in contents.leaves}
        yield {("", known.get(name, (name,))): leaf for name, leaf in safetensors.read(location.path).items()}
        return
    with closing(Opened(location, verify=False)) as opened:
        items = {name: opened.reader(name).tree for name in opened.items if name not in contents.json}
        yield {(item, keys): leaf for item, tree in items.items() for keys, leaf in iter_leaves(tree)}
