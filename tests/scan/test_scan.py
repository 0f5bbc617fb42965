"""`flax-ckpt scan`: what each small program asks for, line by line; files that cannot be read; --fix; the command."""

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flax_ckpt_compat._scan import ScanReport, scan
from flax_ckpt_compat._scan.findings import NOTHING
from flax_ckpt_compat._scan.fix import fix
from flax_ckpt_compat.cli import main
from tests.support.interpreters import run_python

HEAD = """\
import functools, glob, os, re, shutil, subprocess, time
from pathlib import Path
from flax.training import checkpoints
"""
# Name → code after `HEAD`. "# change: kind" is a line that breaks once checkpoints are directories, "# look: kind" one
# that may. Every other line asks for nothing.
PROGRAMS = {
    "remove": """
        path = checkpoints.save_checkpoint(d, s, 1)
        os.remove(path)  # change: remove
        Path(path).unlink()  # change: remove
        os.remove(checkpoints.latest_checkpoint(d))  # change: remove
        os.remove(os.path.join(d, f"checkpoint_{step}"))  # change: remove
        os.remove(d + "/checkpoint_%d" % step)  # change: remove
        os.remove("{}/checkpoint_{}".format(d, step))  # change: remove
        os.remove(backup)  # look: remove
        os.remove(os.path.join(d, "log.txt"))
        shutil.rmtree(path)
    """,
    "other names of the API": """
        from flax.training.checkpoints import latest_checkpoint as newest, save_checkpoint
        save = functools.partial(checkpoints.save_checkpoint, keep=3)
        os.remove(newest(d))  # change: remove
        one = save_checkpoint(d, s, 1)
        shutil.copy(one, "/backup")  # change: copy
    """,
    "kept in containers": """
        class Saver:
            def save(self, state, step):
                self.saved.append(checkpoints.save_checkpoint(self.d, state, step))
                if len(self.saved) > 3:
                    os.remove(self.saved.pop(0))  # change: remove
            def last(self):
                return os.path.getsize(self.saved[-1])  # change: size
    """,
    "through functions": """
        def newest(d):
            return checkpoints.latest_checkpoint(d)
        def drop(where):
            os.unlink(where)  # change: remove
        drop(newest("/runs"))
        list(map(os.remove, [newest("/runs")]))  # change: remove
    """,
    "copy": """
        path = checkpoints.latest_checkpoint(d)
        shutil.copy2(path, "/backup")  # change: copy
        shutil.copyfile(src=path, dst="/backup")  # change: copy
        os.link(path, pinned)  # change: copy
        shutil.copytree(path, "/backup")
        shutil.move(path, "/backup")
        shutil.copy(config, "/backup")  # look: copy
        shutil.copy("/a/config.json", "/backup")
    """,
    "open": """
        path = checkpoints.latest_checkpoint(d)
        with open(path, "rb") as f:  # change: open
            f.read()
        Path(path).read_bytes()  # change: open
        open(data, mode="rb")  # look: open
        open(data)
        open(path + ".json")
        with open(path, "wb") as f:
            pass
    """,
    "asked and measured": """
        path = checkpoints.latest_checkpoint(d)
        os.path.isfile(path)  # change: is-file
        Path(path).is_file()  # change: is-file
        print(os.path.getsize(path) / 1e6, os.stat(path).st_size)  # change: size
        print(os.path.getsize(path) > 0, path.stat().st_size > 0, os.stat(path).st_mtime)
        os.path.exists(path)
    """,
    "uploads": """
        path = checkpoints.latest_checkpoint(d)
        artifact.add_file(path)  # change: upload
        blob.upload_from_filename(filename=path)  # change: upload
        bucket.put(path)  # look: wrapped
        artifact.add_dir(path)
    """,
    "shell": """
        path = checkpoints.latest_checkpoint(d)
        os.system(f"cp {path} /backup; echo done")  # change: shell
        os.system("cp runs/checkpoint_1 /backup/")  # change: shell
        os.system("rm a runs/checkpoint_1 b")  # change: shell
        subprocess.run(["gsutil", "cp", path, bucket], check=True)  # change: shell
        subprocess.check_call(f"rm {path}", shell=True)  # change: shell
        os.system(f"sha256sum {path} > sums.txt")  # change: shell
        subprocess.run(["gsutil", "cp", "-r", path, bucket])
        os.system(f"rm -rf {path}")
        os.system(f"aws s3 cp --recursive {path} {bucket}")
        os.system(f"tar -cf all.tar {path}")
        subprocess.run(["python", "train.py"])
    """,
    "patterns": """
        for old in glob.glob(os.path.join(d, "checkpoint_*")):  # look: glob
            os.remove(old)  # change: remove
        glob.glob(f"{d}/checkpoint*")  # look: glob
        glob.glob("runs/check*")  # look: glob
        [p.unlink() for p in Path(d).glob("checkpoint_[0-9]*")]  # look: glob # change: remove
        for image in glob.glob(f"{d}/*.png"):
            os.remove(image)
        glob.glob("model*")
        glob.glob("events.out.*")
    """,
    "a prefix of the project": """
        PREFIX = "vae_"
        checkpoints.save_checkpoint(d, s, 1, prefix=PREFIX)
        glob.glob("vae*")  # look: glob
        os.remove(f"{d}/{PREFIX}{step}")  # change: remove
        os.remove(f"{d}/vae_{step}.png")
        checkpoints.save_checkpoint(d, s, 1, "gan_")
        checkpoints.latest_checkpoint(d, "ema_")
        os.remove(f"{d}/gan_{step}")  # change: remove
        os.remove(f"{d}/ema_{step}")  # change: remove
    """,
    "tests of a listing": """
        def clean(d):
            for name in sorted(os.listdir(d)):  # look: glob
                if name.startswith("checkpoint_"):
                    os.remove(os.path.join(d, name))  # change: remove
                elif name.endswith(".tmp"):
                    os.remove(os.path.join(d, name))
            for checkpoint_filename in os.listdir(d):  # look: glob
                if checkpoint_filename.startswith("replay_buffer."):
                    os.remove(os.path.join(d, checkpoint_filename))
        def steps(d):
            return [e.name for e in os.scandir(d) if re.match(r"checkpoint_(\\d+)", e.name)]  # look: glob
        def find(d):
            for folder, _, files in os.walk(d):  # change: glob
                yield from (name for name in files if name.startswith("checkpoint_"))
        print(os.listdir(d))
    """,
    "directories of a run": """
        def clean(d):
            for name in os.listdir(d):
                path = os.path.join(d, name)
                if os.path.isdir(path):
                    shutil.rmtree(path)  # look: remove-folders
        shutil.rmtree("/tmp/cache")
    """,
    "both kinds": """
        path = checkpoints.latest_checkpoint(d)
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        if os.path.isdir(path):
            print("a directory")
        else:
            open(path, "rb")
        try:
            os.remove(path)
        except IsADirectoryError:
            shutil.rmtree(path)
        def kind(path):
            if os.path.isdir(path):
                return "orbax"
            return open(path, "rb").read(1)
        def copies(fs, folder):
            if not os.path.isdir(folder):
                shutil.rmtree("/tmp/cache")
            fs.put_file(path, folder)  # change: copy
            os.link(path, folder)  # change: copy
        def each(fs):
            fs.rm(path, recursive=True) if fs.isdir(path) else fs.rm_file(path)
    """,
    "names that nothing here binds": """
        from common import *
        gfile.remove(f"{d}/checkpoint_1")  # change: remove
        self.shutil.copy(f"{d}/checkpoint_1", b)  # change: copy
    """,
    "spelling": """
        with open(args.checkpoint_path, "rb") as f:  # change: open
            pass
        os.remove(old_ckpt)  # change: remove
        os.listdir(ckpt_dir)
    """,
}


