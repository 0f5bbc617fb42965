"""Load the target and the transforms that a job names."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from typing import Any

from flax_ckpt_compat._convert.jobs import Job
from flax_ckpt_compat._core.errors import SettingError


def loaded(job: Job) -> Job:
    """Return the job with its target and transforms loaded, if they are named as ``module:name``.

    Raises:
        SettingError: there is no such name.
    """
    target, transforms = job.target, job.transforms
    if isinstance(target, str):
        target = load(target)
        target = target() if callable(target) else target
    return dataclasses.replace(
        job, target=target, transforms=load(transforms) if isinstance(transforms, str) else transforms
    )


def load(name: str) -> Any:
    """Return what ``module:name`` names; modules in the working directory are found.

    Raises:
        SettingError: there is no such module or name.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SettingError(f"{name!r} names nothing; expected module:name, such as train:make_state")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SettingError(f"{name!r} cannot be loaded: {error}; give a module that can be imported here") from error
    return found
