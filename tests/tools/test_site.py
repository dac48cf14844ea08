"""The documentation as a site: every page is in it, and no link is broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="pip install mkdocs-material")
pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]


def build(config, to):
    """Return what mkdocs says to a site of the configuration, in a folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(to)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_the_site_is_whole(tmp_path):
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    missing = {p.stem for p in (ROOT / "docs").glob("*.md")} - {p.name for p in tmp_path.iterdir()}
    assert missing == set()
    front = (tmp_path / "index.html").read_text()
    assert 'href="status/"' in front
    assert 'src="house.svg"' in front


def test_a_broken_link_fails(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[gone](gone.md)")
    config = tmp_path / "mkdocs.yml"
    settings = (ROOT / "mkdocs.yml").read_text().partition("nav:")[0]
    config.write_text(settings.replace("hooks: [docs/make_site.py]", ""))
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert "gone.md" in done.stderr + done.stdout
