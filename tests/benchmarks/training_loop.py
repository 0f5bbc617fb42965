"""Training time that saves in the background cost: ``python -m tests.benchmarks.training_loop``, from the checkout."""

import argparse
import dataclasses
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from tests.benchmarks import disk, peers, results, sections, transformer
from tests.benchmarks.report import Table
from tests.benchmarks.sections import DATA, RESULTS
from tests.benchmarks.systems import FLAX, OURS, Checkpoints, be_quiet
from tests.benchmarks.workloads import Tree, Workload, workloads

SECTION = "## Training time lost by a save in the background"
SYSTEMS: tuple[Any, ...] = (*OURS, FLAX[0], peers.ASYNC, *peers.V1)
_ORBAX = tuple(system.name for system in SYSTEMS if isinstance(system, peers.Peer))
WORKLOADS = ("gpt2-jax", "gpt2-numpy", "gpt2+adamw")
# A step of this trains: too slow for CPUs.
TRAINED = "gpt2-trained"
_ROOT = Path(__file__).parents[2]
_EXPLAINED = """Each system has processes of its own, and systems take turns. A step reads and
writes every array once, on all cores; those on devices donate the state. *blocked* is how long the call took; *lost* is
what the call and all steps until the next save took beyond as many steps of the last third of that time, when the save
has long ended."""
_EXPLAINED_OF_GPUS = """Steps train GPT-2 on 8 times 1,024 random tokens, with the gradient and adamw, and donate the
state. *blocked* and *lost* are as above; what a save waits for the step before it is part of both."""
# Seconds from one save to the next: the memory of the one before has gone back to the machine by then.
_PAUSE = 8.0
# Orbax's best ÷ ours, and seconds that a call may block for each 0.5 GB.
_LOST_GOAL, _BLOCKED_GOAL = 4.0, 0.1


@dataclasses.dataclass(frozen=True)
class Loss:
    """What one save cost the loop, in seconds."""

    blocked: float  # until the call returned
    lost: float  # the call, and what steps took beyond those without a save


Losses = dict[str, list[Loss]]  # by system


def main(arguments: list[str] | None = None) -> None:
    """Measures all systems, prints tables, and with ``--write`` replaces this section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.training_loop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each system (2), of three saves each")
    parser.add_argument("--only", action="append", choices=(*WORKLOADS, TRAINED), metavar="NAME")
    parser.add_argument("--workdir", help="where to write checkpoints; decides the file system")
    parser.add_argument("--write", action="store_true", help=f"replace the section of {RESULTS.name}")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.workdir) as workdir:
        print("; ".join(f"{name} {fact}" for name, fact in disk.machine_facts(workdir).items()))
        found = {name: measure(name, options.rounds, workdir) for name in options.only or WORKLOADS}
    tables = [table(name, losses) for name, losses in found.items()]
    for one in tables:
        one.show()
    if options.write:
        on_cpu = os.environ["JAX_PLATFORMS"] == "cpu"
        section = SECTION if on_cpu else f"{SECTION}, on a GPU"
        said = f"`python -m tests.benchmarks.training_loop --rounds {options.rounds} --write`, three saves a round, "
        said += f"{_PAUSE:g} s apart. {_EXPLAINED if on_cpu else _EXPLAINED_OF_GPUS}"
        page, text = RESULTS.read_text(encoding="utf-8"), "\n\n".join([said, *(one.markdown() for one in tables)])
        RESULTS.write_text(sections.with_section(page, section, text), encoding="utf-8")
        if not on_cpu:
            return
        data = json.loads(DATA.read_text(encoding="utf-8"))
        DATA.write_text(results.as_text({**data, "losses": _entries(found)}), encoding="utf-8")


def _entries(found: dict[str, Losses]) -> list[dict[str, Any]]:
    return [
        {"workload": workload, "system": system}
        | {field.name: [round(getattr(loss, field.name), 6) for loss in losses] for field in dataclasses.fields(Loss)}
        for workload, of_systems in found.items()
        for system, losses in of_systems.items()
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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __spec__.name, "loop", workload, str(system), workdir, str(int(quick))],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{SYSTEMS[system].name} on {workload} failed:\n{done.stderr}")
    return [Loss(**one) for one in json.loads(done.stdout.rpartition("LOSSES ")[2])]


def table(name: str, found: Losses) -> Table:
    """Show what saves of a workload cost, beside the least that those of Orbax do."""
    workload = _workload(name, quick=False)
    best = min(statistics.median(loss.lost for loss in found[name]) for name in _ORBAX)
    allowed = _BLOCKED_GOAL * max(1.0, workload.nbytes / 0.5e9)
    rows = []
    for name, losses in found.items():
        lost, blocked = ([getattr(loss, field.name) for loss in losses] for field in reversed(dataclasses.fields(Loss)))
        row = [name, *(text for seconds in (blocked, lost) for text in _summary(seconds))]
        ratio = best / max(statistics.median(lost), 1e-3)
        is_met = ratio >= _LOST_GOAL and statistics.median(blocked) <= allowed
        is_ours = name in {system.name for system in OURS}
        rows.append((*row, f"{ratio:.2f}", ("yes" if is_met else "no") if is_ours else ""))
    columns = ("system", "blocked, median s", "min to max s", "lost, median s", "min to max s", "Orbax's best ÷ it")
    goal = f"≥ {_LOST_GOAL:g}, blocked ≤ {allowed:.2g} s"
    return Table(f"{workload.name} ({workload.summary})", (*columns, goal), rows)


def _workload(name: str, *, quick: bool) -> Workload:
    """Return a workload; `TRAINED` is that with adamw's state, which steps train."""
    all_workloads = {workload.name: workload for workload in workloads(quick=quick)}
    return dataclasses.replace(all_workloads["gpt2+adamw" if name == TRAINED else name], name=name)


def _summary(seconds: list[float]) -> tuple[str, str]:
    return f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}"


def _loop(workload: Workload, system: Any, workdir: str, saves: int, pause: float) -> list[Loss]:
    """Train in this process, with saves; the first one loads what is loaded once, and is not counted.

    Raises:
        AssertionError: what was saved last is not what the state was at that time.
    """
    begin = _beginning(system)
    state: Tree = workload.tree()
    step = _step(workload, state)
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


def _step(workload: Workload, state: Tree) -> Callable[[Tree], Tree]:
    if workload.name == TRAINED:
        return transformer.training_step(state)
    return _device_step() if workload.on_device else _host_step


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
    if isinstance(system, peers.BackgroundPeer):
        return lambda folder, tree: system.begin(os.path.join(folder, "checkpoint"), tree)
    assert isinstance(system, Checkpoints)
    flax.config.update("flax_use_orbax_checkpointing", system.orbax)
    manager = system.module.AsyncManager()

    def begin(folder: str, tree: Tree) -> Callable[[], Any]:
        system.module.save_checkpoint(folder, tree, 0, async_manager=manager)
        wait: Callable[[], Any] = manager.wait_previous_save
        return wait

    return begin


def run(arguments: list[str]) -> None:
    """The process of one system: prints ``LOSSES`` and what its saves cost."""
    name, system, workdir, quick = arguments
    be_quiet()
    workload = _workload(name, quick=bool(int(quick)))
    saves, pause = (1, 0.2) if int(quick) else (3, _PAUSE)
    losses = _loop(workload, SYSTEMS[int(system)], workdir, saves, pause)
    print(f"LOSSES {json.dumps([dataclasses.asdict(loss) for loss in losses])}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        run(sys.argv[2:])
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        main()