def _asked(report: ScanReport) -> dict[tuple[str, int], set[tuple[str, str]]]:
    found: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for one in report.findings:
        if one.action != NOTHING:
            found.setdefault((Path(one.path).name, one.line), set()).add((one.action, one.kind))
    return found


def _announced(name: str, code: str) -> dict[tuple[str, int], set[tuple[str, str]]]:
    found: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for number, line in enumerate(code.splitlines(), 1):
        for action, kinds in re.findall(r"# (change|look): ([\w -]+?)(?= #|$)", line):
            asked = {"change": "change", "look": "check"}[action]
            found.setdefault((name, number), set()).update((asked, kind) for kind in kinds.split())
    return found


def _write(folder: Path, **files: str) -> Path:
    for name, code in files.items():
        (folder / f"{name}.py").write_text(code)
    return folder


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path) -> None:
    """Each line that breaks is listed with its kind, and no other line is."""
    code = HEAD + textwrap.dedent(PROGRAMS[name])
    assert _asked(scan([_write(tmp_path, train=code)])) == _announced("train.py", code)


def test_modules_one_import_away(tmp_path: Path) -> None:
    """Listed are those that a user of the API imports, those that import one, and those that name its checkpoints."""
    files = {
        "train": "from helpers import drop\nimport jax\nfrom flax.training import checkpoints\n"
        "drop(checkpoints.save_checkpoint('/d', s, 1, prefix='vae_'))\n",
        "helpers": "import os\ndef drop(where):\n    os.remove(where)  # change: remove\n",
        "main": "import os, train\nos.remove(path)  # look: remove\n",
        "beside": "import glob, os\nfor one in glob.glob('runs/vae_*'):  # look: glob\n"
        "    os.remove(one)  # change: remove\n",
        "far": "import os\nos.remove(path)\n",
        "torch_run": "import os, torch\nos.remove('vae_1')\n",
        "metrics": "import os\nfrom tensorflow import keras\nos.remove('vae_1')  # change: remove\n",
    }
    expected = [_announced(f"{name}.py", code) for name, code in files.items()]
    assert _asked(scan([_write(tmp_path, **files)])) == {
        place: kinds for one in expected for place, kinds in one.items()
    }


