"""Documents as text of any width and as HTML."""

import pytest

from aotc.display.document import Column, Document, Line, Preformatted, facts_table, table
from aotc.display.shown import DisplayedResult, render_html
from aotc.display.text import elide_text, fold_text, render_text, table_layout

pytestmark = pytest.mark.ir

COLUMNS = [Column("kernel"), Column("time", right=True), Column("bound", priority=2), Column("from", priority=1)]
ROWS = [
    ("k0_fused_dot_general_add_relu_of_a_long_name", "12.3 us", "memory", "blocks/0/attn/query/kernel/model.py:41"),
    ("k1", "1.2 us", "compute", "model.py:42"),
]


def lines_of(width, *blocks):
    return render_text(Document("", blocks), width).split("\n")


@pytest.mark.parametrize("width", range(30, 140, 5))
def test_a_table_fits_any_width(width):
    lines = lines_of(width, table(COLUMNS, ROWS))
    assert max(map(len, lines)) <= width
    text = "".join("".join(line.split()) for line in lines)
    assert all(row[1].replace(" ", "") in text for row in ROWS), "numbers stay whole"


def test_columns_are_left_out_by_priority():
    assert "bound" in lines_of(80, table(COLUMNS, ROWS))[0]
    narrow = lines_of(40, table(COLUMNS, ROWS))
    assert narrow[0].split() == ["kernel", "time"]
    assert " ".join(" ".join(narrow).split()).endswith("(columns for a wider terminal: bound, from)")


def test_names_fold_at_their_separators_only():
    for width in range(40, 140):
        lines = lines_of(width, table(COLUMNS[:2], [row[:2] for row in ROWS]))
        name = [line.split()[0] for line in lines[2:] if line[0] != " "]
        assert "".join(name) == ROWS[0][0] + ROWS[1][0]
        assert all(part.endswith("_") for part in name[:-2])


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("a bb ccc", 4, ["a bb", "ccc"]),
        ("", 4, [""]),
        ("blocks/0/attn/q", 9, ["blocks/0/", "attn/q"]),
        ("a_long_name", 6, ["a_", "long_", "name"]),
        ("unbreakable", 4, ["unbreakable"]),
    ],
)
def test_fold_text_breaks_at_spaces_and_separators(text, width, lines):
    assert fold_text(text, width) == lines


def test_elide_leaves_out_the_middle():
    assert elide_text("abcdefghij", 5) == "ab…ij"
    assert elide_text("abc", 3) == "abc"


def test_layout_shrinks_the_widest_column_first():
    columns = [Column("a"), Column("b")]
    assert table_layout(columns, [["x x x x x x x x x x"], ["y y"]], 15) == ((0, 1), (10, 3))


def test_empty_columns_are_left_out():
    lines = lines_of(80, table([Column("a"), Column("b"), Column("c")], [("1", "", "3")]))
    assert lines[0].split() == ["a", "c"]


def test_facts_tables_have_no_heading_and_omit_empty_values():
    assert lines_of(80, facts_table([("size", "1 kB"), ("source", "")])) == ["size  1 kB"]


def test_lines_continue_indented():
    assert lines_of(10, Line("one two three", 2)) == ["  one two", "      three"]


def test_a_blank_line_follows_a_table():
    blocks = (Line("a table:"), facts_table([("x", "1")]), Line("after"), Preformatted("  as it\n is"))
    assert lines_of(80, *blocks) == ["a table:", "x  1", "", "after", "  as it", " is"]


def test_html_is_escaped():
    html = render_html(Document("<title>", (Line("a & b"), table([Column("<h>", right=True)], [("<1>",)]))))
    assert "<title>" not in html
    assert "&lt;title&gt;" in html
    assert "a &amp; b" in html
    assert "<td style='text-align:right'>&lt;1&gt;</td>" in html


def test_a_result_is_shown_as_its_document():
    class Result(DisplayedResult):
        def document(self):
            return Document("title", (Line("line"),))

    assert str(Result()) == repr(Result()) == "title\nline"
    assert "<b>title</b>" in Result()._repr_html_()
