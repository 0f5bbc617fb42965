"""The notebook of the guide runs as stored, and shows a checkpoint and plans as HTML."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebook'")
nbclient = pytest.importorskip("nbclient", reason="needs the extra 'notebook'")
ROOT = Path(__file__).parents[2]


def read() -> nbformat.NotebookNode:
    """The notebook."""
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
    book = read()
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("14 leaves, 57.7 kB" in html and "kernel" in html for html in shown)
    assert any("12 missing" in html for html in shown)
    assert any("14 from the checkpoint" in html and "missing" not in html for html in shown)
    assert any("Dense_0" in output.text for output in outputs if output.output_type == "stream")