def test_programs_without_the_api(tmp_path: Path) -> None:
    """Nothing is listed of a project that does not use it, whatever its files are called."""
    code = "import os, glob\nfor path in glob.glob('checkpoint_*'):\n    os.remove(path)\n"
    orbax = "import orbax.checkpoint as ocp\nfrom flax.training import train_state\nocp.CheckpointManager('/d')\n"
    report = scan([_write(tmp_path, train=code, other=orbax)])
    assert (report.files, report.findings, report.unreadable) == (2, (), ())


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("checkpoints.save_checkpoint('/d', s, 1)", "api"),
        ("checkpoints.restore_checkpoint('/d', target=None)", "api"),
        ("checkpoints.AsyncManager()", "api"),
        ("from flax.training import orbax_utils", "api"),
        ("import flax; flax.config.update('flax_use_orbax_checkpointing', True)", "flag"),
        ("config.flax_use_orbax_checkpointing = True", "flag"),
        ("set_up(flax_use_orbax_checkpointing=True)", "flag"),
    ],
)
def test_uses_of_the_api(code: str, kind: str, tmp_path: Path) -> None:
    """Each is listed, once."""
    report = scan([_write(tmp_path, train=f"from flax.training import checkpoints\n{code}\n")])
    assert [one.kind for one in report.findings if one.line == 2] == [kind]


