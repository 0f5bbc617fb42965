"""Run the programs of the corpus with the flag off and on, in one interpreter: which of them still do their job?"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any


def main_file(program: Path) -> Path | None:
    """Return the file of a program that runs, or None if it needs a package that nobody has."""
    files = [file for file in sorted(program.rglob("*.py")) if "__main__" in file.read_text()]
    return files[0] if files else None


def stand_in_for_tensorflow() -> dict[str, types.ModuleType]:
    """Return modules with the file functions of TensorFlow, which behave on a local disk as these do."""
    gfile: Any = types.ModuleType("tensorflow.io.gfile")

    def copy(source: str, target: str, overwrite: bool = False) -> None:
        if os.path.exists(target) and not overwrite:
            raise FileExistsError(target)
        shutil.copyfile(source, target)

    gfile.copy, gfile.remove, gfile.exists, gfile.isdir = copy, os.remove, os.path.exists, os.path.isdir
    gfile.walk, gfile.join, gfile.listdir, gfile.rmtree = os.walk, os.path.join, os.listdir, shutil.rmtree
    gfile.makedirs = lambda path: os.makedirs(path, exist_ok=True)
    gfile.rename, gfile.stat = os.replace, os.stat
    gfile.GFile = open
    gfile.glob = lambda pattern: __import__("glob").glob(pattern)
    package: Any = types.ModuleType("tensorflow")
    package.io = types.ModuleType("tensorflow.io")
    package.io.gfile = gfile
    modules = {"tensorflow": package, "tensorflow.io": package.io, "tensorflow.io.gfile": gfile}
    for name, module in modules.items():  # which etils looks for
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return modules


def run_program(file: Path, program: Path) -> dict[str, Any]:
    """Return what a program printed, and its error, with the lines of the program that it went through."""
    from flax_ckpt_compat import checkpoints  # noqa: F401 - loaded before modules are counted

    folder = tempfile.mkdtemp()
    workdir = os.path.join(folder, "run")
    os.mkdir(workdir)
    before, path, arguments = set(sys.modules), sys.path[:], sys.argv
    sys.path.insert(0, str(program))
    sys.argv = [str(file), workdir]
    printed, lines, error = io.StringIO(), [], ""
    module: dict[str, Any] = {"__name__": "__main__", "__file__": str(file)}
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(file.read_text(), str(file), "exec"), module)
    except Exception as raised:
        frames = traceback.extract_tb(raised.__traceback__)
        lines = [(str(Path(f.filename).relative_to(program)), f.lineno) for f in frames if str(program) in f.filename]
        error = type(raised).__name__
    finally:
        sys.path[:], sys.argv = path, arguments
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and str(program) in str(sys.modules[name].__file__):
                del sys.modules[name]
        shutil.rmtree(folder)
    return {"out": re.sub(re.escape(folder), "", printed.getvalue()), "error": error, "lines": lines}


def run_all(programs: list[str]) -> None:
    """Print, as JSON, what each program did by flag."""
    import logging

    import flax

    import flax_ckpt_compat

    flax_ckpt_compat.install()
    logging.disable(logging.CRITICAL)
    sys.modules.update(stand_in_for_tensorflow())
    results: dict[str, dict[str, Any]] = {}
    for one in map(Path, programs):
        file = main_file(one)
        assert file is not None
        for flag in (False, True):
            flax.config.update("flax_use_orbax_checkpointing", flag)
            results.setdefault(str(one), {})[str(flag)] = run_program(file, one)
    print(json.dumps(results))
