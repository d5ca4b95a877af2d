"""The site: ``sphinx-build -W docs site``. It fetches nothing, and works without a network."""

from __future__ import annotations

import re
from importlib.metadata import version as _version
from pathlib import Path
from typing import Any

project = "planner"
release = version = _version("planner")
project_copyright = "the planner authors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_*"]
default_role = "code"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("ArrayLike", "Floats", "Ints")}
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"planner {release}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False

FILES = {"overview": "README.md", "extend": "CONTRIBUTING.md", "changes": "CHANGELOG.md"}
"""Pages whose text is a file beside ``docs/``."""


def _source(app: Any, page: str, source: list[str]) -> None:
    """Text of those pages; links that GitHub follows to files lead to pages."""
    if page in FILES:
        path = Path(app.srcdir).parent / FILES[page]
        app.env.note_dependency(str(path))
        source[0] = path.read_text().replace("](docs/", "](")
    up = "../" * page.count("/")
    for name, file in FILES.items():
        source[0] = re.sub(rf"\]\((?:\.\./)*{file}", f"]({up}{name}.md", source[0])
    # files outside docs/ are no pages: name them instead
    outside = r"\[(`?)([^]]*)\]\((?:\.\./)*((?:benchmarks/|planner/|CITATION)[^)]*)\)"
    source[0] = re.sub(outside, _named, source[0])


def _named(link: re.Match[str]) -> str:
    """The path of a file that a link leads to, after the link's text unless that is the path."""
    is_path, text, target = link.groups()
    return f"`{target}`" if is_path else f"{text} (`{target}`)"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _source)
