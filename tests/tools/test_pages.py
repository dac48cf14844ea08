"""The snippets of the guides run, and print what the pages show."""

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

MADE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_snippets.py"))


@pytest.mark.parametrize("path", MADE["PAGES"], ids=lambda path: "/".join(path.parts[-2:]))
def test_snippets_print_what_the_page_shows(path, update):
    for package in MADE["needs"](path.read_text()):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    text = MADE["page"](path)
    if update:
        path.write_text(text)
    assert path.read_text() == text, f"run python docs/make_snippets.py {path.name}"


@pytest.mark.parametrize(
    ("expected", "printed"),
    [("61.5 kB, 2.69 s", "61 kB, 880 ms"), ("a   b\n", "a b"), ("error 1.5e-06", "error 2e-07")],
)
def test_times_sizes_and_columns_may_differ(expected, printed):
    assert MADE["same"](expected, printed)


@pytest.mark.parametrize(("expected", "printed"), [("2 kernels", "3 kernels"), ("f32[b, 2]", "f32[2, b]"), ("", "a")])
def test_other_words_and_counts_are_errors(expected, printed):
    assert not MADE["same"](expected, printed)


def test_numbers_of_a_block_with_a_title_may_be_any():
    assert MADE["same"]("k1  33.6  51 us", "k1  4.5  1.2 ms", any_numbers=True)
    assert not MADE["same"]("k1  33.6", "other  33.6", any_numbers=True)
