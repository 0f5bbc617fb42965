"""`flax-ckpt scan`: what is planted in programs is found, all of it and nothing else, and fixed programs still run."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from flax_ckpt_compat._scan.project import scan
from flax_ckpt_compat.cli import main
from flax_ckpt_compat.cli.scan import lines_of
from tests.scan.corpus import planted
from tests.support.interpreters import run_python

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("file", sorted((PROGRAMS / "uses").glob("*.py")), ids=lambda file: file.stem)
def test_planted_uses(file: Path) -> None:
    """Each planted use is found at its line, and nothing else is."""
    found = [(one.line, one.kind) for one in scan([PROGRAMS / "uses"]).findings if one.path == str(file)]
    assert sorted(found) == sorted(planted(file))


def test_clean_programs() -> None:
    """Programs without the legacy API have no findings."""
    report = scan([PROGRAMS / "clean"])
    assert (report.files, report.findings, report.unreadable) == (2, (), ())


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody may ever write to it; no more is it read below a folder."""
    os.mkfifo(tmp_path / "code.py")
    for path in (tmp_path, tmp_path / "code.py"):
        ((file, why),) = scan([path]).unreadable
        assert file == str(tmp_path / "code.py")
        assert "not a regular file" in why


# A whole program: trains, keeps its own three newest checkpoints, and reports what is there.
PROGRAM = """\
# Trains for a while.
import os, sys
import flax
from flax.training import (
    checkpoints,  # saving
    train_state,
)
import numpy as np

flax.config.update('flax_use_orbax_checkpointing', sys.argv[2] == 'orbax')
folder = os.path.abspath(sys.argv[1])
saved = []
for step in range(4):
    path   =   checkpoints.save_checkpoint(folder, {'w': np.arange(3) + step}, step, keep=9)
    saved.append(path)
    if len(saved) > 2:
        oldest = saved.pop(0)
        if os.path.isfile(oldest):
            os.remove(oldest)  # make room
print(sorted(os.listdir(folder)), checkpoints.restore_checkpoint(folder, None)['w'], train_state.TrainState.__name__)
"""


def fixed_by_us(code: str, findings: Any) -> str:
    """What --fix makes of a program. libcst is imported here: it takes each process of pytest-xdist half a second."""
    from flax_ckpt_compat._scan.fix import fix

    return fix(code, findings)


def run(code: str, folder: Path, backend: str) -> str:
    """Run a program in a process of its own and return what it prints."""
    folder.mkdir()
    file = folder / "train.py"
    file.write_text(code)
    program = "import runpy, sys; sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return run_python(program, file, folder / "run", backend)[0]


