"""Hooks of mkdocs: pages from the top of the repository, and what the search finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "report_a_vulnerability.md": "SECURITY.md",
    "code_of_conduct.md": "CODE_OF_CONDUCT.md",
}
UNSEARCHED = {"results.md", "conformance.md", "conformance_cuda.md", "edges.md", "zoo.md"}
UNSEARCHED |= {"changelog.md", "changes_0.1.0.md", "house.md", "measurements.md"}
FIRST = ("get_started/", "tutorials/")  # their pages come first where several match


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the top of the repository, with links as they are inside the site."""
    from mkdocs.structure.files import File

    for name, source in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](").replace("](README.md)", "](index.md)")
        for other, path in PAGES.items():
            text = text.replace(f"]({path})", f"]({other})")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Set the page's place in the search, and leave out the comment for ``make_snippets.py``."""
    path = page.file.src_uri
    if path in UNSEARCHED or path.startswith("decisions/"):
        page.meta["search"] = {"exclude": True}
    elif path.startswith(FIRST):
        page.meta["search"] = {"boost": 4}
    for name, source in PAGES.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    return re.sub(r"\A<!-- needs: .* -->\n", "", markdown)
