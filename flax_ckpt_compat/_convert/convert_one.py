"""Convert one checkpoint, in whatever thread, process or machine an executor chooses: open, write, compare, publish.

What was written is compared with its source bit by bit, as `flax_ckpt_compat.diff` does."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from flax_ckpt_compat import config
from flax_ckpt_compat._convert import item_copies, output_writers
from flax_ckpt_compat._convert.jobs import Conversion, Job
from flax_ckpt_compat._convert.output_trees import Output, array_nbytes, output_of
from flax_ckpt_compat._core.arguments import load_name, load_value
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, ArraySlice, Format, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import CheckpointError, StorageError
from flax_ckpt_compat._core.local.safe_open import occupy_standard_streams
from flax_ckpt_compat._core.location import LocalLocation, Location, of_text
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import KeyData, Node, Path, StoredArray, map_leaves
from flax_ckpt_compat._discovery.locating import unchanged
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._view.diff import Comparison, LeafDifference
from flax_ckpt_compat._view.metadata import StoredLeaves

_log = logging.getLogger("flax_ckpt_compat")

# Takes numbers of bytes that were written, or compared.
Progress = Callable[[int], None]
_WORDS = {"only in a": "is missing", "only in b": "is new", "values": "has other values"}


def convert_one(job: Job, progress: Progress = lambda _: None) -> Conversion:
    """Run a job; return its result, or its failure.

    ``progress`` takes numbers of bytes, which add up to twice the size of the arrays: written, and verified."""
    start = time.monotonic()
    found: Output | None = None
    status, error = "failed", job.error
    try:
        if error is None:
            verifies = config.current().checksums == "verify"
            with ExitStack() as watched, ExitStack() as files:
                source = of_text(job.source).listed()
                watched.enter_context(unchanged(source))
                chosen = None if job.items is None else list(job.items)
                opening = Opened(source, verify=verifies, items=chosen, warns=False, allows_unknown=True)
                opened = files.enter_context(closing(opening))
                target, transforms = loaded(job.target, job.transforms)
                found = output_of(opened, dataclasses.replace(job, target=target, transforms=transforms))
                status = _run(job, found, progress, watched.close)
    except Exception as failure:  # noqa: BLE001  (of one checkpoint: the others are converted)
        _log.debug("%s could not be converted", job.source, exc_info=True)
        message = str(failure) if job.source in str(failure) else f"{job.source}: {failure}"
        error = f"{type(failure).__name__}: {message}"
        status = "failed"
    seconds = time.monotonic() - start
    if found is None:
        return Conversion(job.source, job.destination, status, seconds=seconds, error=error)
    notes, left_out = tuple(found.notes), () if error is not None else tuple(found.left_out)
    size = len(found.leaves), found.nbytes
    return Conversion(job.source, job.destination, status, *size, seconds, notes, error, left_out)


def loaded(target: Any, transforms: Any) -> tuple[Any, Any]:
    """Return target and transforms of a job, loaded if they are named as ``module:name``."""
    return (
        load_value(target) if isinstance(target, str) else target,
        load_name(transforms) if isinstance(transforms, str) else transforms,
    )


def _run(job: Job, output: Output, progress: Progress, check_unchanged: Callable[[], None]) -> str:
    """Write, verify, and publish unless the source was replaced meanwhile; return the status."""
    prepared = output_writers.check(output, job.to)
    final = of_text(job.destination)
    if final.exists() and not final.holds_nothing():
        if not job.resume:
            raise StorageError(
                f"{final} exists, and nothing is replaced; pass another destination, or resume (--resume)",
                path=final.path,
            )
        output_writers.check_kept(final, job.to)
        if not job.dry_run:
            compare(final, job.to, output, progress)
        return "kept"
    if job.dry_run:
        return "planned"
    occupy_standard_streams()
    final.parent.prepare_directory()
    with final.temporary() as temporary:
        counted(output, progress)
        output_writers.write(temporary, job.to, output, prepared, final)
        compare(LocalLocation(temporary), job.to, output, progress)
        check_unchanged()
        final.publish(temporary, new=True)
    return "converted"


class DifferentError(CheckpointError):
    """A result does not hold what its source holds."""


def compare(location: Location, to: str, output: Output, progress: Progress) -> None:
    """Raise DifferentError unless a checkpoint holds exactly this output; ``progress`` takes the bytes compared."""
    with output_writers.reading(location, to, output) as trees:
        wanted = {name: _to_write(tree, location) for name, tree in {**output.trees, **output.copied_trees}.items()}
        a, b = _leaves(location, wanted), _leaves(location, trees)
        differences = [_words(one) for one in Comparison(a, b, None).result(lambda _: progress).differences]
        # What else an empty node was, not every format keeps.
        nones = [path for path, what in a.empty.items() if (what == "None") != (b.empty.get(path, what) == "None")]
        differences += [f"{'/'.join(path)} is {b.empty[path]}, expected {a.empty[path]}" for path in nones]
    for item, copy in output.copies.items():
        if why := copy.difference(location / item):
            differences.append(f"{item} {why}")
    for beside, file in output.files.items():
        copied = location / beside
        if not copied.isfile() or item_copies.is_other(file, copied):
            differences.append(f"{beside} has other bytes")
    if output_writers.has_other_metadata(location, to, output):
        differences.append("custom metadata is other JSON")
    if differences:
        raise DifferentError(
            f"{location} does not hold what its source holds: {one_line(differences)}; the source may have been "
            "replaced meanwhile: convert it again, to another place",
            path=location.path,
        )


def counted(output: Output, progress: Progress) -> None:
    """Report the size of each array, or part of one, to ``progress`` when it is read to be written."""

    def read(read: Callable[..., Any], *box: Any) -> Any:
        value = read(*box)
        progress(value.nbytes)
        return value

    for leaf in output.leaves.values():
        array = leaf.data if isinstance(leaf, KeyData) else leaf
        if isinstance(array, StoredArray):
            array.read = functools.partial(read, array.read)
            array.read_part = array.read_part and functools.partial(read, array.read_part)


def _leaves(location: Location, trees: Mapping[str, Node]) -> StoredLeaves:
    found = StoredLeaves(location.path, "")
    for name, tree in trees.items():
        found.add(tree, (name,) if name else ())
    return found


def _words(one: LeafDifference) -> str:
    return f"{one.path} {_WORDS.get(one.kind) or f'is {one.b}, expected {one.a}'}"


def _to_write(tree: Node, location: Location) -> Node:
    """Return a tree with a handle for each leaf: that of the source, or one of the value that is written."""
    reader = _Values(location)
    return map_leaves(lambda path, leaf: reader.handle(path, leaf), tree)


class _Values(Reader):
    """Reader of values that are written: they are there, or computed again from the source."""

    format, places_on_device, keeps_lists = Format.MSGPACK, False, False

    def __init__(self, location: Location):
        self.location, self.tree = location, None

    def handle(self, path: Path, leaf: Any) -> Any:
        """Return the handle of a leaf; empty nodes stay what they are."""
        if isinstance(leaf, StoredArray) and leaf.handle is not None:
            return leaf.handle
        kind, like = _kind(leaf), leaf.data if isinstance(leaf, KeyData) else leaf
        if kind is None:
            return leaf
        shape, dtype = getattr(like, "shape", ()), getattr(like, "dtype", None)
        return LeafHandle(path, kind, shape, dtype, array_nbytes(leaf), None, self, leaf)

    def boxes(self, handle: LeafHandle, nbytes: int) -> Iterator[tuple[slice, ...]]:  # noqa: ARG002
        """Yield the whole array: to compute a part takes as long."""
        yield tuple(slice(0, size) for size in handle.shape)

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """See `flax_ckpt_compat._core.backend.Reader.read`."""
        return [
            _value(one.locator) if isinstance(one, LeafHandle) else one.cut(_value(one.handle.locator))
            for one in handles
        ]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, KeyData):
        return KeyData(leaf.impl, np.asarray(leaf.data))
    return np.asarray(leaf) if isinstance(leaf, StoredArray) else leaf


def _kind(leaf: Any) -> LeafKind | None:
    kinds = {StoredArray: LeafKind.ARRAY, KeyData: LeafKind.PRNG_KEY, bytes: LeafKind.BYTES, **KIND_OF_TYPE}
    return LeafKind.NUMPY_SCALAR if isinstance(leaf, np.generic) else kinds.get(type(leaf))