def test_fixed_program_runs(tmp_path: Path) -> None:
    """After --fix, a program does on Orbax's format what it did with Flax on msgpack files; its layout stays."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    fixed = fixed_by_us(PROGRAM, scan([file]).findings)
    expected = run(PROGRAM, tmp_path / "before", "msgpack")
    assert "['checkpoint_2', 'checkpoint_3'] [3 4 5] TrainState" in expected
    assert run(fixed, tmp_path / "after", "orbax") == expected
    changed = set(PROGRAM.splitlines()) ^ set(fixed.splitlines())
    kept = {"# Trains for a while.", "import flax", "    saved.append(path)"}
    assert not changed & kept and "path   =   checkpoints.save" in fixed and "# make room" in fixed


@pytest.mark.parametrize(
    ("code", "fixed"),
    [
        ("from flax.training import checkpoints\n", "from flax_ckpt_compat import checkpoints\n"),
        (
            "from flax.training import checkpoints as c, train_state\n",
            "from flax.training import train_state\nfrom flax_ckpt_compat import checkpoints as c\n",
        ),
        ("import flax.training.checkpoints as c\n", "import flax_ckpt_compat.checkpoints as c\n"),
        (
            "if True:\n  from flax.training.checkpoints import *  # all\n",
            "if True:\n  from flax_ckpt_compat.checkpoints import *  # all\n",
        ),
        (
            "import flax.training.checkpoints\nflax.training.checkpoints.latest_checkpoint('d')\n",
            "import flax.training\nimport flax_ckpt_compat.checkpoints\n\n"
            "flax_ckpt_compat.checkpoints.latest_checkpoint('d')\n",
        ),
        ("from flax.training import train_state\n", "from flax.training import train_state\n"),
        (
            "from flax.training.checkpoints import _checkpoint_path, save_checkpoint as save  # both\n",
            "from flax_ckpt_compat.checkpoints import _checkpoint_path, save_checkpoint as save  # both\n",
        ),
        (
            "from flax.training import checkpoints as c\nc._checkpoint_path('d', 1)\n",
            "from flax_ckpt_compat import checkpoints as c\nc._checkpoint_path('d', 1)\n",
        ),
    ],
)
def test_fixed_imports(code: str, fixed: str, tmp_path: Path) -> None:
    """Imports come from us, underscored helpers too; what else they import stays where it was."""
    file = tmp_path / "code.py"
    file.write_text(code)
    assert fixed_by_us(code, scan([file]).findings) == fixed


# What stands before `_REMOVAL` → the same with `shutil` among the imports of the standard library, as isort puts it.
_IMPORTS = {
    "among ours": (
        "import os\nimport time\n\nimport jax\n\nfrom project import data\nUSED\n",
        "import os\nimport shutil\nimport time\n\nimport jax\n\nfrom project import data\nUSED\n",
    ),
    "before all": ("import sys\nimport os\nUSED\n", "import sys\nimport os\nimport shutil\nUSED\n"),
    "docstring": ('"""Trains."""\n\nUSED\n\nx = 1\n', '"""Trains."""\n\nimport shutil\n\nUSED\n\nx = 1\n'),
    "shebang": (
        "#!/usr/bin/env python\n# License.\nimport time\nUSED\n",
        "#!/usr/bin/env python\n# License.\nimport shutil\nimport time\nUSED\n",
    ),
    "future": (
        '"""Trains."""\nfrom __future__ import annotations\n\nimport jax\nUSED\n',
        '"""Trains."""\nfrom __future__ import annotations\n\nimport shutil\n\nimport jax\nUSED\n',
    ),
    "only future": (
        "from __future__ import annotations\nUSED\n",
        "from __future__ import annotations\n\nimport shutil\n\nUSED\n",
    ),
    "from first": (
        "# Standard.\nfrom typing import Any\n\nimport jax\nUSED\n",
        "# Standard.\nimport shutil\nfrom typing import Any\n\nimport jax\nUSED\n",
    ),
    "comments": (
        "import os  # paths\n\n# Ours.\nimport jax\nUSED\n",
        "import os  # paths\nimport shutil\n\n# Ours.\nimport jax\nUSED\n",
    ),
    "one line": ("import glob, os\nUSED\n", "import glob, os\nimport shutil\nUSED\n"),
    "there": ("import os, shutil\nUSED\n", "import os, shutil\nUSED\n"),
    "other name": ("import shutil as sh\nUSED\n", "import shutil\nimport shutil as sh\nUSED\n"),
    "try": (
        "import os\n\ntry:\n    import zlib\nexcept ImportError:\n    zlib = None\nUSED\n",
        "import os\nimport shutil\n\ntry:\n    import zlib\nexcept ImportError:\n    zlib = None\nUSED\n",
    ),
    "only try": (
        "try:\n    import os\nexcept ImportError:\n    pass\nUSED\n",
        "import shutil\n\ntry:\n    import os\nexcept ImportError:\n    pass\nUSED\n",
    ),
    "later ones": ("import os\nUSED\nimport re\n", "import os\nimport shutil\nUSED\nimport re\n"),
}
_USED = "from flax_ckpt_compat import checkpoints\npath = checkpoints.latest_checkpoint('d')\nos.remove(path)"
_IN_FUNCTION = (
    "def clean():\n    import os\n    from flax_ckpt_compat import checkpoints\n"
    "    path = checkpoints.latest_checkpoint('d')\n    {}os.remove(path)\n"
)
_REMOVES = "shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else "


def _fix(code: str, tmp_path: Path) -> str:
    file = tmp_path / "code.py"
    file.write_text(code)
    return fixed_by_us(code, scan([file]).findings)


@pytest.mark.parametrize(("code", "fixed"), _IMPORTS.values(), ids=_IMPORTS.keys())
def test_shutil_is_imported_where_people_put_it(code: str, fixed: str, tmp_path: Path) -> None:
    """In order among the imports of the standard library; everything else stays as it was."""
    expected = fixed.replace("USED", _USED.replace("os.remove", f"{_REMOVES}os.remove"))
    assert _fix(code.replace("USED", _USED), tmp_path) == expected


def test_shutil_is_imported_for_a_function_with_imports_of_its_own(tmp_path: Path) -> None:
    """Above all, where the file has no other import."""
    assert _fix(_IN_FUNCTION.format(""), tmp_path) == f"import shutil\n\n{_IN_FUNCTION.format(_REMOVES)}"


def test_a_removal_that_was_fixed_removes_links_only(tmp_path: Path) -> None:
    """Of a link to a directory, the link goes and what it leads to stays; files and directories go."""
    names = "real", "link", "folder", "file"
    real, link, folder, file = (tmp_path / name for name in names)
    real.mkdir()
    link.symlink_to(real)
    (folder / "inside").mkdir(parents=True)
    file.touch()
    for path in (link, folder, file):
        exec(f"import os, shutil\n{_REMOVES}os.remove(path)", {"path": path})
    assert os.listdir(tmp_path) == ["real"]


def test_fixed_program_is_scanned(tmp_path: Path) -> None:
    """Once the import is ours, what still breaks is still found, and what --fix mended is not."""
    file = tmp_path / "code.py"
    file.write_text(
        "import os, shutil\nfrom flax_ckpt_compat import checkpoints\npath = checkpoints.latest_checkpoint('d')\n"
        f"open(path, 'rb')\n{_REMOVES}os.remove(path)\n"
        "if os.path.isdir(path):\n  pass\nelse:\n  os.remove(path)\n"
    )
    assert [(one.line, one.kind) for one in scan([file]).findings] == [(3, "lookup"), (4, "open")]


@pytest.mark.parametrize("is_terminal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_long_lines_keep_their_indent(is_terminal: bool) -> None:
    """At 80 columns what continues a line stands further right; piped, each line is one."""
    console = Console(file=io.StringIO(), width=80)
    for line in lines_of(scan([PROGRAMS]), verbose=False):
        for part in line.rich(80) if is_terminal and line.rich else [line.text]:
            console.print(part, soft_wrap=not is_terminal, markup=False)
    lines = console.file.getvalue().splitlines()
    (start,) = [at for at, line in enumerate(lines) if "rmtree for" in line]
    assert lines[start].startswith("    instead: let overwrite=True")
    if is_terminal:
        assert max(map(len, lines)) <= 80 and lines[start + 1] == "        directories"
    else:
        assert lines[start].endswith("for directories")


def test_piped_code_is_whole(tmp_path: Path) -> None:
    """What searches the output finds the end of a long line."""
    file = tmp_path / "code.py"
    code = f"checkpoints.restore_checkpoint({'a' * 100}, None)"
    file.write_text(f"from flax.training import checkpoints\n{code}\n")
    assert f"code.py:2  {code}\n" in CliRunner().invoke(main, ["scan", str(file), "--verbose"]).stdout


def test_notebook(tmp_path: Path) -> None:
    """Cells of a notebook share names; magics are passed over; places are counted by cell."""
    cells = [
        "%matplotlib inline\nfrom flax.training import checkpoints",
        "x = (",
        "!ls\npath = checkpoints.latest_checkpoint('d')",
    ]
    cells.append("import os\nos.remove(path)")
    code = [{"cell_type": "code", "source": text.splitlines(keepends=True)} for text in cells]
    file = tmp_path / "look.ipynb"
    file.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "# Title"}, *code]}))
    found = [(one.cell, one.line, one.kind, one.code) for one in scan([tmp_path]).findings]
    assert found == [
        (1, 2, "import", "from flax.training import checkpoints"),
        (3, 2, "lookup", "path = checkpoints.latest_checkpoint('d')"),
        (4, 2, "remove", "os.remove(path)"),
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\f", "\x1c", "\x85"])
def test_separators_in_text_of_a_notebook(separator: str, tmp_path: Path) -> None:
    """They end no line of Python: the cell was cut within its text, and passed over without a word."""
    cells = ["import os", f"title = 'a{separator}b'\nfrom flax.training import checkpoints"]
    code = [{"cell_type": "code", "source": text} for text in cells]
    (tmp_path / "look.ipynb").write_text(json.dumps({"cells": code}))
    found = [(one.cell, one.line, one.kind) for one in scan([tmp_path]).findings]
    assert found == [(2, 2, "import")]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code tells whether something has to change; --json and --sarif are data; --fix mends what it can."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("def f(:\n")

    def command(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["scan", *arguments])

    monkeypatch.chdir(tmp_path)
    assert command("broken.py").exit_code == 2
    found = command(".")
    assert found.exit_code == 1 and "train.py:19  os.remove(oldest)" in found.stdout and "broken.py" in found.stdout
    as_json = json.loads(command("train.py", "--json").stdout)
    assert {one["kind"] for one in as_json["findings"] if one["action"] == "change"} == {"remove", "is-file"}
    sarif = json.loads(command("train.py", "--sarif").stdout)
    results = sarif["runs"][0]["results"]
    assert [one["locations"][0]["physicalLocation"]["region"] for one in results if one["ruleId"] == "remove"] == [
        {"startLine": 19, "startColumn": 13}
    ]
    assert command("train.py", "--fix", "--yes").exit_code == 0
    assert command("train.py").exit_code == 0
    assert command("train.py", "broken.py").exit_code == 2  # nothing to change in what was read, and one was not
    assert "from flax_ckpt_compat import checkpoints" in file.read_text()
    assert command("nowhere.py").exit_code == 2
    (tmp_path / "empty").mkdir()
    nothing = command("empty")
    assert nothing.exit_code == 2 and "pass the files or folders of your code" in nothing.stderr


def _scan_code(tmp_path: Path, **files: str) -> Any:
    for name, code in files.items():
        (tmp_path / f"{name}.py").write_text(code)
    return scan([tmp_path])


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
    report = _scan_code(tmp_path, broken=broken, train=f"import os\n{_USED}\n")
    assert [(one.line, one.kind) for one in report.findings if one.kind == "remove"] == [(4, "remove")]
    ((path, why),) = report.unreadable
    assert path == str(tmp_path / "broken.py") and reason in why


@pytest.mark.parametrize(
    "deep",
    ["x = " + "[" * 190 + "]" * 190, "x = " + " + ".join(["'a'"] * 900), "x = a" + ".b" * 400 + "\nx()"],
    ids=["lists", "sums", "attributes"],
)
def test_deep_code_is_scanned(deep: str, tmp_path: Path) -> None:
    """Code that is nested deeply hides nothing in its file, or in others."""
    report = _scan_code(tmp_path, train=f"import os\n{deep}\n{_USED}\n", other=f"{deep}\n")
    assert "remove" in [one.kind for one in report.findings] and not report.unreadable


@pytest.mark.parametrize(
    ("pattern", "is_told"), [("best_*", True), ("*", True), ("*.png", False), ("events.out.*", False)]
)
def test_a_pattern_that_may_be_a_prefix(pattern: str, is_told: bool, tmp_path: Path) -> None:
    """A script scanned alone does not tell the prefix that others save with: names that may be steps are told of."""
    code = f"""\
