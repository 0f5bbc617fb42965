"""The sections of RESULTS.md that programs other than the main one write, below its tables."""

from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
DATA = Path(__file__).with_name("results.json")


def kept(page: str) -> str:
    """All sections; empty if there are none."""
    start = page.find("\n## ")
    return page[start:] if start >= 0 else ""


def with_section(page: str, heading: str, text: str) -> str:
    """The page with this text below the heading, in place of what was there, or at its end.

    Args:
        page: all of it.
        heading: a line that begins with ``## ``.
        text: without the heading.
    """
    before, _, rest = page.partition(f"\n{heading}\n")
    return f"{before.rstrip()}\n\n{heading}\n\n{text.strip()}\n{kept(rest)}"
