"""The site: every public name is in the reference, every page in the contents; it builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import planner

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_reference_has_every_public_name_once() -> None:
    """And nothing else."""
    directive = re.compile(r"^\.\. (?:auto\w+|py:data):: (\w+)$", re.M)
    pages = (DOCS / "reference").glob("*.md")
    named = [name for page in pages for name in directive.findall(page.read_text())]
    assert sorted(named) == sorted(planner.__all__)


def test_links_lead_somewhere() -> None:
    """Those between files of the repository, which GitHub follows."""
    for page in (*DOCS.rglob("*.md"), *ROOT.glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[\w-]+)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_no_page_has_a_section_twice() -> None:
    """As a merge may leave it."""
    for page in DOCS.rglob("*.md"):
        headings = re.findall(r"^#+ .*$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()), re.M)
        assert len(headings) == len(set(headings)), page.name


def test_pages_are_in_the_contents() -> None:
    """Each once."""
    entries: list[Path] = []
    for page in DOCS.rglob("*.md"):
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.M | re.S):
            lines = [line for line in tree.splitlines() if line and not line.startswith(":")]
            names = [line.split("<")[-1].rstrip(">") for line in lines]
            entries += [(page.parent / f"{name}.md").resolve() for name in names]
    assert sorted(entries) == sorted(set(DOCS.rglob("*.md")) - {DOCS / "index.md"})


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Offline: no page asks another host for a script, a style or a picture."""
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(DOCS), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        assert fetched == [], page.name
