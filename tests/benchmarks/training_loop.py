"""Training time that saves in the background cost: ``python -m tests.benchmarks.training_loop``, from the checkout."""

import argparse
import dataclasses
import functools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import flax
import jax
import numpy as np

from tests.benchmarks import disk, peers, report
from tests.benchmarks.systems import FLAX, OURS, Checkpoints, be_quiet
from tests.benchmarks.workloads import Tree, Workload, workloads
from tests.support.interpreters import run_python

SYSTEMS: tuple[Any, ...] = (*OURS, FLAX[0], peers.ASYNC, *peers.V1)
WORKLOADS = ("gpt2-jax", "gpt2-numpy", "gpt2+adamw")
# Seconds from one save to the next: the memory of the one before has gone back to the machine by then.
_PAUSE = 8.0


@dataclasses.dataclass(frozen=True)
class Loss:
    """What one save cost the loop, in seconds."""

    blocked: float  # until the call returned
    lost: float  # the call, and what steps took beyond those without a save


Losses = dict[str, list[Loss]]  # by system


def main(arguments: list[str] | None = None) -> None:
    """Measures all systems, prints tables, and with ``--write`` replaces these of RESULTS.md and README."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.training_loop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each system (2), of three saves each")
    parser.add_argument("--only", action="append", choices=WORKLOADS, metavar="NAME")
    parser.add_argument("--workdir", help="where to write checkpoints; decides the file system")
    parser.add_argument("--write", action="store_true", help="write RESULTS.md, results.json and README's table")
    options, chosen = parser.parse_args(arguments), {one.name: one for one in workloads(quick=False)}
    lost: list[report.Entry] = []
    with tempfile.TemporaryDirectory(dir=options.workdir) as workdir:
        print("; ".join(f"{name} {fact}" for name, fact in disk.machine_facts(workdir).items()))
        for name in options.only or WORKLOADS:
            entries = _entries(name, measure(name, options.rounds, workdir))
            print(
                report.losses_table(entries, {"title": chosen[name].summary, "nbytes": chosen[name].nbytes}).markdown()
            )
            lost += entries
    if options.write:
        report.write({**json.loads(report.DATA.read_text(encoding="utf-8")), "losses": lost})


def _entries(workload: str, found: Losses) -> list[report.Entry]:
    """The losses of a workload for results.json: seconds of each save, by system."""
    return [
        {"workload": workload, "system": system}
        | {field.name: [round(getattr(loss, field.name), 6) for loss in losses] for field in dataclasses.fields(Loss)}
        for system, losses in found.items()
    ]


def measure(workload: str, rounds: int, workdir: str, *, quick: bool = False) -> Losses:
    """Run each system in processes of its own, by turns; return what each save cost."""
    found: Losses = {system.name: [] for system in SYSTEMS}
    for number in range(rounds):
        for index in random.Random(number).sample(range(len(SYSTEMS)), len(SYSTEMS)):
            os.sync()
            found[SYSTEMS[index].name] += _in_new_process(workload, index, workdir, quick=quick)
    return found


def _in_new_process(workload: str, system: int, workdir: str, *, quick: bool) -> list[Loss]:
    program = "import sys; from tests.benchmarks import training_loop; training_loop.run(*sys.argv[1:])"
    arguments = (workload, system, workdir, int(quick))
    variables = {"PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    printed, _ = run_python(program, *arguments, fresh=True, timeout=1800, **variables)
    return [Loss(**one) for one in json.loads(printed.rpartition("LOSSES ")[2])]


def _loop(workload: Workload, system: Any, workdir: str, saves: int, pause: float) -> list[Loss]:
    """Train in this process, with saves; the first one loads what is loaded once, and is not counted.

    Raises:
        AssertionError: what was saved last is not what the state was at that time.
    """
    begin = _beginning(system)
    state: Tree = workload.tree()
    step = _device_step() if workload.on_device else _host_step
    for _ in range(3):
        state = step(state)
    losses = []
    for number in range(saves + 1):
        with tempfile.TemporaryDirectory(dir=workdir) as folder:
            expected = _smallest(state)
            before = time.perf_counter()
            wait = begin(folder, state)
            blocked = time.perf_counter() - before
            marks = [time.perf_counter()]
            while marks[-1] < before + pause:
                state = step(state)
                marks.append(time.perf_counter())
            steps = np.diff(marks)
            # The mean: a median leaves out what slows single steps down at all times, and would count it as lost.
            quiet = float(np.mean(steps[-max(1, len(steps) // 3) :]))
            waited = time.perf_counter()
            wait()
            late = time.perf_counter() - waited  # a save that has not ended by now goes on costing time
            losses.append(Loss(blocked, marks[-1] - before - len(steps) * quiet + late))
            if number == saves:
                np.testing.assert_array_equal(_smallest(system.restore(folder, state)), expected)
            del wait
    return losses[1:]


def _smallest(tree: Tree) -> np.ndarray[Any, Any]:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "ndim", 0)]
    return np.array(min(arrays, key=lambda leaf: leaf.size))


def _device_step() -> Callable[[Tree], Tree]:
    @functools.partial(jax.jit, donate_argnums=0)
    def step(leaves: list[Any]) -> list[Any]:
        return [leaf * 0.999 + 1e-6 if jax.numpy.issubdtype(leaf.dtype, np.floating) else leaf + 1 for leaf in leaves]

    def stepped(tree: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, jax.block_until_ready(step(leaves)))

    return stepped


def _host_step(tree: Tree) -> Tree:
    for leaf in jax.tree.leaves(tree):
        np.multiply(leaf, np.float32(0.999), out=leaf)
    return tree


def _beginning(system: Any) -> Callable[[str, Tree], Callable[[], Any]]:
    """Return what begins a save into a fresh folder and returns a wait for its end."""
    if isinstance(system, peers.Peer):
        begin_peer = system.begin
        assert begin_peer is not None
        return lambda folder, tree: begin_peer(os.path.join(folder, "checkpoint"), tree)
    assert isinstance(system, Checkpoints)
    flax.config.update("flax_use_orbax_checkpointing", system.orbax)
    manager = system.module.AsyncManager()

    def begin(folder: str, tree: Tree) -> Callable[[], Any]:
        system.module.save_checkpoint(folder, tree, 0, async_manager=manager)
        wait: Callable[[], Any] = manager.wait_previous_save
        return wait

    return begin


def run(name: str, system: str, workdir: str, quick: str) -> None:
    """The process of one system: prints ``LOSSES`` and what its saves cost."""
    be_quiet()
    (workload,) = [one for one in workloads(quick=bool(int(quick))) if one.name == name]
    saves, pause = (1, 0.2) if int(quick) else (3, _PAUSE)
    losses = _loop(workload, SYSTEMS[int(system)], workdir, saves, pause)
    print(f"LOSSES {json.dumps([dataclasses.asdict(loss) for loss in losses])}")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
