"""The README and the guide: their commands are what CI runs, their Python runs, their links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.support.interpreters import run_python
from tests.support.peers import ocp_released_v1, version

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "migration_guide").glob("*.md"))]
# test_recipes runs the recipes, once.
RUN_HERE = [page for page in PAGES if page.name != "recipes.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SKIPPED = "<!-- not run: "


def fences(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language, without those that say why they are not run."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n")[2]
        if match[1] == language and not before.startswith(SKIPPED):
            found.append(match[2])
    return found


def test_ci_runs_the_test_command() -> None:
    """The README's first command is the demo's, its last the tests', and CI runs the latter word for word."""
    first, *_, last = (block.strip() for block in fences(ROOT / "README.md", "sh"))
    assert first == "python -m pip install '.[demo]' && python migration_guide/demo.py"
    assert last == "python -m pip install '.[test]' && python -m pytest"
    assert last in [line.strip() for line in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("page", [page for page in RUN_HERE if fences(page, "python")], ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """The Python blocks of a page run, one after the other, in one fresh interpreter and an empty folder."""
    program = "\n".join(fences(page, "python"))
    if "from orbax.checkpoint import v1" in program:
        _ = ocp_released_v1.load
    if "From Flax 0.12 on" in page.read_text(encoding="utf-8") and version("flax") < (0, 12):
        pytest.skip("the page needs a newer Flax")
    run_python(program, cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_names_its_language(page: Path) -> None:
    """No code block without a language slips past the test that runs them."""
    text = page.read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * len(FENCE.findall(text))
    assert all(language for language, _ in FENCE.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files of the repository name files that exist, and headings in them."""
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub, and myst on the site, give the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
