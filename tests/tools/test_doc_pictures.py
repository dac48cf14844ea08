"""The pictures of ``docs`` are what ``aotc explain`` draws."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_pictures_in_docs_are_up_to_date(update):
    made = runpy.run_path(str(DOCS / "make_pictures.py"))
    for path, contents in made["pictures"]().items():
        if update:
            path.write_text(contents)
        assert path.read_text() == contents, "run python docs/make_pictures.py"


def test_pages_show_their_pictures():
    pairs = {"devices": "affinity", "scheduling": "schedule", "costs": "schedule", "memory": "memory"}
    for page, picture in pairs.items():
        assert f"]({picture}.svg)" in (DOCS / f"{page}.md").read_text()


def test_the_picture_shows_the_model_of_its_page():
    stages = runpy.run_path(str(DOCS / "make_pictures.py"))["STAGES"]
    assert stages in (DOCS / "devices.md").read_text()
