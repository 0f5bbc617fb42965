"""The peers that are not `flax.training.checkpoints`: Orbax's own interfaces."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

try:
    import orbax.checkpoint.experimental.v1 as ocp_v1
except ImportError:  # older than Orbax 0.11
    ocp_v1 = None


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another library's way to save and restore.

    Attributes:
        name: for the tables.
        into: of (path, tree); saves to a path that does not exist yet.
        out_of: of (path, target); restores.
        begin: of (path, tree); returns what waits for the save to end; None where it cannot save in the background.
    """

    name: str
    into: Callable[[str, Any], Any]
    out_of: Callable[[str, Any], Any]
    begin: Callable[[str, Any], Callable[[], Any]] | None = None

    def save(self, directory: str, tree: Any) -> None:
        """Saves and waits until it is committed."""
        self.into(os.path.join(directory, "checkpoint"), tree)

    def restore(self, directory: str, target: Any) -> Any:
        """Restores and waits for devices."""
        return jax.block_until_ready(self.out_of(os.path.join(directory, "checkpoint"), target))


def _restore_pytree(path: str, target: Any) -> Any:
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    return ocp.PyTreeCheckpointer().restore(path, item=target, restore_args=arguments)


def _save_standard(path: str, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _restore_standard(path: str, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


@functools.cache
def _kept() -> ocp.AsyncCheckpointer:
    """One for all saves, as a training keeps it, so that no save pays for making it."""
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())


def _begin_pytree(path: str, tree: Any) -> Callable[[], Any]:
    _kept().save(path, args=ocp.args.PyTreeSave(tree))
    return _kept().wait_until_finished


def _begin_v1(path: str, tree: Any) -> Callable[[], Any]:
    response = ocp_v1.save_async(path, tree)
    return lambda: response.result()


PYTREE = Peer("orbax PyTreeCheckpointer", lambda path, tree: ocp.PyTreeCheckpointer().save(path, tree), _restore_pytree)
STANDARD = Peer("orbax StandardCheckpointer", _save_standard, _restore_standard)
ASYNC = Peer("orbax AsyncCheckpointer", lambda path, tree: _begin_pytree(path, tree)(), _restore_pytree, _begin_pytree)
# Earlier releases of v1 have other names for these.
_HAS_V1 = ocp_v1 is not None and hasattr(ocp_v1, "save") and hasattr(ocp_v1, "load")
V1 = (Peer("orbax v1", ocp_v1.save, ocp_v1.load, _begin_v1),) if _HAS_V1 else ()