import glob, shutil
from flax.training import checkpoints

def publish(workdir, out):
    best = sorted(glob.glob(f"{{workdir}}/{pattern}"))[-1]
    shutil.copyfile(best, out)
"""
    report = _scan_code(tmp_path, evaluate=code)
    assert [(one.line, one.kind) for one in report.not_followed] == [(6, "path")] * is_told


def test_what_was_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean result names the calls after which it says nothing, in each form of the report."""
    code = """\
import os, shutil
from flax.training import checkpoints
from company import registry

def save(workdir, state):
    registry.note(checkpoints.save_checkpoint(workdir, state, 1))

def clean(path, log):
    os.remove(path)
    os.remove(os.path.join(log, "log.txt"))
"""
    report = _scan_code(tmp_path, train=code)
    assert [(one.line, one.kind) for one in report.not_followed] == [(6, "call"), (9, "path")]
    monkeypatch.chdir(tmp_path)
    out = CliRunner().invoke(main, ["scan", "train.py"])
    assert out.exit_code == 0 and "0 to change, 0 to look at, 2 not followed" in out.stdout
    assert "train.py:9  os.remove(path)" in out.stdout
    as_json = json.loads(CliRunner().invoke(main, ["scan", str(tmp_path), "--json"]).stdout)
    assert [one["line"] for one in as_json["not_followed"]] == [6, 9]
    sarif = json.loads(CliRunner().invoke(main, ["scan", str(tmp_path), "--sarif"]).stdout)
    rules = [one["ruleId"] for one in sarif["runs"][0]["results"]]
    assert "not-followed-call" in rules and "not-followed-path" in rules


