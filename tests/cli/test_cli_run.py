"""``flax-ckpt run`` against python itself: the same program must not be able to tell them apart."""

import os
import py_compile
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "flax_ckpt_compat", "run"]
SHOW = """
import sys
print(sys.argv, sys.path[0], sorted(globals()), __name__, __file__, __package__, __cached__)
print(getattr(__spec__, "name", __spec__))
print(type(__loader__).__name__, vars(sys.modules["__main__"]) is globals())
"""
FAILS = """
def inner(x):
    return 1 / x
try:
    inner(0)
except ZeroDivisionError as error:
    raise LookupError("outer") from error
"""
PROBES = {
    "namespace": SHOW,
    "chained_traceback": FAILS,
    "syntax_error": "def f(:\n    pass\n",
    "indentation_error": "def f():\n        x = 1\n    y = 2\n",
    "latin1": "# -*- coding: latin-1 -*-\nprint(len('é'))\n",
    "exit_none": "import sys; sys.exit()",
    "exit_3": "import sys; sys.exit(3)",
    "exit_text": "import sys; sys.exit('so long')",
    "exit_300": "raise SystemExit(300)",
    "os_exit": "import os; print('lost?', flush=True); os._exit(7)",
    "interrupt": "import atexit; atexit.register(print, 'at exit'); print('text'); raise KeyboardInterrupt",
    "group": "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])",
    "base_exception": "class Stop(BaseException): pass\nraise Stop('x')",
    "own_hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\nraise ValueError",
    "thread_fails": "import threading\nt = threading.Thread(target=lambda: 1/0, name='t')\nt.start(); t.join()",
    "at_exit_order": "import atexit\natexit.register(print, 1)\natexit.register(print, 2)\nraise ValueError",
    "late_thread": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.1), print("late"))).start()
        1 / 0
        """,
    "future": "x: Undefined = 1",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "dataclass": """
        import dataclasses, typing
        @dataclasses.dataclass
        class A:
            x: "typing.ClassVar[int]" = 1
        print(A())
        """,
    "nothing_loaded": "import sys\nprint({'jax', 'flax', 'numpy'} & set(sys.modules))",
    "warning": "import warnings\nwarnings.warn('old', DeprecationWarning)\ndef f(): warnings.warn('x')\nf()",
    "source": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getmodule(f).__name__)",
    "stdin": "import sys\nprint(sys.stdin.read(), sys.stdin.isatty())",
    "unittest": """
        import unittest
        class Test(unittest.TestCase):
            def test(self):
                pass
        if __name__ == "__main__":
            unittest.main(argv=["x"], exit=True, testRunner=unittest.TextTestRunner(open("/dev/null", "w")))
        """,
    "real_interrupt": """
        import os, signal, time
        def wait():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        wait()
        """,
    "interrupt_while_a_pool_works": """
        import concurrent.futures, os, signal, threading, time
        ready = threading.Event()
        def work():
            ready.wait()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            print("finished")
        concurrent.futures.ThreadPoolExecutor(1).submit(work)
        def wait():
            for i in range(1000):
                ready.set() if i == 9 else time.sleep(0.01)
        try:
            wait()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("seen") from None
        """,
    "interrupt_again_at_exit": """
        import atexit, os, signal, threading, time
        def work():
            while threading.main_thread().is_alive():
                time.sleep(0.01)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        atexit.register(print, "at exit")
        threading.Thread(target=work).start()
        os.kill(os.getpid(), signal.SIGINT)
        """,
    "forkserver": """
        import concurrent.futures, multiprocessing
        def work(x):
            return x * x
        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                print(list(pool.map(work, [2, 3])))
        """,
    "teardown": """
        import json
        class Thing:
            def __del__(self):
                print("json is", "there" if json else "gone")
        thing = Thing()
        raise KeyboardInterrupt
        """,
    "teardown_without_error": """
        import json
        class Thing:
            def __del__(self):
                print("json is", "there" if json else "gone")
        thing = Thing()
        """,
    "end_of_file": "raise EOFError",
    "click": "import click\nprint(click.get_current_context(silent=True))",
    "spawn": """
        import multiprocessing
        def work(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [2, 3]))
        """,
}


def outcome(command: list[str], folder: Path, **environment: str) -> tuple[str, str, int]:
    """What a shell sees of a command: stdout, stderr, exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout, done.stderr, done.returncode


def assert_same(folder: Path, *arguments: str) -> tuple[str, str, int]:
    """Asserts that python and we do the same with these arguments."""
    expected = outcome([sys.executable, *arguments], folder)
    assert outcome([*RUN, *arguments], folder) == expected
    return expected


@pytest.mark.parametrize("name", PROBES)
def test_a_script_behaves_as_with_python(tmp_path: Path, name: str) -> None:
    """Output, traceback and exit code of a script are those of plain python."""
    encoding = "latin-1" if name == "latin1" else "utf-8"
    (tmp_path / "probe.py").write_text(textwrap.dedent(PROBES[name]), encoding=encoding)
    assert_same(tmp_path, "probe.py")


def test_an_interrupted_program_dies_of_the_signal(tmp_path: Path) -> None:
    """KeyboardInterrupt ends the process by SIGINT, on which shell loops stop."""
    (tmp_path / "probe.py").write_text("raise KeyboardInterrupt")
    assert assert_same(tmp_path, "probe.py")[2] == -signal.SIGINT


