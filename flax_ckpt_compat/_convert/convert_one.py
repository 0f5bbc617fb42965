"""Convert one checkpoint, in whatever thread, process or machine an executor chooses: open, write, compare, publish."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._convert import write_output
from flax_ckpt_compat._convert.jobs import Conversion, Job
from flax_ckpt_compat._convert.plan_output import Output, output_of
from flax_ckpt_compat._convert.write_output import Progress
from flax_ckpt_compat._core.arguments import load_name, load_value
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local.presence import occupy_standard_streams
from flax_ckpt_compat._core.location import LocalLocation, of_text
from flax_ckpt_compat._discovery.locating import unchanged
from flax_ckpt_compat._discovery.opening import Opened

_log = logging.getLogger("flax_ckpt_compat")


def convert_one(job: Job, progress: Progress = lambda _: None) -> Conversion:
    """Run a job; return its result, or its failure.

    ``progress`` takes numbers of bytes, which add up to twice the size of the arrays: written, and verified."""
    start = time.monotonic()
    result = Conversion(job.source, job.destination, "failed", error=job.error)
    try:
        if job.error is None:
            with ExitStack() as watched, ExitStack() as files:
                source = of_text(job.source).listed()
                watched.enter_context(unchanged(source))
                verifies = config.current().checksums == "verify"
                chosen = None if job.items is None else list(job.items)
                opening = Opened(source, verify=verifies, items=chosen, warns=False, allows_unknown=True)
                opened = files.enter_context(closing(opening))
                target, transforms = loaded(job.target, job.transforms)
                found = output_of(opened, dataclasses.replace(job, target=target, transforms=transforms))
                size, notes = (len(found.leaves), found.nbytes), tuple(found.notes)
                result = Conversion(job.source, job.destination, "failed", *size, notes=notes)
                status = _run(job, found, progress, watched.close)
                result = dataclasses.replace(result, status=status, left_out=tuple(found.left_out))
    except Exception as failure:  # noqa: BLE001  (of one checkpoint: the others are converted)
        _log.debug("%s could not be converted", job.source, exc_info=True)
        message = str(failure) if job.source in str(failure) else f"{job.source}: {failure}"
        error = f"{type(failure).__name__}: {message}"
        result = dataclasses.replace(result, status="failed", error=error, left_out=())
    return dataclasses.replace(result, seconds=time.monotonic() - start)


def loaded(target: Any, transforms: Any) -> tuple[Any, Any]:
    """Return target and transforms of a job, loaded if they are named as ``module:name``."""
    return (
        load_value(target) if isinstance(target, str) else target,
        load_name(transforms) if isinstance(transforms, str) else transforms,
    )


def _run(job: Job, output: Output, progress: Progress, check_unchanged: Callable[[], None]) -> str:
    """Write, verify, and publish unless the source was replaced meanwhile; return the status."""
    prepared = write_output.prepare(output, progress, keep_shardings=job.sharding == "keep")
    final = of_text(job.destination)
    if final.exists() and not final.holds_nothing():
        if not job.resume:
            raise StorageError(
                f"{final} exists, and nothing is replaced; pass another destination, or resume (--resume)",
                path=final.path,
            )
        write_output.check_kept(final, job.to)
        if not job.dry_run:
            write_output.compare(final, output, progress)
        return "kept"
    if job.dry_run:
        return "planned"
    occupy_standard_streams()
    final.parent.prepare_directory()
    with final.temporary() as temporary:
        write_output.write(temporary, output, prepared, final)
        write_output.compare(LocalLocation(temporary), output, progress)
        check_unchanged()
        final.publish(temporary, new=True)
    return "converted"