@pytest.mark.parametrize(
    ("code", "is_relative"),
    [
        ("checkpoints.save_checkpoint('runs', s, 1)", True),
        ("checkpoints.restore_checkpoint('runs/' + name, s)", True),
        ("checkpoints.restore_checkpoint(f'{root}/runs', s)", False),
        ("checkpoints.save_checkpoint(os.path.abspath('runs'), s, 1)", False),
        ("checkpoints.save_checkpoint('gs://bucket/run', s, 1)", False),
        ("RUNS = './runs'\ncheckpoints.save_checkpoint(os.path.join(RUNS, name), s, 1)", True),
        ("def f(d):\n  checkpoints.save_checkpoint(d, s, 1)\nf('runs')", True),
        ("flags.DEFINE_string('workdir', 'runs/a', 'help')\ncheckpoints.save_checkpoint(FLAGS.workdir, s, 1)", True),
        ("p.add_argument('--work-dir', default='/tmp/a')\ncheckpoints.save_checkpoint(args.work_dir, s, 1)", False),
        ("p.add_argument('-w', '--work-dir', default='a')\ncheckpoints.save_checkpoint(args.work_dir, s, 1)", True),
        ("class Args:\n  out: str = 'runs'\nargs = tyro.cli(Args)\ncheckpoints.save_checkpoint(args.out, s, 1)", True),
        ("class A:\n  out: str = '/runs'\nargs = tyro.cli(A)\ncheckpoints.save_checkpoint(args.out, s, 1)", False),
    ],
)
def test_relative_paths(code: str, is_relative: bool, tmp_path: Path) -> None:
    """With them, Flax alone does not restore directories: the way back is closed."""
    report = scan([_write(tmp_path, train=f"import os\nfrom flax.training import checkpoints\n{code}\n")])
    assert ("relative-path" in [one.kind for one in report.findings]) == is_relative


BY_VALUE = [
    "from flax import training\nc = getattr(training, 'checkpoints')",
    "from flax import training as t\nc = t.checkpoints",
    "from flax import training\nt = training\nc = t.checkpoints",
    "import flax as f\nc = f.training.checkpoints",
    "import importlib\nc = importlib.import_module('flax.training.checkpoints')",
    "import importlib\nc = importlib.import_module('.checkpoints', 'flax.training')",
    "from importlib import import_module\nc = import_module('flax.training').checkpoints",
    "import sys\nc = sys.modules['flax.training.checkpoints']",
    "import flax.training\nc = flax.training.checkpoints",
    "c = __import__('flax.training.checkpoints', fromlist=['save_checkpoint'])",
]


@pytest.mark.parametrize("code", BY_VALUE)
def test_fix_names_other_ways_to_flaxs_module(code: str, tmp_path: Path) -> None:
    """The line that gets the module is named where no import can be changed, and uses of it are found."""
    _write(tmp_path, train=f"{code}\nc.save_checkpoint('/a', {{}}, 1)\n")
    out = CliRunner().invoke(main, ["scan", str(tmp_path), "--fix", "--yes"])
    line = len(code.splitlines())
    assert "Still Flax's own module" in out.output and f"train.py:{line}. Put" in out.output
    assert [(one.kind, one.line) for one in scan([tmp_path]).findings] == [("import", line), ("api", line + 1)]


def test_install_serves_every_way_to_flaxs_module() -> None:
    """What --fix advises there: after install(), each of them gives our functions."""
    tests = "\n".join(f"{code}\nassert c.save_checkpoint is ours, {code!r}" for code in BY_VALUE)
    code = "import flax_ckpt_compat\nflax_ckpt_compat.install()\nours = flax_ckpt_compat.checkpoints.save_checkpoint"
    assert run_python(f"{code}\n{tests}\nprint('done')")[0] == "done\n"