@pytest.mark.parametrize("arguments", [("--help",), ("-m", "x"), ("--", "a"), ("run", "--version"), ("",)])
def test_arguments_belong_to_the_script(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Whatever stands behind the script reaches it, also what looks like an option of ours."""
    (tmp_path / "probe.py").write_text(SHOW)
    assert_same(tmp_path, "probe.py", *arguments)


def test_a_script_finds_its_neighbours(tmp_path: Path) -> None:
    """sys.path starts with the script's folder, with symlinks resolved, from any working directory."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real/neighbour.py").write_text("print('found')")
    (tmp_path / "real/probe.py").write_text("import neighbour" + SHOW)
    (tmp_path / "link.py").symlink_to(tmp_path / "real/probe.py")
    assert assert_same(tmp_path, "real/probe.py")[0].startswith("found")
    assert_same(tmp_path, "link.py")


def test_two_dashes_end_the_options(tmp_path: Path) -> None:
    """Behind ``--`` stands a script, whatever it is called."""
    for name in ("hi.py", "-m", "--help"):
        (tmp_path / name).write_text(SHOW)
        assert_same(tmp_path, "--", name, "--", "-x")


@pytest.mark.parametrize("arguments", [("-",), ("--",), ("--", "-"), ("-", "x")])
def test_standard_input_is_no_program(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Where python would read the program from its standard input, the message names what is needed instead."""
    stdout, stderr, code = outcome([*RUN, *arguments], tmp_path)
    assert (stdout, code) == ("", 2)
    assert "a script file or -m MODULE is needed" in stderr


def test_safe_path_is_kept(tmp_path: Path) -> None:
    """With PYTHONSAFEPATH neither the script's folder nor the working directory gets onto sys.path."""
    (tmp_path / "probe.py").write_text("import sys; print([entry for entry in sys.path if 'pytest' in entry])")
    for command in ([sys.executable], RUN):
        assert outcome([*command, "probe.py"], tmp_path, PYTHONSAFEPATH="1") == ("[]\n", "", 0)


def test_modules_packages_folders_and_zips_run(tmp_path: Path) -> None:
    """-m MODULE, -m PACKAGE, a folder, a zip file and a .pyc file run as with python, tracebacks included."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/__main__.py").write_text(SHOW + FAILS)
    (tmp_path / "module.py").write_text(SHOW + FAILS)
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW + FAILS)
    py_compile.compile(str(tmp_path / "module.py"), str(tmp_path / "compiled.pyc"))
    for arguments in (["-m", "module", "--help"], ["-mmodule"], ["-m", "package", "x"], ["package"], ["program.zip"]):
        assert_same(tmp_path, *arguments)
    assert_same(tmp_path, "compiled.pyc")
    (tmp_path / "spawning.py").write_text(textwrap.dedent(PROBES["spawn"]))
    assert_same(tmp_path, "-m", "spawning")


def test_what_does_not_exist_is_reported_as_python_does(tmp_path: Path) -> None:
    """A missing script, an unreadable one, a missing module and a folder without __main__ get python's words."""
    (tmp_path / "empty").mkdir()
    for arguments in (["absent.py"], ["-m", "absent_module"], ["empty"], ["-m", "empty"], ["probe.py/x"]):
        assert_same(tmp_path, *arguments)
    assert outcome([*RUN, "absent.py"], tmp_path)[2] == 2


def test_the_script_gets_our_functions(tmp_path: Path) -> None:
    """Inside the program, spawned workers included, flax.training.checkpoints is ours, and only when imported."""
    (tmp_path / "probe.py").write_text(
        textwrap.dedent("""
        import multiprocessing, sys
        assert "jax" not in sys.modules
        from flax.training.checkpoints import save_checkpoint
        def whose(_):
            return save_checkpoint.__module__
        if __name__ == "__main__":
            print(whose(0))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(*pool.map(whose, [0]))
        """)
    )
    stdout, stderr, code = outcome([*RUN, "probe.py"], tmp_path)
    assert (stdout.split(), code) == (["flax_ckpt_compat.checkpoints"] * 2, 0), stderr


def test_a_program_works_although_orbax_does_not_import(tmp_path: Path) -> None:
    """With an orbax that fails at import, which Flax does not survive, the program saves and restores both formats."""
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax/__init__.py").write_text("raise AttributeError('jax has no DeviceArray')")
    (tmp_path / "probe.py").write_text(
        textwrap.dedent("""
        import flax, numpy as np
        from flax.training import checkpoints
        for step, flag in enumerate([False, True]):
            flax.config.update("flax_use_orbax_checkpointing", flag)
            checkpoints.save_checkpoint("saved", {"w": np.arange(3) + step}, step, keep=2)
            print(checkpoints.restore_checkpoint("saved", None)["w"])
        """)
    )
    assert outcome([sys.executable, "probe.py"], tmp_path)[2] == 1
    stdout, stderr, code = outcome([*RUN, "probe.py"], tmp_path)
    assert (stdout, code) == ("[0 1 2]\n[1 2 3]\n", 0), stderr
    assert "flax_ckpt_compat replaces it" in stderr


def test_typos_get_suggestions(tmp_path: Path) -> None:
    """A misspelt command or an option in the wrong place is answered with what was probably meant."""
    stdout, stderr, code = outcome([sys.executable, "-m", "flax_ckpt_compat", "dmeo"], tmp_path)
    assert (stdout, code) == ("", 2)
    assert "Did you mean 'demo'?" in stderr
    assert "after its name" in outcome([*RUN, "--steps", "x.py"], tmp_path)[1]


def test_help_is_quick(tmp_path: Path) -> None:
    """Help loads neither jax nor flax nor rich nor numpy."""
    code = (
        "import sys\nfrom flax_ckpt_compat.cli import main\ntry:\n    main(['--help'])\nfinally:\n"
        "    print({'jax', 'flax', 'rich', 'numpy', 'tensorstore', 'sklearn'} & set(sys.modules))"
    )
    stdout, stderr, exit_code = outcome([sys.executable, "-c", code], tmp_path)
    assert exit_code == 0, stderr
    assert stdout.endswith("set()\n")
