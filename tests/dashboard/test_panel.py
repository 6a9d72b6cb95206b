"""Borders, forms, and that only rows whose words changed are painted again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.strip import Strip

from tests.dashboard.views import texts
from tui3090.dashboard.frame import paint
from tui3090.dashboard.layout import Form, Place
from tui3090.dashboard.panel import Panel
from tui3090.dashboard.text import ROLES, Row, row_width
from tui3090.dashboard.view import View


class Words:
    """A panel's content that says what it is told to."""

    TITLE = "Step and data"

    def __init__(self, *words: str, note: str = "") -> None:
        self.words = list(words)
        self.noted = note

    def note(self, view: View, now: float) -> str:
        return self.noted

    def rows(self, view: View, width: int, height: int, now: float) -> list[Row]:
        return [[(word, "good")] for word in self.words]

    def line(self, view: View, width: int, now: float) -> Row:
        return [(self.words[0], "plain")]


def painted(content: Words, form: Form, width: int, height: int) -> list[str]:
    return texts(paint(content, "2", Place(0, 0, width, height, form), View(), 0.0))


def test_a_box() -> None:
    assert painted(Words("one", "a longer line than fits", note="NVML, 0.5 s"), "box", 40, 5) == [
        "╭─ 2 Step and data ────── NVML, 0.5 s ─╮",
        "│ one                                  │",
        "│ a longer line than fits              │",
        "│                                      │",
        "╰──────────────────────────────────────╯",
    ]


def test_words_that_do_not_fit_are_cut_and_rows_that_do_not_fit_left_off() -> None:
    assert painted(Words("one", "two", "three and more"), "box", 12, 5) == [
        "╭─ 2 Ste… ─╮",
        "│ one      │",
        "│ two      │",
        "│ three a… │",
        "╰──────────╯",
    ]
    assert painted(Words("one", "two"), "box", 8, 3) == ["╭─ 2  ─╮", "│ one  │", "╰──────╯"]


def test_under_a_rule() -> None:
    assert painted(Words("one", note="hint"), "ruled", 36, 3) == ["─ 2 Step and data ─────────── hint ─", " one", ""]


def test_one_row_begins_with_number_and_name() -> None:
    assert painted(Words("stall 0.4 %"), "line", 40, 1) == [" 2 Step    stall 0.4 %"]


def test_bare() -> None:
    assert painted(Words("one", "two"), "bare", 40, 2) == ["one", "two"]


@given(
    st.sampled_from(["box", "ruled", "line", "bare"]),
    st.integers(1, 60),
    st.integers(1, 12),
    st.lists(st.sampled_from(["", "ab", "漢字", "x" * 99]), min_size=1, max_size=14),
)
def test_every_size_is_filled_exactly(form: Form, width: int, height: int, words: list[str]) -> None:
    if form == "line":
        height = 1
    if form == "box":
        width, height = max(width, 5), max(height, 3)
    rows = paint(Words(*words, note="note"), "2", Place(0, 0, width, height, form), View(), 0.0)
    assert len(rows) == height
    assert {row_width(row) for row in rows} == {width}


WHOLE = Place(0, 0, 40, 6, "box")


class OnePanel(App[None]):
    """A screen with one panel, which counts the rows that are asked of it."""

    def __init__(self, content: Words, place: Place = WHOLE) -> None:
        super().__init__(ansi_color=True)
        self.panel = Panel(content, "step", "2")
        self.place = place
        self.asked: list[Region | None] = []
        """None: all of them."""
        self.layouts = 0

    def compose(self) -> ComposeResult:
        yield self.panel

    def on_mount(self) -> None:
        self.panel.put(self.place)
        refresh = self.panel.refresh

        def counting(*regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Panel:
            self.asked += regions or [None]
            self.layouts += layout
            return refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

        self.panel.refresh = counting  # type: ignore[method-assign]


async def test_only_rows_that_changed_are_painted_again() -> None:
    content = Words("one", "two", "three")
    app = OnePanel(content)
    async with app.run_test(size=(40, 6)) as pilot:
        app.asked.clear()
        assert app.panel.show(View(), 0.0) == []  # all of it, by Textual
        assert app.asked == [None]
        await pilot.pause()
        app.asked.clear()
        app.layouts = 0
        assert app.panel.show(View(), 0.0) == []
        content.words[1] = "2"
        assert app.panel.show(View(), 0.0) == [2]
        assert app.asked == []
        app.panel.refresh_rows([2])
        assert app.asked == [Region(0, 2, 40, 1)]
        assert app.layouts == 0
        await pilot.pause()
        assert app.panel.render_lines(Region(0, 2, 40, 1))[0].text == "│ 2                                    │"


@pytest.mark.parametrize("place", [WHOLE, Place(7, 3, 20, 4, "ruled")])
@pytest.mark.parametrize("role", ROLES)
async def test_the_terminal_gets_a_row_as_textual_paints_it(place: Place, role: str) -> None:
    class Told(Words):
        def rows(self, view: View, width: int, height: int, now: float) -> list[Row]:
            return [[("plain ", "plain"), (word, role)] for word in self.words]

    app = OnePanel(Told("one", "two 漢字 and more than fits", "\x1b[31mthree"), place)
    async with app.run_test(size=(60, 9)):
        app.panel.show(View(), 0.0)
        rows = range(place.height)
        painted = [app.panel.render_lines(Region(0, y, place.width, 1))[0].render(app.console) for y in rows]
        expected = [f"\x1b[{place.y + y + 1};{place.x + 1}H{row}" for y, row in enumerate(painted)]
        assert app.panel.sequences(list(rows)) == "".join(expected)


async def test_before_it_was_shown_a_panel_is_blank() -> None:
    app = OnePanel(Words("one"))
    async with app.run_test(size=(40, 6)):
        assert app.panel.render_lines(Region(0, 0, 40, 1)) == [Strip.blank(40)]