@pytest.mark.parametrize(
    ("code", "is_relative"),
    [
        ("checkpoints.save_checkpoint('runs', s, 1)", True),
        ("checkpoints.restore_checkpoint('runs/' + name, s)", True),
        ("checkpoints.restore_checkpoint(f'{root}/runs', s)", False),
        ("checkpoints.save_checkpoint(os.path.abspath('runs'), s, 1)", False),
        ("checkpoints.save_checkpoint('gs://bucket/run', s, 1)", False),
        ("RUNS = './runs'\ncheckpoints.save_checkpoint(os.path.join(RUNS, name), s, 1)", True),
        ("flags.DEFINE_string('workdir', 'runs/a', 'help')\ncheckpoints.save_checkpoint(FLAGS.workdir, s, 1)", True),
        ("p.add_argument('--work-dir', default='/tmp/a')\ncheckpoints.save_checkpoint(args.work_dir, s, 1)", False),
        ("p.add_argument('-w', '--work-dir', default='a')\ncheckpoints.save_checkpoint(args.work_dir, s, 1)", True),
    ],
)
def test_relative_paths(code: str, is_relative: bool, tmp_path: Path) -> None:
    """With them, Flax alone does not restore directories: the way back is closed."""
    report = _scan_code(tmp_path, train=f"import os\nfrom flax.training import checkpoints\n{code}\n")
    assert ("relative-path" in [one.kind for one in report.findings]) == is_relative


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("sftp.put(path, '/b')", ["wrapped"]),
        ("bucket.put(path)", ["wrapped"]),
        ("import queue\npaths = queue.Queue()\npaths.put(path)\nos.remove(paths.get())", ["remove"]),
    ],
)
def test_what_is_put_into_a_store_or_a_queue(code: str, kinds: list[str], tmp_path: Path) -> None:
    """A store's client is not scanned; a queue gives back what it got."""
    before = "import os\nfrom flax.training import checkpoints\npath = checkpoints.save_checkpoint('/a', s, 1)\n"
    assert [one.kind for one in _scan_code(tmp_path, train=f"{before}{code}\n").actions] == kinds


