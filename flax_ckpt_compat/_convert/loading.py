"""Load the target and the transforms that a job names."""

from __future__ import annotations

import dataclasses

from flax_ckpt_compat._convert.jobs import Job
from flax_ckpt_compat._core.load_name import load_name, load_value


def loaded(job: Job) -> Job:
    """Return the job with its target and transforms loaded, if they are named as ``module:name``.

    Raises:
        SettingError: there is no such name.
    """
    target, transforms = job.target, job.transforms
    return dataclasses.replace(
        job,
        target=load_value(target) if isinstance(target, str) else target,
        transforms=load_name(transforms) if isinstance(transforms, str) else transforms,
    )
