"""Names of plans in narrow tables: broken where they read well, never cut off."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcoll.printing import Name, as_text, broken, plain_table

NAME = "hierarchical(direct/cast(bfloat16), recursive_doubling/int8 in 2 chunks)"


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        (NAME, 80, [NAME]),
        (
            NAME,
            40,
            ["hierarchical(direct/cast(bfloat16),", "recursive_doubling/int8 in 2 chunks)"],
        ),
        (
            NAME,
            20,
            ["hierarchical(direct/", "cast(bfloat16),", "recursive_doubling/", "int8 in 2 chunks)"],
        ),
        ("> hierarchical(ring, native)", 16, ["> hierarchical(", "ring, native)"]),
        ("recursive_doubling", 12, ["recursive_", "doubling"]),
        ("all of it", 4, ["all", "of", "it"]),
        ("bidirectional", 6, ["bidire", "ctiona", "l"]),
        ("two\nlines", 8, ["two", "lines"]),
        ("", 8, []),
    ],
)
def test_names_are_broken_where_they_read_well(text, width, lines):
    assert broken(text, width) == lines


@given(st.text("ab (/_,\n"), st.integers(1, 12))
def test_nothing_is_lost_and_no_line_too_long(text, width):
    lines = broken(text, width)
    assert all(len(line) <= width for line in lines)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)


def test_a_narrow_column_cuts_no_word(monkeypatch):
    table = plain_table()
    for name in ("plan", "time"):
        table.add_column(name)
    table.add_row(Name(NAME), "at least so many columns as the terminal has less a few")
    monkeypatch.setenv("COLUMNS", "60")
    text = as_text(table, least_width=60)
    words = set(re.split(r"[^a-z0-9]+", NAME)) - {""}
    assert words <= set(re.split(r"[^a-z0-9]+", text))
    assert max(map(len, text.splitlines())) <= 60
