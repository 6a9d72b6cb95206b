"""Where the panels stand: the sizes of the drafts, and that every size has its places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui3090.dashboard.layout import ONE_COLUMN, Place, places

SIZES = st.tuples(st.integers(1, 260), st.integers(1, 120))


def test_at_160_by_50_two_columns_of_boxes() -> None:
    shown = places(160, 50)
    assert shown["header"] == Place(0, 0, 160, 2, "bare")
    assert shown["footer"] == Place(0, 49, 160, 1, "bare")
    left = {name: (place.y, place.height) for name, place in shown.items() if place.x == 0 and place.width == 100}
    assert left == {"loss": (2, 20), "step": (22, 6), "memory": (28, 9), "log": (37, 12)}
    assert shown["techniques"] == Place(100, 2, 60, 14, "box")
    assert all(place.form == "box" for name, place in shown.items() if name in ONE_COLUMN)


def test_at_80_by_24_one_column_in_which_measurements_take_a_row_each() -> None:
    shown = places(80, 24)
    rows = {name: (place.form, place.height) for name, place in shown.items()}
    assert rows == {
        "header": ("bare", 2),
        "loss": ("ruled", 8),
        "step": ("line", 1),
        "memory": ("line", 1),
        "tensor_cores": ("line", 1),
        "gpu": ("line", 1),
        "techniques": ("ruled", 4),
        "changes": ("ruled", 3),
        "try_next": ("line", 1),
        "log": ("line", 1),
        "footer": ("bare", 1),
    }


@given(SIZES)
def test_panels_fill_the_screen_without_overlapping(size: tuple[int, int]) -> None:
    width, height = size
    shown = places(width, height).values()
    assert all(place.x + place.width <= width and place.y + place.height <= height for place in shown)
    cells = sum(place.width * place.height for place in shown)
    taken = {(x, y) for p in shown for y in range(p.y, p.y + p.height) for x in (p.x, p.x + p.width - 1)}
    assert len(taken) == sum(p.height * min(2, p.width) for p in shown)
    if height > 12:
        assert cells == width * height


@given(SIZES)
def test_techniques_and_changes_never_disappear(size: tuple[int, int]) -> None:
    width, height = size
    if height >= 5:
        assert {"techniques", "changes"} <= places(width, height).keys()


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
def test_a_zoomed_panel_takes_all_between_header_and_footer(size: tuple[int, int]) -> None:
    width, height = size
    assert places(width, height, "memory")["memory"] == Place(0, 2, width, height - 3, "box")
    assert places(width, height, "memory").keys() == {"header", "memory", "footer"}