def _notebook(folder: Path, *cells: str) -> Path:
    code = [{"cell_type": "code", "source": text.splitlines(keepends=True)} for text in cells]
    (folder / "look.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "# Title"}, *code]}))
    return folder


def test_notebooks(tmp_path: Path) -> None:
    """Cells share names; magics and broken cells are passed over; shell commands are shown as written."""
    cells = ["%matplotlib inline\nfrom flax.training import checkpoints", "x = ("]
    cells += ["!ls\npath = checkpoints.latest_checkpoint('d')", "import os\nos.remove(path)"]
    cells += ["!cp {path} /backup\n!cp -r {path} /backup", "files = !ls\n!rm $path\n!echo '{'"]
    found = [(one.cell, one.line, one.kind, one.code) for one in scan([_notebook(tmp_path, *cells)]).findings]
    assert found == [
        (1, 2, "import", "from flax.training import checkpoints"),
        (3, 2, "api", "path = checkpoints.latest_checkpoint('d')"),
        (4, 2, "remove", "os.remove(path)"),
        (5, 1, "shell", "!cp {path} /backup"),
        (6, 2, "shell", "!rm $path"),
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\f", "\x1c", "\x85"])
def test_separators_in_text_of_a_notebook(separator: str, tmp_path: Path) -> None:
    """They end no line of Python."""
    code = [{"cell_type": "code", "source": f"title = 'a{separator}b'\nfrom flax.training import checkpoints"}]
    (tmp_path / "look.ipynb").write_text(json.dumps({"cells": [*code, {}]}))
    assert [(one.cell, one.line, one.kind) for one in scan([tmp_path]).findings] == [(1, 2, "import")]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("# coding: rot13\nvzcbeg bf\n", "rot13"),
        ("# coding: nothing-of-that-name\n", "encoding"),
        ("x = '\0'\n", "null"),
        ("x = " + "(" * 300 + ")" * 300 + "\n", "parenthes"),
        ("def f(:\n", "SyntaxError"),
    ],
)
def test_one_file_does_not_stop_a_project(broken: str, reason: str, tmp_path: Path) -> None:
    """It is named with the reason, and the others are scanned."""
    report = scan([_write(tmp_path, broken=broken, train=HEAD + "os.remove(checkpoints.latest_checkpoint('d'))\n")])
    assert [one.line for one in report.findings if one.kind == "remove"] == [4]
    ((path, why),) = report.unreadable
    assert path == str(tmp_path / "broken.py") and reason in why


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody may ever write to it; no more is it read below a folder."""
    os.mkfifo(tmp_path / "code.py")
    for path in (tmp_path, tmp_path / "code.py"):
        ((file, why),) = scan([path]).unreadable
        assert file == str(tmp_path / "code.py") and "not a regular file" in why


@pytest.mark.parametrize(
    "deep",
    [
        "x = " + "[" * 190 + "]" * 190,
        "x = " + " + ".join(["'a'"] * 900),
        "x = a" + ".b" * 400 + "\nx()",
        "\n".join(f"n{at % 12} = n{at % 11} + n{at % 7}" for at in range(600)) + "\nos.remove(n0)",
    ],
    ids=["lists", "sums", "attributes", "names of names"],
)
def test_deep_code_is_scanned(deep: str, tmp_path: Path) -> None:
    """Code that is nested deeply hides nothing in its file, or in others."""
    code = f"{HEAD}{deep}\nos.remove(checkpoints.latest_checkpoint('d'))\n"
    report = scan([_write(tmp_path, train=code, other=f"{deep}\n")])
    assert "remove" in [one.kind for one in report.findings] and not report.unreadable


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code tells whether something has to change; --json is data; lines are whole where nobody reads along."""

    def command(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["scan", *arguments])

    long = f"checkpoints.restore_checkpoint({'a' * 100}, None)"
    _write(tmp_path, train=f"{HEAD}{long}\nos.remove(checkpoints.latest_checkpoint('/d'))\n", broken="def f(:\n")
    _write(tmp_path, look=f"{HEAD}os.remove(path)\n")
    monkeypatch.chdir(tmp_path)
    found = command(".", "--verbose")
    assert found.exit_code == 1 and "broken.py" in found.stdout and f"train.py:4  {long}\n" in found.stdout
    assert "train.py:5  os.remove(" in found.stdout.partition("Look at these")[0]
    assert found.stdout.splitlines()[-1] == "3 files; 6 uses in 2; 1 to change, 1 to look at, 1 not read."
    as_json: Any = json.loads(command("train.py", "--json").stdout)
    assert {one["kind"] for one in as_json["findings"] if one["action"] == "change"} == {"remove"}
    assert command("look.py").exit_code == 0
    assert command("look.py", "broken.py").exit_code == 2  # nothing to change in what was read, and one was not
    assert command("nowhere.py").exit_code == 2
    (tmp_path / "empty").mkdir()
    nothing = command("empty")
    assert nothing.exit_code == 2 and "pass the files or folders of your code" in nothing.stderr


