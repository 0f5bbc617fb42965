"""Write output in a layout, and read them again to compare."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._convert import item_copies, safetensors
from flax_ckpt_compat._convert.jobs import FILES, Job
from flax_ckpt_compat._convert.output_trees import Output
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import StorageError, UnsupportedLeafError
from flax_ckpt_compat._core.local.syncing import sync_directory, write_file
from flax_ckpt_compat._core.local.temporaries import create_directory
from flax_ckpt_compat._core.location import LocalLocation, Location, of_text
from flax_ckpt_compat._core.storage_errors import translated, writing
from flax_ckpt_compat._core.tree import Node, Path
from flax_ckpt_compat._discovery.formats import backend_for
from flax_ckpt_compat._discovery.layouts.safetensors import SafetensorsReader
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._save.request import write_options
from flax_ckpt_compat._view import metadata


def check(output: Output, to: str) -> Any:
    """Validate that a layout can hold the output, and plan their storage; return the argument of `write`."""
    for item in (*output.trees, *output.copies) if output.has_items else ():
        if item in (os.curdir, os.pardir) or not item or "/" in item or "\0" in item:
            raise UnsupportedLeafError(f"{item!r} cannot be the name of an item, a directory of the step; rename it")
    if to == "safetensors":
        safetensors.check(output.trees[""])
        return output.trees
    backend = backend_for(Format.MSGPACK if to == "msgpack" else Format.ORBAX)
    return {item: backend.prepare(tree) for item, tree in output.trees.items()}


def write(temporary: str, to: str, output: Output, prepared: Any, destination: Location) -> None:
    """Write and sync a checkpoint at a temporary path."""
    options, final = write_options(config.current(), destination), destination.path
    if to == "safetensors":
        with writing(final, temporary, output.trees[""]):
            safetensors.write(temporary, prepared[""])
        return
    if output.has_items or not prepared:  # else the backend creates it
        with translated(final, "written"):
            create_directory(temporary)
    backend = backend_for(Format.MSGPACK if to == "msgpack" else Format.ORBAX)
    for item, plan in prepared.items():
        with writing(final, temporary, output.trees[item]):
            backend.write(os.path.join(temporary, item) if item else temporary, plan, options)
    with translated(final, "written"):
        for item, copy in output.copies.items():
            copy.write(os.path.join(temporary, item) if item else temporary)
        item_copies.copy_files(output.files, temporary)
        for item in output.trees.keys() & (output.custom_of_trees.keys() | output.rich_types.keys()):
            file = os.path.join(temporary, item, layout.TREE_METADATA)
            _add_metadata(file, output.custom_of_trees.get(item, {}), output.rich_types.get(item))
        if output.has_items:
            _finish_step(temporary, output)
        elif output.copies:
            _write_step_metadata(temporary, {}, output, output.handlers.get("", {}))
        elif output.custom:
            _edit_metadata(temporary, output.custom)


def _add_metadata(file: str, custom: dict[str, Any], rich_types: str | None) -> None:
    """Add a user's own metadata, and Orbax's record of tuples and namedtuples, to the metadata of a tree."""
    with open(file, "rb") as opened:
        content = json.load(opened)
    content["custom_metadata"] = {**custom, **(content.get("custom_metadata") or {})}
    if rich_types is not None:
        entries = content["tree_metadata"].values()
        values = {tuple(str(key["key"]) for key in one["key_metadata"]): one["value_metadata"] for one in entries}
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):  # no record of Orbax
            content["value_metadata_tree"] = json.dumps(_with_values(json.loads(rich_types), (), values))
    write_file(file, json.dumps(content).encode(), new=False)


def _with_values(node: Any, path: Path, values: dict[Path, Any]) -> Any:
    """Return Orbax's record of a tree with the leaves that were written: shardings may be left out."""
    if isinstance(node, list):
        return [_with_values(child, (*path, str(at)), values) for at, child in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if not isinstance(node.get("category"), str):
        return {key: _with_values(child, (*path, key), values) for key, child in node.items()}
    if node["category"] == "namedtuple":
        entries = [{**one, "value": _with_values(one["value"], (*path, one["key"]), values)} for one in node["entries"]]
        return {**node, "entries": entries}
    if "entries" in node:
        return {**node, "entries": _with_values(node["entries"], path, values)}
    return {**node, "data": values[path]}


def _finish_step(temporary: str, output: Output) -> None:
    """Move the metadata of the items up to the step, and write the commit file."""
    times: dict[str, Any] = {}
    for item in output.trees:
        folder = os.path.join(temporary, item)
        times = metadata.read_step_metadata(LocalLocation(folder))
        os.unlink(os.path.join(folder, layout.STEP_METADATA))
        sync_directory(folder)
    _write_step_metadata(temporary, times, output, output.handlers)
    write_file(os.path.join(temporary, layout.COMMIT_FILE), layout.COMMITTED)
    sync_directory(temporary)


def _write_step_metadata(folder: str, times: dict[str, Any], output: Output, handlers: Any) -> None:
    now = time.time_ns()
    content = {
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        **times,
        "item_handlers": handlers,
        "custom_metadata": output.custom,
    }
    write_file(os.path.join(folder, layout.STEP_METADATA), json.dumps(content).encode(), new=False)
    sync_directory(folder)


def _edit_metadata(folder: str, custom: dict[str, Any]) -> None:
    found = metadata.read_step_metadata(LocalLocation(folder))
    content = json.dumps({**found, "custom_metadata": custom}).encode()
    write_file(os.path.join(folder, layout.STEP_METADATA), content, new=False)
    sync_directory(folder)


def has_other_metadata(location: Location, to: str, output: Output) -> bool:
    """Return whether a written checkpoint holds other custom metadata; compared as JSON, where NaN equals NaN."""
    if to in FILES:
        return False
    pairs = [(metadata.read_step_metadata(location).get("custom_metadata") or {}, output.custom)]
    for item in output.trees:
        pairs.append(
            (metadata.custom_of_tree(location / item if item else location), output.custom_of_trees.get(item, {}))
        )
    return any(json.dumps(found, sort_keys=True) != json.dumps(wanted, sort_keys=True) for found, wanted in pairs)


def check_kept(location: Location, to: str) -> None:
    """Raise StorageError if what is there is a file and the layout is a directory, or the reverse."""
    if location.isdir() == (to in FILES):
        found, expected = ("a directory", "a file") if to in FILES else ("a file", "a directory")
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


@contextmanager
def reading(location: Location, to: str, output: Output) -> Iterator[dict[str, Node]]:
    """Open a written checkpoint: item → tree of `LeafHandle`s; the only tree of a layout without items is ''."""
    if to == "safetensors":
        with closing(SafetensorsReader(location)) as reader:
            yield {"": reader.tree}
        return
    with closing(Opened(location, verify=False, warns=False, allows_unknown=True)) as opened:
        opaque = output.copies.keys() - output.copied_trees.keys()
        yield {name: opened.reader(name).tree for name in opened.trees if name not in opaque}
