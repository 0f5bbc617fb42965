"""``flax-ckpt run`` against python itself: the same program must not be able to tell them apart."""

import os
import py_compile
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from flax_ckpt_compat.cli import main

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
    "exit_text": "import sys; sys.exit('so long')",
    "nothing_loaded": "import sys\nprint({'jax', 'flax', 'numpy'} & set(sys.modules))",
    "stdin": "import sys\nprint(sys.stdin.read(), sys.stdin.isatty())",
    "real_interrupt": """
        import os, signal, time
        def wait():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        wait()
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


PYTHONS = ("python", "python3.13t", "/nowhere/bin/python3", sys.executable)
REFUSED = [
    *((words, "a script file or -m MODULE is needed") for words in (["-"], ["--"], ["--", "-"], ["-", "x"])),
    *(([name, "train.py"], f"leave out {name}: the script runs with {sys.executable}") for name in PYTHONS),
    (["--", "python", "train.py"], f"leave out python: the script runs with {sys.executable}"),
    (["--steps", "x.py"], "after its name"),
]


@pytest.mark.parametrize(("words", "told"), REFUSED)
def test_what_is_no_program(words: list[str], told: str) -> None:
    """Standard input, python before its script, and a program's options before it: the message says what to do."""
    refused = CliRunner().invoke(main, ["run", *words])
    assert (refused.exit_code, told in refused.stderr) == (2, True), refused.stderr
    assert refused.stderr.startswith("Usage: ")


def test_safe_path_is_kept(tmp_path: Path) -> None:
    """With PYTHONSAFEPATH neither the script's folder nor the working directory gets onto sys.path."""
    (tmp_path / "probe.py").write_text("import sys; print([entry for entry in sys.path if 'pytest' in entry])")
    for command in ([sys.executable], RUN):
        assert outcome([*command, "probe.py"], tmp_path, PYTHONSAFEPATH="1") == ("[]\n", "", 0)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with each of the probes, and programs of every form, some with names like options."""
    files = {f"{name}.py": textwrap.dedent(code) for name, code in PROBES.items()}
    files |= dict.fromkeys(("hi.py", "-m", "--help"), SHOW)
    files |= {"real/neighbour.py": "print('found')", "real/probe.py": "import neighbour" + SHOW}
    files |= {"package/__init__.py": "", "package/__main__.py": SHOW + FAILS, "module.py": SHOW + FAILS}
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    (tmp_path / "link.py").symlink_to(tmp_path / "real/probe.py")
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW + FAILS)
    py_compile.compile(str(tmp_path / "module.py"), str(tmp_path / "compiled.pyc"))
    return tmp_path


LINES = [f"{name}.py" for name in PROBES]
# sys.path starts with the script's folder, with symlinks resolved; behind -- stands a script, whatever it is called.
LINES += ["real/probe.py", "link.py", "-- hi.py -- -x", "-- -m -- -x", "-- --help -- -x"]
# Whatever stands behind the script is its own, also what looks like an option of ours.
SLOW_LINES = [f"namespace.py {words}" for words in ("--help", "-m x", "-- a", "run --version")]
SLOW_LINES += ["-m module --help", "-mmodule", "-m package x", "package", "program.zip", "compiled.pyc", "-m spawn"]
# What does not exist is reported in python's words.
SLOW_LINES += ["absent.py", "-m absent_module", "empty", "-m empty", "hi.py/x"]


@pytest.mark.parametrize("line", [*LINES, *(pytest.param(line, marks=pytest.mark.slow) for line in SLOW_LINES)])
def test_a_program_behaves_as_with_python(programs: Path, line: str) -> None:
    """Python itself runs it: output, traceback and exit code are those of plain python."""
    expected = outcome([sys.executable, *line.split()], programs)
    assert outcome([*RUN, *line.split()], programs) == expected
    assert ("found" in expected[0]) == (line in ("real/probe.py", "link.py"))
    assert line != "absent.py" or expected[2] == 2


@pytest.mark.slow
@pytest.mark.parametrize("words", [["hi.py", ""], ["-c", "import sys; print(sys.argv, sys.path[0])", "-x"]])
def test_words_that_are_no_names(programs: Path, words: list[str]) -> None:
    """Empty ones, and code."""
    assert outcome([*RUN, *words], programs) == outcome([sys.executable, *words], programs)


WHOSE = "from flax.training import checkpoints; print(checkpoints.save_checkpoint.__module__)"
OURS = "flax_ckpt_compat.checkpoints"
# The same, without the seconds that the import of Flax takes.
WAITS = "import sys; print(any('sitecustomize' in getattr(one, '__module__', '') for one in sys.meta_path))"


@pytest.mark.parametrize(
    ("show", "shown"), [(WAITS, "True"), pytest.param(WHOSE, OURS, marks=pytest.mark.slow)], ids=["waits", "whose"]
)
def test_the_script_gets_our_functions(tmp_path: Path, show: str, shown: str) -> None:
    """Inside the program, workers and programs that it starts included, flax.training.checkpoints is ours."""
    (tmp_path / "probe.py").write_text(
        textwrap.dedent(f"""
        import multiprocessing, subprocess, sys
        assert "jax" not in sys.modules
        def whose(_):
            exec({show!r})
            sys.stdout.flush()
        if __name__ == "__main__":
            whose(0)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                pool.map(whose, [0])
            subprocess.run([sys.executable, "-c", {show!r}], check=True)
        """)
    )
    stdout, stderr, code = outcome([*RUN, "probe.py"], tmp_path)
    assert (stdout.split(), code) == ([shown] * 3, 0), stderr


@pytest.mark.slow
def test_the_folder_on_pythonpath_is_enough(tmp_path: Path) -> None:
    """The folder that ``--pythonpath`` prints installs our functions in a plain python, and is not on sys.path."""
    folder = outcome([*RUN, "--pythonpath"], tmp_path)[0].strip()
    code = f"import sys; {WHOSE}; print(any('cli' in entry for entry in sys.path), 'sitecustomize' in sys.modules)"
    stdout, stderr, _ = outcome([sys.executable, "-c", code], tmp_path, PYTHONPATH=os.pathsep.join((folder, str(ROOT))))
    assert stdout.split() == [OURS, "False", "False"], stderr


@pytest.mark.parametrize(
    "own",
    ["print('own', __file__, __name__)", "1 / 0", pytest.param("import no_such_module", marks=pytest.mark.slow)],
)
def test_the_users_own_sitecustomize_runs(tmp_path: Path, own: str) -> None:
    """A sitecustomize of the user's runs in its own module; where it fails, Python reports that as ever."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(own)
    (tmp_path / "probe.py").write_text("import sys; print('sitecustomize' in sys.modules)\n" + WAITS)
    path = os.pathsep.join((str(tmp_path / "site"), str(ROOT)))
    stdout, stderr, code = outcome([sys.executable, "probe.py"], tmp_path, PYTHONPATH=path)
    assert stdout.endswith("False\n")
    expected = stdout.removesuffix("False\n") + "True\n", stderr, code
    path = os.pathsep.join((outcome([*RUN, "--pythonpath"], ROOT)[0].strip(), path))
    assert outcome([sys.executable, "probe.py"], tmp_path, PYTHONPATH=path) == expected


