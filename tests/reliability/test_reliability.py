"""The short form of `python -m tests.reliability`, and that its instruments show what happens."""

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.reliability import power_loss, shim
from tests.support.interpreters import ROOT

_ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
needs_shim = pytest.mark.skipif(bool(shim.why_not()), reason=shim.why_not() or "it is there")
needs_attributes = pytest.mark.skipif(
    not any(map(shim.holds_attributes, ("/dev/shm", tempfile.gettempdir()))),
    reason="no extended attributes, which hold the checksums of msgpack files",
)


def _command(*arguments: object) -> str:
    command = [sys.executable, "-m", "tests.reliability", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "names"),
    [
        pytest.param(0.03, "calls kills errors power", marks=[needs_shim, needs_attributes]),
        pytest.param(1, "reads", marks=needs_shim),
        pytest.param(0.015, "team_calls team_power", marks=needs_shim),
        (0.008, "reader overwrites writers soak"),
        pytest.param(0.005, "bytes flips fuzz", marks=needs_attributes),
    ],
)
def test_nothing_of_ours_is_lost(scale: float, names: str) -> None:
    """Whatever is injected, into one process or one of two, what was acknowledged restores, and nothing half is ever
    restored. What cannot be read is neither absent nor damaged, and every flipped bit changes nothing or is found."""
    _command("--ours", "--scale", scale, *(f"--only={name.replace('_', ' ')}" for name in names.split()))


@needs_shim
@pytest.mark.slow
def test_the_harness_finds_what_flax_loses() -> None:
    """Flax with the flag off syncs nothing (measured with strace), so that losing power loses what it acknowledged."""
    out = _command("--only", "power", "--scale", 0.005, "--system", "Flax, flag off")
    found = re.search(r"Flax, flag off +(\d+) of \d+ \((.*)\)", out)
    assert found is not None, out
    assert "unreadable" in found[2]


def _replay(*calls: tuple[Any, ...]) -> set[str]:
    """What may be on disk after calls: names and sizes."""
    disk = power_loss.Disk("/root")
    for op, inode, a, first, second, data in calls:
        disk.apply(power_loss.Call(op, inode, a, f"/root/{first}" if first else "/root", f"/root/{second}", data))
    shown = set()
    for tree in disk.losses(random.Random(0), 50):
        shown.add(" ".join(f"{name}={held[0].decode('latin-1')}" for name, held in tree.items()))
    return shown


CREATED = ("create", 1, 0, "a", "", b"")
WRITTEN = ("write", 1, 0, "a", "", b"data")
SYNCED = ("fsync", 1, 0, "a", "", b"")
NAMES_SYNCED = ("fsync", 9, 0, "", "", b"")


def test_losses_of_a_new_file() -> None:
    """Its name and its bytes are lost independently, unless each was synced."""
    bytes_lost = {"a=data", "a=", "a=da", "a=\0\0\0\0"}
    assert {"", *bytes_lost} <= _replay(CREATED, WRITTEN)
    assert _replay(CREATED, WRITTEN, SYNCED) == {"", "a=data"}
    assert bytes_lost <= (only_names := _replay(CREATED, NAMES_SYNCED, WRITTEN))
    assert "" not in only_names
    assert _replay(CREATED, WRITTEN, SYNCED, NAMES_SYNCED) == {"a=data"}


def test_losses_of_names() -> None:
    """Renames are lost one by one, in any order, and each of them is lost as a whole."""
    synced = (CREATED, WRITTEN, SYNCED, NAMES_SYNCED)
    other = (("create", 2, 0, "b", "", b""), ("write", 2, 0, "b", "", b"new"), ("fsync", 2, 0, "b", "", b""))
    assert _replay(*synced, *other, NAMES_SYNCED, ("rename", 0, 0, "b", "a", b"")) == {"a=data b=new", "a=new"}
    assert _replay(*synced, *other, ("rename", 0, 0, "b", "a", b"")) == {"a=data", "a=data b=new", "a=new"}
    assert _replay(*synced, *other, NAMES_SYNCED, ("exchange", 0, 0, "b", "a", b"")) == {
        "a=data b=new",
        "a=new b=data",
    }
    moved = _replay(*synced, ("rename", 0, 0, "a", "c", b""), ("unlink", 0, 0, "c", "", b""))
    assert moved == {"a=data", "c=data", ""}


TRACED = """
import json, os, sys
import flax
from tests.reliability import shim
from tests.reliability.workloads import SCENARIOS, SYSTEMS
system = SYSTEMS[int(sys.argv[2])]
system.use()
scenario = SCENARIOS[3]
os.mkdir(sys.argv[1] + "/run")
shim.arm(sys.argv[1] + "/run")
for number, save in enumerate(scenario.saves, 1):
    save.run(system, sys.argv[1] + "/run", number)
print(shim.disarm())
"""
CHANGES = "write,writev,pwrite64,pwritev,pwritev2,ftruncate,truncate,rename,renameat,renameat2,link,linkat,unlink,"
CHANGES += "unlinkat,rmdir,mkdir,mkdirat,fsync,fdatasync,sync_file_range,fallocate,setxattr,fsetxattr,lsetxattr,"
CHANGES += "symlink,symlinkat,copy_file_range,sendfile,mmap,msync,open,openat,creat,io_submit,io_uring_enter"


@needs_shim
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
@pytest.mark.parametrize("system", range(4))
def test_the_shim_sees_what_strace_sees(tmp_path: Path, system: int) -> None:
    """No call that changes the directory escapes it: of CPython, of TensorStore or of libc itself."""
    log, folder = tmp_path / "log", tmp_path / "folder"
    folder.mkdir()
    command = ["strace", "-f", "-y", "-o", str(log), "-e", f"trace={CHANGES}", sys.executable, "-c", TRACED]
    done = subprocess.run(
        [*command, str(folder), str(system)],
        cwd=ROOT,
        env=shim.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    seen = []
    for line in log.read_text(errors="replace").splitlines():
        if f"{folder}/run" not in line or "resumed>" in line:
            continue
        call = line.split(None, 1)[1].partition("(")[0]
        opens = call in ("open", "openat")
        if (opens and "O_CREAT" not in line and "O_TRUNC" not in line) or (call == "mmap" and "MAP_SHARED" not in line):
            continue
        seen.append(line)
    before = next(i for i, line in enumerate(seen) if "mkdir" in line) + 1
    assert len(seen[before:]) == int(done.stdout.split()[-1]), "\n".join(seen)
