"""A checkpoint with a folder of arrays is replaced by a process that is killed at every step on the way."""

from pathlib import Path

import pytest

from tests.support.saves import run_python

# The parent imports; each writer and each checker is a fork of it, because only those may start threads.
KILLS = """
import os, shutil, signal, sys, time, traceback
import numpy as np, tensorstore
from flax_ckpt_compat._save import retention
from flax_ckpt_compat._core.local import atomic as files, temporaries
from flax_ckpt_compat._discovery.saved_steps import checkpoint_dir
from flax_ckpt_compat.legacy import BACKEND
from tests.support.spread import OPTIONS, Spread, load, save
from tests.support.trees import to_branches

root, before, after = sys.argv[1:4]
folder = os.path.join(root, "steps")
path = os.path.join(folder, "checkpoint_5")

def put(kind, n):
    if kind == "arrays":
        save(path, {"n": n, "a": {"b": Spread(np.full(4, n)), "c": Spread(np.full((2, 3), n, np.float32))}})
        return
    temporary = files.temporary_path(path)
    if kind == "directory":
        os.mkdir(temporary)
        with open(os.path.join(temporary, "n"), "w") as file:
            file.write(str(n))
        files.publish(temporary, path)
    else:
        BACKEND.write(temporary, BACKEND.prepare(to_branches({"n": n, "a": np.full(4, n)})), OPTIONS)
        files.publish(temporary, path)

def found():
    if not os.path.lexists(path):
        return 0
    if os.path.isdir(path):
        return int(open(os.path.join(path, "n")).read())
    values = load(path)
    n = values.pop(("n",))
    assert len(values) == (1 if ("a",) in values else 2)
    assert all((value == n).all() for value in values.values()), values
    return n

def kinds(n):
    return {1: before, 2: after, 3: "arrays", 4: "file"}[n]

def check_tidy(n):
    # One checkpoint, and of its arrays nothing but two with two chunks each.
    arrays = [name for _, _, names in os.walk(path + "_gda") for name in names]
    assert sorted(arrays) == sorted([".zarray", "0", "1", ".zarray", "0.0", "1.0"] * (kinds(n) == "arrays")), arrays
    expected = ["checkpoint_5"] + ["checkpoint_5_gda"] * (kinds(n) == "arrays")
    assert sorted(os.listdir(folder)) == expected, os.listdir(folder)

def first():
    os.mkdir(folder)
    if before == "nested":
        put("arrays", 0)
        put("arrays", 1)
    elif before != "none":
        put(before, 1)

def write(last):
    count = 0
    def wrap(function):
        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return counted
    def count_all():
        for name in ("open", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync", "writev"):
            setattr(os, name, wrap(getattr(os, name)))
        files.exchange = wrap(files.exchange)
    publish = files.publish
    def count_and_publish(*arguments, **options):
        count_all()
        publish(*arguments, **options)
    # Once with all of the writing, which goes on in temporaries; else what follows it.
    if before == "none":
        count_all()
    else:
        files.publish = count_and_publish
    put(after, 2)

def look(killed, step):
    n = found()  # readers come before any clean-up, too
    assert n in (0 if before == "none" else 1, 2), n
    files.remove_stale(folder)
    assert found() == n
    temporaries._STALE_SECONDS = -1  # arrays without their file stay for a day
    retention._remove_orphaned_arrays(checkpoint_dir(folder, "checkpoint_"), os.listdir(folder))
    if n:
        check_tidy(n)
    else:
        assert os.listdir(folder) == [], os.listdir(folder)
    if not killed:
        assert n == 2
    for n in (3, 4) if step % 4 == 0 or not killed else ():
        put(kinds(n), n)
        assert found() == n
        check_tidy(n)

if before == "nested":
    kinds = lambda n: {1: "arrays", 2: after, 3: "arrays", 4: "file"}[n]

def fork(function, *arguments):
    child = os.fork()
    if not child:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

every = int(sys.argv[4])
steps, killed = 1 - every, True
assert fork(first) == 0
shutil.copytree(folder, folder + ".first")
while killed:
    steps += every
    shutil.rmtree(folder)
    shutil.copytree(folder + ".first", folder)
    code = fork(write, steps)
    assert code in (0, -signal.SIGKILL), (steps, code)
    killed = code != 0
    assert fork(look, killed, steps) == 0, steps
print(steps)
"""


KINDS = [
    ("none", "arrays"), ("arrays", "arrays"), ("nested", "arrays"), ("arrays", "file"), ("file", "arrays"),
    ("directory", "arrays"), ("arrays", "directory"),
]  # fmt: skip


# The first save is a part of all, and what is replaced by arrays is a file, a directory, or such arrays themselves.
OTHERS = [("none", "arrays"), ("arrays", "arrays"), ("arrays", "directory")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "before", "after"),
    [
        pytest.param(every, *kinds, marks=pytest.mark.slow if every == 1 or kinds in OTHERS else ())
        for every in (8, 1)
        for kinds in KINDS
    ],
)
def test_killed_at_every_step(tmp_path: Path, before: str, after: str, every: int) -> None:
    """The old checkpoint or the new one restores, whole; the next writer removes all that is left of the other."""
    out, _ = run_python(KILLS, tmp_path, before, after, every, PYTHONWARNINGS="ignore")
    assert int(out) > 5