def test_a_python_without_us_is_not_disturbed(tmp_path: Path) -> None:
    """Where flax_ckpt_compat cannot be imported, a warning says so, and Flax's functions stay."""
    (tmp_path / "blocked/flax_ckpt_compat").mkdir(parents=True)
    (tmp_path / "blocked/flax_ckpt_compat/__init__.py").write_text("raise ImportError('not for this Python')")
    (tmp_path / "blocked/flax/training").mkdir(parents=True)  # the real one takes seconds to import
    for package in ("flax", "flax/training"):
        (tmp_path / "blocked" / package / "__init__.py").touch()
    (tmp_path / "blocked/flax/training/checkpoints.py").write_text("def save_checkpoint(): ...")
    (tmp_path / "probe.py").write_text(WHOSE)
    folder = outcome([*RUN, "--pythonpath"], tmp_path)[0].strip()
    path = os.pathsep.join((folder, str(tmp_path / "blocked")))
    stdout, stderr, code = outcome([sys.executable, "probe.py"], tmp_path, PYTHONPATH=path)
    assert (stdout, code) == ("flax.training.checkpoints\n", 0), stderr
    assert "Flax's checkpoints are not replaced: not for this Python" in stderr


@pytest.mark.slow
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
    stdout, stderr, code = outcome([*RUN, "probe.py"], tmp_path)
    assert (stdout, code) == ("[0 1 2]\n[1 2 3]\n", 0), stderr
    assert "flax_ckpt_compat replaces it" in stderr
