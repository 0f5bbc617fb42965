"""Let each call that reads a directory of checkpoints fail, while the latest of them is looked up and restored."""

import errno
import tempfile
from collections.abc import Callable

from flax_ckpt_compat.errors import CheckpointError, StorageError
from tests.reliability import forks, kills, shim
from tests.reliability.judge import quiet, text_of
from tests.reliability.tally import Extent, Tally
from tests.reliability.workloads import Save, System

_STEPS = (1, 2, 3)
_ERRORS = ("EIO", "ESTALE")


def at_calls(system: System, tally: Tally, extent: Extent) -> None:
    """Fail each call once with each error, or as many of them as the extent says."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        kills.save_all(system, f"{folder}/run", list(map(Save, _STEPS)))
        for look in (_restore, _list_steps):
            calls, wrong = _case(system, folder, look)
            assert wrong == "same", wrong
            cases = [(name, at) for name in _ERRORS for at in range(1, calls + 1)]
            for name, at in extent.some(cases, look.__name__):
                wrong = _case(system, folder, look, at, getattr(errno, name))[1]
                tally.add(wrong, f"{look.__name__}, {name} at call {at} of {calls}")


def _restore(system: System, folder: str) -> str:
    restored = system.restore(folder)
    if restored is None:
        return "nothing: it returns the target, although checkpoints are there"
    found = system.number_of(restored)
    return "" if found == len(_STEPS) else f"lost: the value {found} is restored, expected {len(_STEPS)}"


def _list_steps(system: System, folder: str) -> str:
    found = sorted(system.steps(folder))
    return "" if found == list(_STEPS) else f"lost: the steps are {found}"


def _case(
    system: System, folder: str, look: Callable[[System, str], str], at: int = 0, error: int = 0
) -> tuple[int, str]:
    """Look in a fork where a call fails; return how many calls there were, and the outcome."""

    def hit() -> tuple[int, str]:
        system.use()
        shim.arm_reads(f"{folder}/run", at, error)
        try:
            with quiet():
                outcome = look(system, f"{folder}/run") or "same"
        except Exception as raised:
            outcome = _judge(system, raised)
        return shim.disarm_reads(), outcome

    ended = forks.run(hit)
    if ended.hung:
        return 0, "hung: it never returned"
    return ended.value or (0, ended.error or f"crash: it ended with {ended.code}")


def _judge(system: System, error: Exception) -> str:
    if not system.is_ours or isinstance(error, StorageError):
        return "found"
    return f"{'blamed' if isinstance(error, CheckpointError) else 'raw'}: {text_of(error)}"
