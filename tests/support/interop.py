"""Everybody who saves and everybody who restores: ours, Flax's module with its flag off and on, and real Orbax."""

import dataclasses
import functools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints
from tests.support.peers import ocp_v1
from tests.support.saves import use_flag

ITEMS = ("default", "state", "pytree")


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint: Flax's file, one flat Orbax directory, a manager's root, or a directory of Orbax v1."""

    path: Path
    layout: str

    def item(self) -> Path:
        """The directory with the tree itself."""
        above = self.path / "1" if self.layout == "manager" else self.path
        if self.layout in ("file", "flat"):
            return self.path
        return next(above / name for name in ITEMS if (above / name).exists())


def _save(module: Any, flag: bool, folder: Path, tree: Any) -> Saved:
    with use_flag(flag):
        path = module.save_checkpoint(folder, tree, 1)
    return Saved(Path(path), "flat" if flag else "file")


def _save_pytree(folder: Path, tree: Any) -> Saved:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint_1", tree)
    return Saved(folder / "checkpoint_1", "flat")


def _save_standard(folder: Path, tree: Any) -> Saved:
    # What StandardCheckpointer writes; in its background, a save that fails leaves threads that wait for minutes.
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "checkpoint_1", args=ocp.args.StandardSave(tree))
    return Saved(folder / "checkpoint_1", "flat")


def _save_manager(folder: Path, tree: Any) -> Saved:
    # In the background, a save that fails leaves its manager waiting for minutes.
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder / "root", options=options) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(tree))
    return Saved(folder / "root", "manager")


def _save_v1(folder: Path, tree: Any) -> Saved:
    ocp_v1.save(folder / "checkpoint_1", tree)
    return Saved(folder / "checkpoint_1", "v1")


def _load(module: Any, flag: bool, saved: Saved) -> Any:
    with use_flag(flag):
        return module.restore_checkpoint(saved.path, None)


def _load_by(kind: Callable[[], Any], saved: Saved) -> Any:
    with kind() as checkpointer:
        return checkpointer.restore(saved.item())


def _load_manager(saved: Saved) -> Any:
    root = saved.path
    if saved.layout != "manager":
        root = saved.path.parent / "as an item of a manager"
        if not root.exists():
            copy = shutil.copyfile if saved.layout == "file" else shutil.copytree
            (root / "1").mkdir(parents=True)
            copy(saved.item(), root / "1" / "default")
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(1, args=ocp.args.PyTreeRestore())


def _load_v1(saved: Saved) -> Any:
    return ocp_v1.load(saved.path / "1" if saved.layout == "manager" else saved.path)


OURS = {"ours off": (checkpoints, False), "ours on": (checkpoints, True)}
FLAX = {"flax off": (flax_checkpoints, False), "flax on": (flax_checkpoints, True)}
ORBAX: dict[str, tuple[Callable[[Path, Any], Saved], Callable[[Saved], Any]]] = {
    "PyTree": (_save_pytree, functools.partial(_load_by, ocp.PyTreeCheckpointer)),
    "Standard": (_save_standard, functools.partial(_load_by, ocp.StandardCheckpointer)),
    "Manager": (_save_manager, _load_manager),
    "v1": (_save_v1, _load_v1),
}
EVERYBODY = (*OURS, *FLAX, *ORBAX)
_BY_MODULE = {**OURS, **FLAX}.items()
WRITERS: dict[str, Callable[[Path, Any], Saved]] = {
    **{name: functools.partial(_save, *how) for name, how in _BY_MODULE},
    **{name: save for name, (save, _) in ORBAX.items()},
}
READERS: dict[str, Callable[[Saved], Any]] = {
    **{name: functools.partial(_load, *how) for name, how in _BY_MODULE},
    **{name: load for name, (_, load) in ORBAX.items()},
}


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    """Calls; warnings of Flax, Orbax and jax are theirs to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)
