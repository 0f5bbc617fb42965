"""`flax-ckpt scan --fix`: imports become ours, and every other character stays."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from flax_ckpt_compat._scan.fix import fix
from flax_ckpt_compat.cli import main
from tests.support.interpreters import run_python

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
    "import flax.training.checkpoints\nflax.training.checkpoints.latest_checkpoint('é')\n": "import flax.training\n"
    "import flax_ckpt_compat.checkpoints\nflax_ckpt_compat.checkpoints.latest_checkpoint('é')\n",
    "import flax\nprint('é', flax.training.checkpoints.latest_checkpoint('d'))\n": "import flax\n"
    "import flax_ckpt_compat.checkpoints\nprint('é', flax_ckpt_compat.checkpoints.latest_checkpoint('d'))\n",
    "from flax.training import (\n    checkpoints,  # saving\n    train_state,\n)\n": "from flax.training import (\n"
    "    train_state,\n)\nfrom flax_ckpt_compat import checkpoints\n",
    "from flax.training.checkpoints import (\n    _checkpoint_path,  # one\n    save_checkpoint as save,\n)\n": "from "
    "flax_ckpt_compat.checkpoints import (\n    _checkpoint_path,  # one\n    save_checkpoint as save,\n)\n",
    "from flax.training import train_state\n": "from flax.training import train_state\n",
    "from .training import checkpoints\n": "from .training import checkpoints\n",
}


@pytest.mark.parametrize("code", IMPORTS)
def test_imports(code: str) -> None:
    """They come from us; what else they import stays where it was. What is fixed stays as it is."""
    assert fix(code) == IMPORTS[code]
    assert fix(IMPORTS[code]) == IMPORTS[code]


@pytest.mark.parametrize("code", [code for code in IMPORTS if not code.startswith("from .")])
def test_fixed_imports_run(code: str) -> None:
    """Python finds the names that it found before."""
    calls = "import os; os.chdir('/')\n"
    assert run_python(f"{calls}{code}print('done')\n{calls}{fix(code)}print('done')")[0].endswith("done\n")


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
