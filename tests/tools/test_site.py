"""The documentation as a site: every page is in it, no link is broken, and the search finds the right page first."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="pip install mkdocs-material")
pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
MADE_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")


def build(config, to):
    """Return what mkdocs says to a site of the configuration, in a folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(to)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page(site):
    pages = [path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    homes = [path.parent if path.name == "index" else path for path in pages]
    assert [str(home) for home in homes if not (site / home / "index.html").exists()] == []
    front = (site / "index.html").read_text()
    assert 'href="get_started/install/"' in front
    assert 'src="how_it_works.svg"' in front


def test_a_menu_of_versions_is_in_each_page(site):
    page = (site / "index.html").read_text()
    found = re.search(r'<script id="__config" type="application/json">(.*?)</script>', page)
    assert json.loads(found[1])["version"] == {"alias": True, "provider": "mike"}


def test_sites_of_several_versions_are_published_together(tmp_path):
    pytest.importorskip("mike", reason="make .venv-site/ready")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment |= {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for part in ("docs", "mkdocs.yml", "README.md", *MADE_PAGES):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])  # mike runs mkdocs
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, env=environment, check=True)
    for version in ("0.1", "0.2"):
        command = ["mike", "deploy", "--update-aliases", version, "latest"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300)
    shown = subprocess.run(
        ["git", "show", "gh-pages:versions.json"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert [(row["version"], row["aliases"]) for row in json.loads(shown.stdout)] == [("0.2", ["latest"]), ("0.1", [])]


def test_results_and_decisions_are_not_in_the_search(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    pages = {entry["location"].partition("#")[0] for entry in entries}
    assert {"api/", "get_started/quickstart_python/", "tutorials/kv_cache/"} <= pages
    assert not {"results/", "conformance/", "decisions/", "changelog/"} & pages


def test_the_search_finds_the_right_page_first(site):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js: apt install nodejs")
    first = {
        "quick start": "get_started/quickstart_python/",
        "tutorial": "tutorials/",
        "kv cache": "tutorials/kv_cache/",
        "exceptions": "get_started/quickstart_python/#exceptions",
        "install": "get_started/install/",
        "keras": "tutorials/keras_classifier/",
        "pytorch": "tutorials/pytorch/",
    }
    command = [node, str(Path(__file__).with_name("search_site.mjs")), str(site), *first]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert {query: pages[0] for query, pages in json.loads(done.stdout).items()} == first


def test_a_broken_link_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[gone](gone.md)")
    config = tmp_path / "mkdocs.yml"
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    config.write_text(settings.replace("hooks: [docs/make_site.py]", ""))
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert "gone.md" in done.stderr + done.stdout
