"""Define `SaveRequest`: one save with validated arguments, made once by the public functions and passed down."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from contextlib import suppress
from typing import Any

from flax_ckpt_compat import config
from flax_ckpt_compat._core import arguments
from flax_ckpt_compat._core.backend import Format, WriteOptions
from flax_ckpt_compat._core.errors import ArgumentError, CheckpointerError
from flax_ckpt_compat._core.location import Location, is_url, local, normal
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._discovery import saved_steps, steps
from flax_ckpt_compat._discovery.saved_steps import CheckpointDir

_PART_OF_STORE = 32 * 2**20  # bytes of a part of an array; a new object is begun from 64 MiB on, so most have two


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One save."""

    checkpoint_dir: CheckpointDir
    name: str  # name of the checkpoint in the directory
    shown_path: str  # the checkpoint's path in the caller's form
    step: Any = None  # as the caller gave it; None for a checkpoint that is not a step of a directory
    overwrite: bool = False  # replace what has that name
    keep: int = 0  # number of checkpoints to keep; 0 keeps all
    keep_every_n_steps: float | None = None  # also keep one checkpoint in so many steps; None for none
    replace_only_checkpoints: bool = False  # replace nothing but checkpoints, and remove none that are newer
    multiprocess: bool = False  # all processes of the job save, each what it holds
    format: Format
    options: WriteOptions
    coordination_timeout: float  # seconds that process 0 waits at each barrier; the others wait twice as long
    # Ours, Flax's or a user's: later calls raise its failures if its ``save_future`` is a Future. None: no background.
    async_manager: Any = None
    orbax_checkpointer: Any = None  # of real Orbax: writes in the backend's place; None for the backend
    start: float = dataclasses.field(default_factory=time.time)  # start of the call, in seconds since the epoch

    @property
    def directory(self) -> Location:
        """Return the directory of the checkpoint."""
        return self.checkpoint_dir.directory

    @property
    def location(self) -> Location:
        """Return where the checkpoint will be."""
        return self.directory / self.name

    @property
    def path(self) -> str:
        """Return the absolute final path."""
        return self.location.path

    @property
    def number(self) -> float | None:
        """Return the step by the checkpoint's name; None for one that is no numbered step."""
        return steps.step_of(self.name, self.checkpoint_dir.prefix)

    def is_newer(self, name: str) -> bool:
        """Return whether a name is that of a newer step."""
        return (steps.step_of(name, self.checkpoint_dir.prefix) or 0) > (self.number or 0)

    @property
    def refusal(self) -> str:
        """Return the beginning of the message of an error that refuses the save."""
        return f"cannot save {'' if self.step is None else f'step {self.step} '}to {self.path}"


def of_step(
    ckpt_dir: str, step: Any, prefix: str, *, keep: Any, keep_every_n_steps: Any, **options: Any
) -> SaveRequest:
    """Validate a save of one step of a normalised directory; ``options`` are other fields of `SaveRequest`."""
    step = steps.of_replicated(step)
    text, checkpoint_dir = steps.step_text(step), saved_steps.checkpoint_dir(ckpt_dir, prefix)
    return _request(
        checkpoint_dir=checkpoint_dir,
        name=checkpoint_dir.prefix + text,
        shown_path=os.path.join(ckpt_dir, f"{prefix}{text}"),
        step=step,
        keep=check_keep(keep),
        keep_every_n_steps=check_every(keep_every_n_steps),
        **options,
    )


def of_path(path: str, **options: Any) -> SaveRequest:
    """Validate a save at exactly this normalised path, and read the settings; ``options`` as for `of_step`."""
    directory, name = os.path.split(local(path))
    if name in ("", os.curdir, os.pardir) or is_url(path) != is_url(directory):  # a bucket
        raise ArgumentError(f"{path!r} names no file or directory to write; add a name, or pass step=")
    return _request(
        checkpoint_dir=saved_steps.checkpoint_dir(directory, ""),
        name=name,
        shown_path=path,
        replace_only_checkpoints=True,
        **options,
    )


def _request(*, overwrite: Any, async_manager: Any = None, format: Format | None = None, **fields: Any) -> SaveRequest:
    settings = config.current()
    is_manager = not isinstance(async_manager, type) and hasattr(async_manager, "wait_previous_save")
    if async_manager and not (is_manager and hasattr(async_manager, "save_async")):  # as Flax asks
        what = "a checkpoints.AsyncManager(), or an object with its methods"
        raise CheckpointerError(f"async_manager must be {what}; {arguments.found(async_manager)}")
    meter = Meter(settings.progress, "save")
    request = SaveRequest(
        overwrite=arguments.flag(overwrite, "overwrite"),
        async_manager=async_manager,
        format=format or (Format.ORBAX if config.use_orbax_format() else Format.MSGPACK),
        options=write_options(settings, fields["checkpoint_dir"].directory, meter, in_background=bool(async_manager)),
        coordination_timeout=settings.coordination_timeout,
        **fields,
    )
    if steps.is_foreign(request.name):
        why = "Flax and Orbax give such to unfinished ones"
        raise ArgumentError(f"{request.name!r} is no name for a checkpoint: {why}")
    normal(request.path)  # raises for characters that stores do not take
    with suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(request.path):
            return request
    raise ArgumentError(f"{request.path!r} contains characters that no path can have; remove them")


def write_options(
    settings: config.Settings, destination: Location, meter: Meter = OFF, *, in_background: bool = False
) -> WriteOptions:
    """Return a backend's options by the settings and the storage."""
    return WriteOptions(
        settings.compression,
        checksums=settings.checksums != "off",
        part_bytes=_PART_OF_STORE if destination.is_remote else None,
        past_cache=in_background and not destination.is_remote,  # what goes to a store is read again
        meter=meter,
    )


def check_keep(keep: Any) -> int:
    """Validate ``keep`` and return it as an int; 0 keeps all, as legacy Flax does for 0 and ``np.inf``."""
    value = _count(keep, "keep")
    if value < 0 or (not math.isinf(value) and value != int(value)):
        raise ArgumentError(f"keep must be a whole number, 0 (keep all) or more, found {value}")
    return 0 if math.isinf(value) else int(value)


def check_every(every: Any) -> float | None:
    """Validate ``keep_every_n_steps`` and return it as a number; None and 0 keep nothing extra."""
    return None if every is None or every is False else _count(every, "keep_every_n_steps") or None


def _count(given: Any, name: str) -> float:
    """Return a number, or the one value of an array."""
    one = arguments.number(given, name, of_any_rank=True)
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(one, bool | str) and not math.isnan(value := float(one)):  # float takes text, too
            return value
    if type(one) is int:  # beyond every float
        return math.inf if one > 0 else -math.inf
    raise ArgumentError(f"{name} must be a number, {arguments.found(given)}")