def test_a_prefix_that_is_not_known(tmp_path: Path) -> None:
    """What may be called like the checkpoints is not followed; other files are told by their extensions."""
    code = """\
import os
from flax.training import checkpoints

def train(workdir, model, state):
    checkpoints.save_checkpoint(workdir, state, 1, prefix=f"{model}_")
    os.remove(f"{workdir}/{model}_0")
    os.remove(f"{workdir}/{model}_0.png")
    os.remove(f"{workdir}/log")
"""
    assert [(one.line, one.kind) for one in _scan_code(tmp_path, train=code).not_followed] == [(6, "path")]


def test_shell_commands_of_notebooks(tmp_path: Path) -> None:
    """They are the commands of IPython that they become, and shown as they are written."""
    cells = ["from flax.training import checkpoints\npath = checkpoints.latest_checkpoint('d')"]
    cells += ["!cp {path} /backup\n!cp -r {path} /backup", "files = !ls\n!rm $path\n!echo '{'"]
    code = [{"cell_type": "code", "source": text} for text in cells]
    (tmp_path / "look.ipynb").write_text(json.dumps({"cells": code}))
    found = [(one.cell, one.line, one.kind, one.code) for one in scan([tmp_path]).findings if one.cell != 1]
    assert found == [(2, 1, "shell-copy", "!cp {path} /backup"), (3, 2, "shell-remove", "!rm $path")]