IMPORTS = {
    "from flax.training import checkpoints\n": "from flax_ckpt_compat import checkpoints\n",
    "from flax.training import checkpoints as c, train_state\n": "from flax.training import train_state\n"
    "from flax_ckpt_compat import checkpoints as c\n",
    "from flax.training import train_state, checkpoints  # ours\n": "from flax.training import train_state\n"
    "from flax_ckpt_compat import checkpoints  # ours\n",
    "import flax.training.checkpoints as c\n": "import flax_ckpt_compat.checkpoints as c\n",
    "if True:\n  from flax.training.checkpoints import *  # all\n": "if True:\n"
    "  from flax_ckpt_compat.checkpoints import *  # all\n",
    "try:\n    from flax.training import checkpoints, train_state\nexcept ImportError:\n    pass\n": "try:\n"
    "    from flax.training import train_state\n    from flax_ckpt_compat import checkpoints\n"
    "except ImportError:\n    pass\n",
    "x = 1; from flax.training import checkpoints, train_state; y = 2\n": "x = 1; "
    "from flax.training import train_state; from flax_ckpt_compat import checkpoints; y = 2\n",
    "import flax.training.checkpoints\n": "import flax.training.checkpoints\n",
    "from flax.training import (\n    checkpoints,  # saving\n    train_state,\n)\n": "from flax.training import (\n"
    "    # saving\n    train_state,\n)\nfrom flax_ckpt_compat import checkpoints\n",
    "from flax.training.checkpoints import (\n    _checkpoint_path,  # one\n    save_checkpoint as save,\n)\n": "from "
    "flax_ckpt_compat.checkpoints import (\n    _checkpoint_path,  # one\n    save_checkpoint as save,\n)\n",
    "from flax.training import train_state\n": "from flax.training import train_state\n",
    "from flax.training import (train_state,  # not checkpoints\n    checkpoints)\n": "from flax.training import "
    "train_state\nfrom flax_ckpt_compat import checkpoints\n",
    "from flax.training import train_state as checkpoints, checkpoints as c\n": "from flax.training import "
    "train_state as checkpoints\nfrom flax_ckpt_compat import checkpoints as c\n",
    "from flax.training import train_state, checkpoints \\\n as c, checkpoints as d\n": "from flax.training import "
    "train_state\nfrom flax_ckpt_compat import checkpoints as c, checkpoints as d\n",
    "from .training import checkpoints\n": "from .training import checkpoints\n",
}


def test_a_package_of_the_same_names_stays() -> None:
    """It ends as Flax's module does."""
    assert fix(code := "import vendor.flax.training.checkpoints as c\n") == code


@pytest.mark.parametrize("code", IMPORTS)
def test_imports(code: str) -> None:
    """They come from us; what else they import stays where it was. What is fixed stays as it is."""
    assert fix(code) == IMPORTS[code]
    assert fix(IMPORTS[code]) == IMPORTS[code]


def test_fixed_imports_run() -> None:
    """Python finds the names that it found before."""
    pairs = [(code, fix(code)) for code in IMPORTS if "checkpoints" in code and not code.startswith("from .")]
    runs = [f"exec({code!r}, {{}})" for pair in pairs for code in pair]
    assert run_python("\n".join(["import os; os.chdir('/')", *runs, "print('done')"]))[0] == "done\n"


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    """In the encoding and with the line ends of the file; without consent nothing is written."""
    file = tmp_path / "train.py"
    before = "# coding: latin-1\r\nfrom flax.training import checkpoints  # \xe9\r\n".encode("latin-1")
    file.write_bytes(before)
    shown = CliRunner().invoke(main, ["scan", str(file), "--fix"], input="n\n")
    assert "+from flax_ckpt_compat import checkpoints" in shown.output and file.read_bytes() == before
    CliRunner().invoke(main, ["scan", str(file), "--fix", "--yes"])
    assert file.read_bytes() == before.replace(b"flax.training import", b"flax_ckpt_compat import")


def test_a_fixed_file_is_wholly_ours(tmp_path: Path) -> None:
    """Underscored helpers too, and nothing of it is named as left."""
    file = tmp_path / "train.py"
    file.write_text("from flax.training import checkpoints as c\nprint(c._checkpoint_path('d', 1))\n")
    out = CliRunner().invoke(main, ["scan", str(file), "--fix", "--yes"])
    assert "Still Flax's own module" not in out.output
    assert run_python(file.read_text())[0] == "d/checkpoint_1\n"
