"""Sphinx's configuration of the documentation site: `python -m sphinx -W --keep-going migration_guide build/site`.

Pages are the Markdown files of this folder, as GitHub shows them. Only on the site are the reference, made from
docstrings, and pages that include files from elsewhere in the repository; those are reStructuredText.
"""

from pathlib import Path

import flax_ckpt_compat

project = "flax-ckpt-compat"
author = "The flax_ckpt_compat authors"
version = release = flax_ckpt_compat.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["conf.py"]

html_theme = "furo"
html_title = f"flax-ckpt-compat {version}"
html_static_path = ["_site"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("_site") / "search.js")
html_show_copyright = False
html_copy_source = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]
default_role = "py:obj"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 60
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Every name has to be on the site but those of others, whose sites cannot be reached while this one is built.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(collections|concurrent|datetime|jax|np|numpy|os|re|types)\..*"),
    ("py:class", r"flax_ckpt_compat\.(api\._Unset|api\.Tree|config\.Changes)|LeafKind|Path|Reader"),
]
suppress_warnings = ["myst.header"]  # the tables of results have no sections of the second level

# The start page stays free of directives, which GitHub would show as code. "*" are pages that no part names.
PARTS = {
    "Learn": [
        "guide",
        "how_to",
        "changed_state",
        "recipes",
        "many_hosts",
        "leaving",
        "*",
    ],
    "Look up": ["troubleshooting", "commands", "settings", "differences", "reference/index"],
    "Know more": [
        "formats",
        "object_stores",
        "numbers",
        "results",
        "stability",
        "changelog",
    ],
}
# Files of the repository that the site has as pages, by how the Markdown pages link to them.
INCLUDED = {"../CHANGELOG.md": "changelog.rst", "../tests/benchmarks/RESULTS.md": "results.rst"}


def _toctree(entries: list[str], caption: str = "") -> str:
    options = f":caption: {caption}\n" if caption else ""
    return "\n\n```{toctree}\n:hidden:\n" + options + "\n" + "\n".join(entries) + "\n```\n"


def _complete_page(app, docname, source):
    """Add the tables of contents to the start page, and point links at included files to their pages."""
    text = source[0]
    for file, page in INCLUDED.items():
        text = text.replace(f"]({file}", f"]({page}")
    if docname == "index":
        named = {page for part in PARTS.values() for page in part} | {"index"}
        others = sorted(page for page in app.env.found_docs if "/" not in page and page not in named)
        for caption, pages in PARTS.items():
            entries = [entry for page in pages for entry in (others if page == "*" else [page])]
            text += _toctree(entries, caption)
    source[0] = text


def setup(app):
    """Register what completes the pages."""
    app.connect("source-read", _complete_page)
