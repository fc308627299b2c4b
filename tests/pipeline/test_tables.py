import math

import pytest

from grove_adapters.calibration import Score
from grove_adapters.pipeline.tables import markdown_table, short, text_table

ROWS = [("grove", [Score(0.7312, 0.6, 0.8), Score(math.nan)]), ("ttda", [Score(-0.5), None])]


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.7312, 3, ".731"),
        (-0.98, 2, "−.98"),
        (1.0, 2, "1.00"),
        (0.999, 2, "1.00"),
        (-0.999, 2, "−1.00"),
        (-0.001, 2, ".00"),
        (12.345, 1, "12.3"),
        (0.0, 3, ".000"),
    ],
)
def test_numbers_are_short_and_never_minus_zero(value, digits, text):
    assert short(value, digits) == text


def test_a_terminal_table_is_aligned_and_intervals_stand_below():
    lines = text_table("title", ["adapter", "R@1", "S"], ROWS).splitlines()
    assert lines[0] == "title"
    assert lines[2].split() == ["adapter", "R@1", "S"]
    assert set(lines[3]) == {"─"}
    assert lines[4].split() == ["grove", ".731", "undefined"]
    assert lines[5].split(maxsplit=1) == ["[.60,", ".80]"]
    assert lines[6].split() == ["ttda", "−.500"]
    assert lines[2].index("R@1") + 3 == lines[4].index(".731") + 4 == lines[5].index("]") + 1


def test_a_markdown_table_has_a_cell_for_every_column():
    lines = markdown_table("title", ["adapter", "R@1", "S"], ROWS).splitlines()
    assert lines[2:] == [
        "| adapter | R@1 | S |",
        "| --- | ---: | ---: |",
        "| grove | .731 [.60, .80] | undefined |",
        "| ttda | −.500 |  |",
    ]
