"""Code as users write it, for the type checker alone; a line marked ``type: ignore`` must be an error."""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, errors, restore, save


def paths(folder: Path, tree: Any) -> str:
    """Paths are text or PathLike, and come back as text; steps are numbers, arrays of one, or text."""
    save(folder, tree, step=jnp.asarray(3), keep=3, keep_every_n_steps=10, async_manager=checkpoints.AsyncManager())
    save(folder, tree, step=np.int64(4), format="orbax", compression="zstd")
    save(folder / "model", tree, overwrite=True, format=None, compression=None)
    save(b"model", tree)  # type: ignore[arg-type]
    save(folder, tree, 3)  # type: ignore[call-arg]
    save(folder, tree, format="zarr")  # type: ignore[arg-type]
    save(folder, tree, compression="lz4")  # type: ignore[arg-type]
    save(folder, tree, step=[3])  # type: ignore[arg-type]
    return save(str(folder), tree, step="best", prefix="model_")


def policies(folder: Path, tree: Any) -> Any:
    """Policies are the documented words."""
    restore(folder, tree, step=3, missing_leaves="ignore", shape_mismatch="ignore", dtype="target", must_exist=False)
    restore(str(folder), structure="flax", transforms={}, transforms_default_to_original=False)
    restore(folder, tree, missing_leaves="kepe")  # type: ignore[arg-type]
    restore(folder, tree, must_exists=True)  # type: ignore[call-arg]
    try:
        return restore(folder)
    except errors.MissingLeavesError as error:
        return error.missing


def targets(folder: Path, tree: dict[str, np.ndarray[Any, Any]], count: int) -> Any:
    """What is restored has the target's type; without a target it may be anything."""
    restored: dict[str, np.ndarray[Any, Any]] = restore(folder, tree, step="best")
    other: list[str] = restore(folder, tree)  # type: ignore[arg-type]
    whole: list[str] = restore(folder)
    raw = restore(folder, step=3)
    raw["params"].reshape(-1)
    loaded: dict[str, Any] = restore(folder, None)
    flax_ckpt_compat.plan_restore(folder, tree, step=np.int64(3))
    return restored, other, whole, loaded, restore(folder, count) + 1


def names(folder: Path) -> Any:
    """The package's lazy names are known, and a misspelt one is not taken for one of them."""
    flax_ckpt_compat.instal()  # type: ignore[attr-defined]
    flax_ckpt_compat.install()
    with config.override(must_exist=True), config.defaults(config.STRICT) as settings:
        strict: bool = settings.must_exist
    return flax_ckpt_compat.restore(folder), strict


def reports(folder: Path, tree: Any) -> list[float]:
    """A callback takes a `Progress`, and returns anything; "bar" is one, too."""
    found: list[flax_ckpt_compat.Progress] = []
    save(folder, tree, progress=found.append)
    restore(folder, progress="bar")
    restore(folder, progress=lambda report: report.done / report.total)
    restore(folder, progress="bars")  # type: ignore[arg-type]
    save(folder, tree, progress=lambda: None)  # type: ignore[arg-type, misc]
    with config.override(progress=found.append):
        config.update(progress=None)
    return [one.seconds for one in found if one.finished]
