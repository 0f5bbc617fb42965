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


def assert_same(folder: Path, *arguments: str) -> tuple[str, str, int]:
    """Asserts that python and we do the same with these arguments."""
    expected = outcome([sys.executable, *arguments], folder)
    assert outcome([*RUN, *arguments], folder) == expected
    return expected


@pytest.mark.parametrize("name", PROBES)
def test_a_script_behaves_as_with_python(tmp_path: Path, name: str) -> None:
    """Python itself runs the script: output, traceback and exit code are those of plain python."""
    (tmp_path / "probe.py").write_text(textwrap.dedent(PROBES[name]))
    assert_same(tmp_path, "probe.py")


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert_same(tmp_path, "-c", "import sys; print(sys.argv, sys.path[0])", "-x")


@pytest.mark.slow
def test_what_does_not_exist_is_reported_as_python_does(tmp_path: Path) -> None:
    """A missing script, an unreadable one, a missing module and a folder without __main__ get python's words."""
    (tmp_path / "empty").mkdir()
    for arguments in (["absent.py"], ["-m", "absent_module"], ["empty"], ["-m", "empty"], ["probe.py/x"]):
        assert_same(tmp_path, *arguments)
    assert outcome([*RUN, "absent.py"], tmp_path)[2] == 2


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