def test_fix_tells_what_stays_on_flax(tmp_path: Path) -> None:
    """An import that --fix cannot change is named; a file that it changed is wholly ours, helpers included."""
    (tmp_path / "by_name.py").write_text("import importlib\nc = importlib.import_module('flax.training.checkpoints')\n")
    (tmp_path / "helper.py").write_text(
        "from flax.training import checkpoints as c\nprint(c._checkpoint_path('d', 1))\n"
    )
    out = CliRunner().invoke(main, ["scan", str(tmp_path), "--fix", "--yes"])
    assert "Still Flax's own module" in out.output and "by_name.py:2" in out.output
    assert (tmp_path / "helper.py").read_text().startswith("from flax_ckpt_compat import checkpoints as c")
    assert run_python((tmp_path / "helper.py").read_text())[0] == "d/checkpoint_1\n"


BY_VALUE = [
    "from flax import training\nc = getattr(training, 'checkpoints')",
    "from flax import training as t\nc = t.checkpoints",
    "from flax import training\nt = training\nc = t.checkpoints",
    "import flax as f\nc = f.training.checkpoints",
    "import flax\nc = getattr(flax.training, 'checkpoints')",
    "import importlib\nc = importlib.import_module('flax.training.checkpoints')",
    "import importlib\nc = importlib.import_module('.checkpoints', 'flax.training')",
    "from importlib import import_module\nc = import_module('flax.training').checkpoints",
    "import sys\nc = sys.modules['flax.training.checkpoints']",
    "from flax.training import *\nc = checkpoints",
    "c = __import__('flax.training.checkpoints', fromlist=['save_checkpoint'])",
]


@pytest.mark.parametrize("code", BY_VALUE)
def test_fix_tells_of_flaxs_module_as_a_value(code: str, tmp_path: Path) -> None:
    """Also where nothing can be changed: the line that gets the module is named, and uses of it are found."""
    (tmp_path / "train.py").write_text(f"{code}\nc.save_checkpoint('/a', {{}}, 1)\n")
    out = CliRunner().invoke(main, ["scan", str(tmp_path), "--fix", "--yes"])
    line = len(code.splitlines())
    assert "Still Flax's own module" in out.output and f"train.py:{line}. Put" in out.output
    assert [(one.kind, one.line) for one in scan([tmp_path]).findings] == [("import", line), ("save", line + 1)]


