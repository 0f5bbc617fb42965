"""Each program keeps the sections of the others on the page of results."""

from tests.benchmarks import sections

PAGE = "# Results\n\ntable\n"


def test_sections() -> None:
    """A new section goes to the end, and replaces an older one of its heading where that is."""
    assert sections.kept(PAGE) == ""
    both = sections.with_section(sections.with_section(PAGE, "## A", "one"), "## B", "two\n")
    assert both == "# Results\n\ntable\n\n## A\n\none\n\n## B\n\ntwo\n"
    assert sections.kept(both) == "\n## A\n\none\n\n## B\n\ntwo\n"
    assert sections.with_section(both, "## A", "new") == both.replace("one", "new")
    assert sections.with_section(both, "## B", "new") == both.replace("two", "new")
