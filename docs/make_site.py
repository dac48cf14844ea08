"""What mkdocs calls: the site begins with the README, and has the list of changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie beside the folder of the documentation, with links as they are inside of it."""
    from mkdocs.structure.files import File

    for name, source in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
        files.append(File.generated(config, name, content=text))
    return files
