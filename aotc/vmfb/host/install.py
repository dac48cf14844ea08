"""Installation commands for missing packages, for the running aotc."""

from __future__ import annotations

import json
import os
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse


def install_command(extra: str = "") -> str:
    """Return the command that installs aotc with an extra.

    If aotc was installed from a folder, such as a checkout, the command names that folder: an index may have another
    version.
    """
    source = _source()
    named = "aotc" if source is None else "." if source == Path.cwd() else str(source)
    return f"pip install {shlex.quote(f'{named}[{extra}]' if extra else named)}"


def _source() -> Path | None:
    """Return the folder that aotc was installed from, or runs in; None if it came from an index."""
    checkout = Path(__file__).parents[3]
    if (checkout / "pyproject.toml").is_file():
        return checkout
    try:
        told = metadata.distribution("aotc").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    place = urlparse(json.loads(told).get("url", "") if told else "")
    folder = Path(os.fsdecode(unquote(place.path)))
    return folder if place.scheme == "file" and (folder / "pyproject.toml").is_file() else None
