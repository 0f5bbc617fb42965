"""README's table of figures comes from results.json."""

import json
import statistics

import pytest

from tests.benchmarks import readme_figures
from tests.benchmarks.readme_figures import README, RESULTS, updated

BEGIN = "<!-- figures: written by `python -m tests.benchmarks.readme_figures` -->"
TEXT = f"before\n{BEGIN}\nold\n<!-- end of figures -->\nafter\n"


def test_readme_is_up_to_date() -> None:
    """README shows the figures of the committed results."""
    text = README.read_text(encoding="utf-8")
    assert updated(text, json.loads(RESULTS.read_text(encoding="utf-8"))) == text


def test_the_table_shows_medians() -> None:
    """A cell is the median of what was measured, and everything around the table stays."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = updated(TEXT, results)
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    [entry] = [
        e for e in results["seconds"]
        if (e["workload"], e["operation"], e["system"]) == ("gpt2-jax", "save", "flax, msgpack")
    ]  # fmt: skip
    [row] = [line for line in text.splitlines() if line.startswith("| save 0.5 GB")]
    assert float(row.split("|")[3]) == pytest.approx(statistics.median(entry["seconds"]), rel=0.01)


def test_check_fails_on_stale_figures(monkeypatch, tmp_path, capsys) -> None:
    """``--check`` exits with 1 and changes nothing where README shows other figures."""
    stale = tmp_path / "README.md"
    stale.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(readme_figures, "README", stale)
    monkeypatch.setattr("sys.argv", ["readme_figures", "--check"])
    assert readme_figures.main() == 1
    assert stale.read_text(encoding="utf-8") == TEXT and "run python -m" in capsys.readouterr().out
