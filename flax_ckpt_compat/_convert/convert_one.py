"""Convert one checkpoint; called in whatever thread, process or machine an executor chooses."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._convert import output_writers
from flax_ckpt_compat._convert.compare import compare, counted
from flax_ckpt_compat._convert.jobs import Conversion, Job
from flax_ckpt_compat._convert.output_trees import Output, output_of
from flax_ckpt_compat._core import standard_streams
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.import_by_name import load_name, load_value
from flax_ckpt_compat._core.location import LOCAL, Location, of_text
from flax_ckpt_compat._discovery.locating import unchanged
from flax_ckpt_compat._discovery.opening import Opened

_log = logging.getLogger("flax_ckpt_compat")

# Takes numbers of bytes that were written, or compared.
Progress = Callable[[int], None]


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
    standard_streams.occupy()
    final.parent.prepare_directory()
    with final.temporary() as temporary:
        counted(output, progress)
        output_writers.write(temporary, job.to, output, prepared, final)
        compare(Location(temporary, LOCAL), job.to, output, progress)
        check_unchanged()
        final.publish(temporary, new=True)
    return "converted"
