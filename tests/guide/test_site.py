"""The site builds without a warning, has every public name, its links lead somewhere; the notebook runs as stored."""

import html
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import flax_ckpt_compat

pytest.importorskip("sphinx", reason="needs the extra 'docs'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MODULES = ("checkpoints", "config", "errors", "rules", "transforms")


def values_of(file: Path, names: str) -> set[str]:
    """The values that attributes of tags have in a page."""
    found = re.findall(rf'\s(?:{names})="([^"]*)"', file.read_text(encoding="utf-8"))
    return set(map(html.unescape, found))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors: unknown links, names, pages outside the table of contents."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(folder / "trees")]
    built = subprocess.run(
        [*command, str(ROOT / "migration_guide"), str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "html"


def test_every_public_name_has_an_entry(site: Path) -> None:
    """The reference has each name of each ``__all__``, under one of the modules that offer it."""
    from sphinx.util.inventory import InventoryFile

    found = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    entries = {name for kind, names in found.items() if kind.startswith("py:") for name in names}
    names = set(flax_ckpt_compat.__all__)
    names |= {f"{module}.{name}" for module in MODULES for name in _module(module).__all__}
    names -= {name for name in names if f"transforms.{name}" in names}  # documented there
    assert not {name for name in names if f"flax_ckpt_compat.{name}" not in entries}


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"flax_ckpt_compat.{name}")


def test_internal_links_lead_somewhere(site: Path) -> None:
    """Each link and picture of each page names a file of the site, and an anchor of it."""
    anchors_of = {file: values_of(file, "id") for file in site.rglob("*.html")}
    broken = []
    assert any(anchors_of.values())
    for file in anchors_of:
        for link in values_of(file, "href|src"):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchors = anchors_of.get(target, {parts.fragment})
            if not target.is_file() or (unquote(parts.fragment) not in anchors and parts.fragment):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert not broken


def read() -> Any:
    """The notebook."""
    nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebook'")
    return nbformat.read(ROOT / "migration_guide" / "notebook.ipynb", as_version=4)


def test_is_stored_without_outputs() -> None:
    """What a run shows is not part of the file, so that it cannot be out of date."""
    code = [cell for cell in read().cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell runs in a real kernel, its assertions hold; leaves are missing before the rules, and none after."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    book, nbclient = read(), pytest.importorskip("nbclient", reason="needs the extra 'notebook'")
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("14 leaves, 57.7 kB" in html and "kernel" in html for html in shown)
    assert any("12 missing" in html for html in shown)
    assert any("14 from the checkpoint" in html and "missing" not in html for html in shown)
    assert any("Dense_0" in output.text for output in outputs if output.output_type == "stream")
