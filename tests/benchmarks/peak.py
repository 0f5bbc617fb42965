"""Peak memory above the live tree, of one operation in a fresh process."""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.lineup import FILES, ORBAX
from tests.benchmarks.peers import V1
from tests.benchmarks.series import Entry
from tests.benchmarks.systems import FLAX, OURS, RESTORE, SAVE, System
from tests.benchmarks.workloads import Workload, workloads

ROOT = Path(__file__).parents[2]
OPERATIONS = (SAVE, RESTORE)
_SYSTEMS: tuple[System, ...] = (*OURS, FLAX[0], *ORBAX, *FILES)
# Each figure is a process of its own: all systems on one large tree, fewer on the rest.
MEASURED: dict[str, tuple[System, ...]] = {
    "gpt2-jax": _SYSTEMS,
    "gpt2-numpy": (*OURS, *FLAX),
    "gpt2+adamw": OURS,
    "array": OURS,
    "leaves-jax": (*OURS, *FLAX, *V1),
}


def peaks(chosen: list[Workload], workdir: str, say: Callable[[str], None], *, quick: bool) -> list[Entry]:
    """The peaks of all systems and operations on some workloads: workload, operation, system, bytes (None: unknown)."""
    entries = []
    for workload in chosen:
        for operation in OPERATIONS:
            for system in MEASURED.get(workload.name, ()):
                say(f"{workload.name}: memory, {operation}, {system.name}")
                peak = above_tree(workload, system, operation, workdir, quick=quick)
                entries.append(
                    {"workload": workload.name, "operation": operation, "system": system.name, "bytes": peak}
                )
    return entries


def above_tree(workload: Workload, system: System, operation: str, workdir: str, *, quick: bool) -> int | None:
    """Bytes by which memory rose above all that is alive afterwards.

    Args:
        workload: what is saved or restored.
        system: by what.
        operation: ``save`` or ``restore``.
        workdir: where to put the checkpoint.
        quick: whether the workload is one of the quick ones.

    Returns:
        The number, or None where the system cannot say.
    """
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    with tempfile.TemporaryDirectory(dir=workdir) as folder:
        if operation == RESTORE:
            system.save(folder, workload.tree())
        arguments = [workload.name, system.name, operation, folder, "quick" if quick else "full"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.peak", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    return int(json.loads(done.stdout.rpartition("PEAK ")[2]))


def _measure(workload: Workload, system: System, operation: str, folder: str) -> int:
    _warm_up(workload, system)
    tree = workload.tree() if operation == SAVE else workload.target()
    gc.collect()
    before = _reset_high_water()
    if operation == SAVE:
        system.save(folder, tree)
        return _status("VmHWM") - before
    restored = system.restore(folder, tree)
    grown = _status("VmHWM") - before
    del tree
    return grown - (workload.nbytes if restored else 0)


def _warm_up(workload: Workload, system: System) -> None:
    """Loads whatever the system loads at its first call."""
    (small,) = [one for one in workloads(quick=True) if one.name == workload.name]
    with tempfile.TemporaryDirectory() as warm:
        system.save(warm, small.tree())
        system.restore(warm, small.target())


def _reset_high_water() -> int:
    """Makes VmHWM count anew; returns the memory in use."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def main(arguments: list[str]) -> None:
    """The fresh process: measures, prints ``PEAK`` and the number of bytes."""
    workload_name, system_name, operation, folder, size = arguments
    (workload,) = [one for one in workloads(quick=size == "quick") if one.name == workload_name]
    (system,) = [one for one in _SYSTEMS if one.name == system_name]
    result: Any = _measure(workload, system, operation, folder)
    print(f"PEAK {json.dumps(result)}")


if __name__ == "__main__":
    main(sys.argv[1:])
