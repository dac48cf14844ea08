"""Installation commands for missing packages, for the running aotc, which error messages show."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

_OWN = re.compile(r"aotc\[([\w,-]+)\]$")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


def install_command(extra: str = "") -> str:
    """Return the shell command that installs the requirements of aotc, or of one of its extras.

    It names the folder, file or address that aotc was installed from. Where that is unknown, it names the packages of
    the extra: no index is assumed to have aotc.
    """
    source = _install_source()
    if source is None:
        packages = list(_required_packages(extra))
        return f"pip install {' '.join(map(shlex.quote, packages))}" if packages else f"install aotc[{extra}]"
    if "://" in source:
        return f"pip install {shlex.quote(f'aotc[{extra}] @ {source}' if extra else source)}"
    named = "." if source == str(Path.cwd()) else source
    return f"pip install {shlex.quote(f'{named}[{extra}]' if extra else named)}"


def _install_source() -> str | None:
    """Return the folder, file or address that aotc was installed from, or its source checkout; None if unknown."""
    checkout = Path(__file__).parents[3]
    if (checkout / "pyproject.toml").is_file():
        return str(checkout)
    try:
        record = metadata.distribution("aotc").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    row = json.loads(record) if record else {}
    place = urlparse(row.get("url", ""))
    if place.scheme == "file":
        path = Path(os.fsdecode(unquote(place.path)))
        return str(path) if path.is_file() or (path / "pyproject.toml").is_file() else None
    kind = f"{row['vcs_info']['vcs']}+" if "vcs_info" in row else ""
    return f"{kind}{row['url']}" if place.scheme else None


def _required_packages(extra: str) -> Iterator[str]:
    """Yield the requirements of aotc, or of an extra, and of the extras that it includes."""
    try:
        required: Sequence[str] = metadata.distribution("aotc").requires or ()
    except metadata.PackageNotFoundError:
        return
    for row in required:
        package, _, condition = (part.strip() for part in row.partition(";"))
        of = _EXTRA.search(condition)
        if (of[1] if of else "") != extra:
            continue
        if own := _OWN.match(package):
            for name in own[1].split(","):
                yield from _required_packages(name)
        else:
            yield package