def test_what_fix_advises_for_flaxs_module_as_a_value() -> None:
    """After install(), whatever way the module is reached by gives our functions."""
    tests = "\n".join(f"{code}\nassert c.save_checkpoint is ours, {code!r}" for code in BY_VALUE)
    code = "import flax_ckpt_compat\nflax_ckpt_compat.install()\nours = flax_ckpt_compat.checkpoints.save_checkpoint"
    assert run_python(f"{code}\n{tests}\nprint('done')")[0] == "done\n"


def test_fix_says_nothing_of_flaxs_module_where_it_is_written_out(tmp_path: Path) -> None:
    """--fix changes it there."""
    (tmp_path / "train.py").write_text("import flax\nflax.training.checkpoints.save_checkpoint('/a', {}, 1)\n")
    out = CliRunner().invoke(main, ["scan", str(tmp_path), "--fix", "--yes"])
    assert "Still Flax's own module" not in out.output
    assert "flax_ckpt_compat.checkpoints.save_checkpoint" in (tmp_path / "train.py").read_text()


def test_fix_names_a_file_that_it_cannot_change(tmp_path: Path) -> None:
    """Code that is nested too deeply stays as it is; the other files are changed."""
    (tmp_path / "deep.py").write_text(f"from flax.training import checkpoints\nx = {'[' * 190}{']' * 190}\n")
    (tmp_path / "train.py").write_text("from flax.training import checkpoints\n")
    out = CliRunner().invoke(main, ["scan", str(tmp_path), "--fix", "--yes"])
    assert "Not changed: " in out.output and "deep.py: its code is nested too deeply" in out.output
    assert "Still Flax's own module" in out.output and "deep.py:1" in out.output
    assert (tmp_path / "train.py").read_text() == "from flax_ckpt_compat import checkpoints\n"


def test_modules_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Of two projects that are scanned together, each has its own helpers."""
    for project, argument in (("a", "checkpoints.save_checkpoint(d, s, 1)"), ("b", "'log.txt'")):
        (tmp_path / project).mkdir()
        (tmp_path / project / "utils.py").write_text("import os\n\n\ndef drop(path):\n    os.remove(path)\n")
        code = f"from flax.training import checkpoints\nfrom utils import drop\ndrop({argument})\n"
        (tmp_path / project / "train.py").write_text(code)
    report = scan([tmp_path])
    found = [(one.path, one.line) for one in report.findings if one.kind == "remove"]
    assert found == [(str(tmp_path / "a" / "utils.py"), 5)] and not report.not_followed


def test_a_program_beside_the_one_that_saves(tmp_path: Path) -> None:
    """It imports nothing of it, and is found by the prefix of its checkpoints."""
    report = _scan_code(
        tmp_path,
        train="from flax.training import checkpoints\ncheckpoints.save_checkpoint(d, s, 1, prefix='vae_')\n",
        clean="import glob, os\nfor path in glob.glob('runs/vae_*'):\n    os.remove(path)\n",
        other="import glob, os\nfor path in glob.glob('runs/gan_*'):\n    os.remove(path)\n",
    )
    assert [(Path(one.path).name, one.line, one.kind) for one in report.actions] == [
        ("clean.py", 2, "glob"),
        ("clean.py", 3, "remove"),
    ]


def test_flax_alone_restores_directories_by_absolute_paths_only(tmp_path: Path) -> None:
    """Why relative paths are reported: real Flax refuses them for Orbax's format, with the flag off, too."""
    program = """
        import os, sys, numpy as np, flax
        from flax_ckpt_compat import save
        from flax.training import checkpoints
        os.chdir(sys.argv[1])
        save("run", {"w": np.ones(2)}, step=1, format="orbax")
        flax.config.update("flax_use_orbax_checkpointing", False)
        try:
            checkpoints.restore_checkpoint("run", None)
        except ValueError as error:
            print(error)
        print(checkpoints.restore_checkpoint(os.path.abspath("run"), None)["w"])
    """
    lines = run_python(program, tmp_path)[0].splitlines()
    assert "Checkpoint path should be absolute" in lines[0] and lines[-1] == "[1. 1.]"
