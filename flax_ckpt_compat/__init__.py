"""Read and write Flax checkpoints, msgpack and Orbax-format, with the functions of flax.training.checkpoints.

Importing this package loads nothing else; each of its names is imported on first use. Public are the names in
``__all__`` and those in the modules `checkpoints`, `config`, `errors`, `rules` and `transforms`; all others may change.
"""

import typing as _typing
from importlib import import_module as _import_module
from pathlib import Path as _Path

if not (_Path(__file__).parent / "legacy").is_dir():  # pragma: no branch
    # The backends are beside this folder in a checkout, and inside it in a wheel.
    __path__.append(str(_Path(__file__).parents[1]))

if _typing.TYPE_CHECKING:
    from flax_ckpt_compat import checkpoints, config, errors, rules, transforms
    from flax_ckpt_compat._convert.convert import convert
    from flax_ckpt_compat._convert.jobs import Conversion
    from flax_ckpt_compat._core.progress import Progress
    from flax_ckpt_compat._patching import install, installed, installed_in_flax, uninstall
    from flax_ckpt_compat._suggest import Suggestion
    from flax_ckpt_compat._view.checkpoint_view import Checkpoint, open_checkpoint
    from flax_ckpt_compat._view.diff import Diff, LeafDifference, diff
    from flax_ckpt_compat._view.inventory import CheckpointRecord, iter_checkpoints
    from flax_ckpt_compat._view.plan import Plan, PlannedLeaf, plan_restore
    from flax_ckpt_compat._view.verify import Verification, VerifiedCheckpoint, VerifiedLeaf, verify
    from flax_ckpt_compat.api import restore, save
    from flax_ckpt_compat.transforms import (
        RestoreArgs,
        RestoreTransform,
        Transform,
        apply_transformations,
        intersect_trees,
        merge_trees,
    )

__version__ = "1.0.0"

__all__ = [
    "Checkpoint", "CheckpointRecord", "Conversion", "Diff", "LeafDifference", "Plan", "PlannedLeaf", "Progress",
    "RestoreArgs", "RestoreTransform", "Suggestion", "Transform", "Verification", "VerifiedCheckpoint", "VerifiedLeaf",
    "__version__", "apply_transformations", "checkpoints", "config", "convert", "diff", "errors", "install",
    "installed", "installed_in_flax", "intersect_trees", "iter_checkpoints", "merge_trees", "open_checkpoint",
    "plan_restore", "restore", "rules", "save", "transforms", "uninstall", "verify",
]  # fmt: skip

_NAMES = {
    "_convert.convert": ("convert",),
    "_convert.jobs": ("Conversion",),
    "_core.progress": ("Progress",),
    "_patching": (
        "install", "installed", "installed_in_flax", "load_ipython_extension", "uninstall", "unload_ipython_extension",
    ),
    "_suggest": ("Suggestion",),
    "_view.checkpoint_view": ("Checkpoint", "open_checkpoint"),
    "_view.diff": ("Diff", "LeafDifference", "diff"),
    "_view.inventory": ("CheckpointRecord", "iter_checkpoints"),
    "_view.plan": ("Plan", "PlannedLeaf", "plan_restore"),
    "_view.verify": ("Verification", "VerifiedCheckpoint", "VerifiedLeaf", "verify"),
    "api": ("restore", "save"),
    "transforms": (
        "RestoreArgs", "RestoreTransform", "Transform", "apply_transformations", "intersect_trees", "merge_trees",
    ),
}  # fmt: skip
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if not _typing.TYPE_CHECKING:  # with __getattr__, a type checker would accept any misspelt name

    def __getattr__(name: str) -> _typing.Any:
        # Scripts may set jax's environment variables after this import, so do not import jax here.
        if name in _MODULES:
            return getattr(_import_module(f"flax_ckpt_compat.{_MODULES[name]}"), name)
        if name in __all__:
            return _import_module(f"flax_ckpt_compat.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
