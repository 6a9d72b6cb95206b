"""The whole screen, fed with records: pictures at three sizes, keys, dialogs, resizing, and leaving. No torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from textual.pilot import Pilot

from tests.dashboard.views import GIB, HOSTILE, NOW, gain, started, step
from tui3090 import own
from tui3090.commands import Change, Command, Evaluate, MakeSave, MeasureActivations, Pause, Profile, Stop, Withdraw
from tui3090.dashboard import app as app_module
from tui3090.dashboard import panel as panel_module
from tui3090.dashboard.app import Dashboard, theme
from tui3090.dashboard.governor import Governor
from tui3090.dashboard.keys import SETTLE_S
from tui3090.dashboard.layout import ONE_COLUMN
from tui3090.dashboard.panels import techniques
from tui3090.dashboard.view import View
from tui3090.records import Available, Changed, Evaluated, Event, Phases, Profiled, Reading, Record, Stage, State
from tui3090.settings import TECHNIQUES

PICTURES = Path(__file__).parent / "pictures"
SIZES = [(160, 50), (200, 60), (80, 24)]


class FedSource:
    """A source that gives what a test feeds it, and keeps what is sent."""

    def __init__(self, *records: Record, live: bool = True, read_only: str = "") -> None:
        self.live, self.read_only = live, read_only
        self.waiting = list(records)
        self.sent: list[Command] = []
        self.begun = 0

    def start(self) -> None:
        self.begun += 1

    def drain(self) -> list[Record]:
        drained, self.waiting = self.waiting, []
        return drained

    def send(self, command: Command) -> None:
        self.sent.append(command)


TRAINING = State(time=NOW - 800, state="training")
MISSING = Available(time=NOW - 890, technique="graph", reason="needs a CUDA card")


def trained() -> list[Record]:
    """1 412 steps on a card, with changes, an evaluation and readings; figures made by formula."""
    records: list[Record] = [
        *(Stage(time=NOW - 899, name=name, seconds=0.4) for name in ("torch", "train.py", "model", "data", "device")),
        started(),
        Available(time=NOW - 890, technique="tf32", reason="no effect under AMP"),
        TRAINING,
    ]
    for n in range(1, 1413):
        loss = 0.4 + 0.4 * math.exp(-n / 300) + 0.03 * math.sin(n * 12.9898)
        records.append(step(n, time=NOW - 0.3 - (1412 - n) * 0.5, loss=loss, seconds=0.5, stall_s=0.01, wait_s=0.1))
        if n == 250:
            records.append(Changed(time=NOW - 580, step=251, technique="amp", old="off", new="bf16"))
        if n == 275:
            records.append(gain(251, "amp", "off", "bf16"))
        if n == 900:
            records.append(Changed(time=NOW - 250, step=901, technique="accumulate", old=1, new=2))
    reading = Reading(
        time=NOW - 0.5,
        allocated=5 * GIB,
        reserved=14 * GIB,
        peak_allocated=12 * GIB,
        weights=GIB,
        gradients=GIB,
        optimizer_state=2 * GIB,
        card_total=24 * GIB,
        card_used=16 * GIB,
        others=GIB,
        own=15 * GIB,
        util=0.99,
        power_w=341.0,
        power_limit_w=350.0,
        temperature_c=79.0,
        clock_mhz=1695,
        clock_max_mhz=1965,
        held_back="power",
        cpu=1.1,
        rss=4 * GIB,
        host_total=64 * GIB,
        host_available=50 * GIB,
    )
    phases = Phases(
        time=NOW - 0.8,
        step=1411,
        seconds=0.5,
        data_s=0.01,
        copy_s=0.002,
        forward_s=0.15,
        backward_s=0.31,
        optimizer_s=0.02,
    )
    profiled = Profiled(
        time=NOW - 41,
        step=1330,
        tensor_core_share=0.78,
        unknown_share=0.0,
        fp32_share=0.0,
        busy_share=0.99,
        kernels=1400,
        kernel_s=0.4,
        without="layer_norm 9.1 %, Gelu 6.0 %, FusedAdam 5.0 %",
        off_by_8="classifier [2 × 1024]",
    )
    records += [phases, profiled]
    said = Event(time=NOW - 250, level="info", source="key", text="accumulation 1 → 2, in force from step 901")
    return [*records, Evaluated(time=NOW - 100, step=1200, loss=0.447, metrics="accuracy 0.862"), reading, said]


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("COLORFGBG", "TUI3090_THEME", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(techniques, "CORES", 8)
    # reading the screen again and again costs CPU time, which is the test's and not the screen's
    monkeypatch.setattr(app_module, "Governor", lambda now: Governor(now, lambda: 0.0))
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def dashboard(source: FedSource, view: View | None = None) -> Dashboard:
    return Dashboard(source, view or View(name="bert-large"), clock=lambda: NOW)


def screen(app: Dashboard) -> list[str]:
    """The screen as it reads."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


async def until(pilot: Pilot[int], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s for it"
        await pilot.pause(0.02)


async def until_reads(pilot: Pilot[int], words: str) -> None:
    app = pilot.app
    assert isinstance(app, Dashboard)
    await until(pilot, lambda: any(words in row for row in screen(app)))


class TestPictures:
    """The screen as text. TUI3090_PICTURES=write writes the files anew: look at the difference before keeping it."""

    async def compare(self, name: str, source: FedSource, size: tuple[int, int], words: str, *keys: str) -> None:
        app = dashboard(source)
        async with app.run_test(size=size) as pilot:
            await until_reads(pilot, words)
            for key in keys:
                await pilot.press(key)
            await pilot.pause()
            picture = "\n".join(screen(app)) + "\n"
        file = PICTURES / f"{name}-{size[0]}x{size[1]}.txt"
        if os.environ.get("TUI3090_PICTURES") == "write":
            file.write_text(picture, "utf-8")
        assert picture == file.read_text("utf-8")

    @pytest.mark.parametrize("size", SIZES)
    async def test_training(self, size: tuple[int, int]) -> None:
        await self.compare("training", FedSource(*trained()), size, "1 412")

    @pytest.mark.parametrize("size", SIZES)
    async def test_loading(self, size: tuple[int, int]) -> None:
        stage = Stage(time=NOW - 2, name="torch")
        await self.compare("loading", FedSource(stage, MISSING), size, "elapsed 2.0 s")

    @pytest.mark.parametrize("size", SIZES)
    async def test_help(self, size: tuple[int, int]) -> None:
        await self.compare("help", FedSource(*trained()), size, "1 412", "question_mark")

    async def test_failed(self) -> None:
        failed = State(time=NOW, state="failed", detail="train.py, line 12: the batch has no labels.")
        await self.compare("failed", FedSource(*trained(), failed), (80, 24), "line 12")


class TestLife:
    async def test_the_source_starts_once_after_the_first_paint(self) -> None:
        source = FedSource()
        app = dashboard(source)
        async with app.run_test(size=(160, 50)) as pilot:
            await until(pilot, lambda: source.begun)
            assert "LOADING" in screen(app)[0]
            source.waiting = trained()
            await until_reads(pilot, "TRAINING")
        assert source.begun == 1

    async def test_a_run_folder_is_looked_at_as_it_was_at_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its time on screen stands still; an answer goes away all the same."""
        monkeypatch.setattr(app_module, "ANSWERED_S", 0.5)
        view = View(name="old", live=False)
        over = State(time=NOW - 9999, state="finished")
        app = dashboard(FedSource(*trained(), over, live=False, read_only="This is a look."), view)
        async with app.run_test(size=(80, 24)) as pilot:
            await until_reads(pilot, "FINISHED")
            await pilot.press("a")
            await until_reads(pilot, "The run is over (finished): q leaves.")
            await until_reads(pilot, "x picture   ? help   q leave")
            await pilot.press("q")
            await until(pilot, lambda: app.return_value == 0)

    async def test_output_of_training_reaches_the_log(self, tmp_path: Path) -> None:
        (tmp_path / "output.log").write_text("Map: 100 %\x1b[31m done\n")
        app = dashboard(FedSource(*trained()), View(name="x", folder=str(tmp_path)))
        async with app.run_test(size=(160, 50)) as pilot:
            await until_reads(pilot, "Map: 100 % done")

    async def test_hostile_words_are_shown_and_not_obeyed(self) -> None:
        view = View(name=HOSTILE)
        records = [started(model=HOSTILE), TRAINING, step(1), Event(time=NOW, level="info", source="x", text=HOSTILE)]
        app = dashboard(FedSource(*records, State(time=NOW, state="failed", detail=HOSTILE)), view)
        async with app.run_test(size=(160, 50)) as pilot:
            await until_reads(pilot, "FAILED  [/data/train] [b]x ␛[31m red")
            assert all(row.isprintable() for row in screen(app))


class TestStandingStill:
    async def test_a_panel_is_made_anew_only_when_what_it_depends_on_changed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[str] = []
        unframed = panel_module.unframed
        monkeypatch.setattr(
            panel_module, "unframed", lambda content, *rest: made.append(content.TITLE) or unframed(content, *rest)
        )
        app = dashboard(FedSource(*trained()))
        async with app.run_test(size=(160, 50)) as pilot:
            await until_reads(pilot, "1 412")
            app._paint()
            made.clear()
            app._paint()
            assert set(made) == {panel.content.TITLE for panel in app._panels.values()} - {"Log", "Changes", "Keys"}
            app._view.absorb([Event(time=NOW, level="info", source="run", text="just happened")])
            app._paint()
            assert {"Log", "Changes"} < set(made)
            assert "Keys" not in made
            await until_reads(pilot, "just happened")
            await pilot.press("7")  # as large as the screen: the rows of before are not enough
            await until_reads(pilot, "just happened")
            await pilot.press("7", "n")
            await until_reads(pilot, "keys locked: n unlocks")


class TestPieces:
    """A look while something trains: in pieces, so that no step waits for all of it."""

    async def test_keys_are_answered_between_two_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shortest_pieces(monkeypatch)
        app, source, view = self.dashboard()
        async with app.run_test(size=(160, 50)) as pilot:
            await until(pilot, lambda: view.state.state == "training")
            source.waiting = [step(n, time=NOW - 1) for n in range(1, 2000)]
            await until(pilot, lambda: view.step is not None)
            await pilot.press("n")
            assert "Keys locked" in view.answer
            assert view.step is not None
            assert view.step.step < 1999, "the look was over before the key"

    async def test_what_came_last_is_not_lost_when_the_screen_goes_meanwhile(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.shortest_pieces(monkeypatch)
        app, source, view = self.dashboard()
        async with app.run_test(size=(160, 50)) as pilot:
            await until(pilot, lambda: view.state.state == "training")
            source.waiting = [*(step(n, time=NOW - 1) for n in range(1, 2000)), State(time=NOW, state="stopped")]
            await until(pilot, lambda: view.step is not None)
            assert app._taken, "the look was over before the screen went"
        assert view.step is not None
        assert (view.step.step, view.state.state) == (1999, "stopped")

    async def test_a_failure_ends_the_screen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app, _, view = self.dashboard()

        def fails(*_: object) -> list[int]:
            raise ZeroDivisionError

        async def watched() -> None:
            async with app.run_test(size=(160, 50)) as pilot:
                await until(pilot, lambda: view.state.state == "training")
                monkeypatch.setattr(app._panels["step"], "show", fails)
                await until(pilot, lambda: not app.is_running)

        with pytest.raises(ZeroDivisionError):
            await watched()
        assert app.return_code

    @staticmethod
    def shortest_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(own, "HELD_S", 0.0)
        monkeypatch.setattr(own, "HELD_OF_STEP", 0.0)

    @staticmethod
    def dashboard() -> tuple[Dashboard, FedSource, View]:
        view, source = View(name="gpt"), FedSource(started(), TRAINING)
        return dashboard(source, view), source, view


class TestKeys:
    async def test_a_press_settles_is_sent_and_comes_into_force(self) -> None:
        source = FedSource(*trained())
        app = dashboard(source)
        async with app.run_test(size=(160, 50)) as pilot:
            await until_reads(pilot, "1 412")
            await pilot.press("t")
            await until_reads(pilot, "TF32: no effect under AMP")
            await pilot.press("c")
            await until_reads(pilot, "▸ every 2nd, from step 1 414")
            await until(pilot, lambda: source.sent == [Change("checkpointing", 2)])
            await until_reads(pilot, "waiting for the step to end")
            source.waiting = [Changed(time=NOW, step=1414, technique="checkpointing", old=0, new=2)]
            await until_reads(pilot, "off → every 2nd")

    @pytest.mark.parametrize(
        ("keys", "change"),
        [
            (["a"], Change("amp", "bf16")),
            (["A"], Change("amp", "fp16")),
            (["plus"], Change("accumulate", 2)),
            (["equals_sign", "equals_sign"], Change("accumulate", 4)),
            (["plus", "plus", "underscore"], Change("accumulate", 2)),
            (["plus", "plus", "minus"], Change("accumulate", 2)),
            (["right_square_bracket"], Change("lr", 1.4)),
            (["left_square_bracket"], Change("lr", 0.7)),
            (["p"], Change("prefetch", 2)),
            (["C"], Change("checkpointing", 1)),
        ],
    )
    async def test_every_key_of_the_table(self, keys: list[str], change: Change) -> None:
        source = FedSource(started(), TRAINING, step(1))
        app = dashboard(source)
        async with app.run_test(size=(80, 24)) as pilot:
            await until_reads(pilot, "TRAINING")
            for key in keys:
                await pilot.press(key)
            await until(pilot, lambda: source.sent)
            assert source.sent == [change]

    async def test_escape_cancels_undo_asks_and_locked_keys_refuse(self) -> None:
        source = FedSource(*trained())
        app = dashboard(source)
        async with app.run_test(size=(160, 50)) as pilot:
            await until_reads(pilot, "1 412")
            await pilot.press("p", "escape")
            await until_reads(pilot, "Cancelled: prefetch.")
            await pilot.press("n", "a")
            await until_reads(pilot, "The keys are locked: n unlocks them.")
            await pilot.press("n", "u")
            await until(pilot, lambda: source.sent)
            assert source.sent == [Change("accumulate", 1)]
            await pilot.press("escape")
            await until(pilot, lambda: Withdraw("accumulate") in source.sent)

    async def test_pause_evaluate_save_and_looks(self) -> None:
        source = FedSource(*trained())
        app = dashboard(source)
        async with app.run_test(size=(160, 50)) as pilot:
            await until_reads(pilot, "1 412")
            await pilot.press("space", "e", "s", "b")
            assert source.sent == [Pause(True), Evaluate(), MakeSave()]
            await until_reads(pilot, "space pauses first")
            await pilot.press("r", "m")
            assert source.sent[3:] == [Profile(), MeasureActivations()]

    async def test_a_digit_zooms_and_goes_back(self) -> None:
        app = dashboard(FedSource(*trained()))
        async with app.run_test(size=(160, 50)) as pilot:
            await until_reads(pilot, "1 412")
            for key, title in (("3", "3 Memory"), ("l", "7 Log"), ("7", "7 Log"), ("1", "1 Loss")):
                await pilot.press(key)
                await pilot.pause()
                rows = screen(app)
                assert rows[2].startswith(f"╭─ {title} ─")
                assert rows[2].endswith("╮")
                assert rows[48] == "╰" + "─" * 158 + "╯"
                await pilot.press("escape")
                await pilot.pause()
                assert screen(app)[2].count("╭") == 2

    async def test_a_picture_lands_in_the_run_folder_and_the_log_says_where(self, tmp_path: Path) -> None:
        app = dashboard(FedSource(*trained()), View(name="x", folder=str(tmp_path)))
        async with app.run_test(size=(160, 50)) as pilot:
            await until_reads(pilot, "1 412")
            await pilot.press("x")
            await until_reads(pilot, "picture written to")
            (picture,) = tmp_path.glob("screen-*.svg")
            assert "Techniques" in picture.read_text("utf-8")
            assert app._view.events[-1].text == f"picture written to {picture}"

    async def test_a_picture_that_can_not_be_written_is_a_sentence(self, tmp_path: Path) -> None:
        app = dashboard(FedSource(*trained()), View(name="x", folder=str(tmp_path / "gone")))
        async with app.run_test(size=(200, 50)) as pilot:
            await until_reads(pilot, "1 412")
            await pilot.press("x")
            await until_reads(pilot, "The picture can't be written to")

    async def test_every_key_has_an_id_and_a_tooltip(self) -> None:
        app = dashboard(FedSource())
        async with app.run_test():
            ours = [bound for key, bound in app._bindings if key not in ("ctrl+q", "ctrl+c", "ctrl+p")]
            assert {technique.name for technique in TECHNIQUES} <= {bound.id for bound in ours}
            assert all(bound.id and bound.tooltip for bound in ours)
            assert "ctrl+z" not in dict(app._bindings.key_to_bindings)


class TestLeaving:
    @pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
    async def test_one_question_that_stops_or_stays(self, key: str) -> None:
        source = FedSource(*trained())
        app = dashboard(source)
        async with app.run_test(size=(80, 24)) as pilot:
            await until_reads(pilot, "TRAINING")
            await pilot.press(key)
            await until_reads(pilot, "stop: training ends with the step in flight")
            await pilot.press("a", "space", key, "escape")
            await pilot.pause(SETTLE_S + 0.05)
            assert source.sent == []
            assert not any("stop: training ends" in row for row in screen(app))
            await pilot.press(key, "s")
            assert source.sent == [Stop()]
            await until_reads(pilot, "STOPPING")
            source.waiting = [State(time=NOW, state="stopped", detail="Stopped at step 1 412.")]
            await until(pilot, lambda: app.return_value == 0)

    async def test_force_needs_a_stop_first_and_leaves_even_when_training_hangs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(app_module, "FORCED_S", 0.05)
        source = FedSource(*trained())
        app = dashboard(source)
        async with app.run_test(size=(80, 24)) as pilot:
            await until_reads(pilot, "TRAINING")
            await pilot.press("Q")
            assert source.sent == []
            await pilot.press("q", "s", "Q")
            assert source.sent == [Stop(), Stop(now=True)]
            await until(pilot, lambda: app.return_value == 0)

    async def test_a_held_q_does_not_leave(self) -> None:
        source = FedSource(*trained())
        app = dashboard(source)
        async with app.run_test(size=(80, 24)) as pilot:
            await until_reads(pilot, "TRAINING")
            await pilot.press(*["q"] * 20)
            assert app.is_running
            assert source.sent == []

    async def test_locked_keys_keep_q_from_asking(self) -> None:
        app = dashboard(FedSource(*trained()))
        async with app.run_test(size=(80, 24)) as pilot:
            await until_reads(pilot, "TRAINING")
            await pilot.press("n", "q")
            await until_reads(pilot, "The keys are locked: n unlocks them; ctrl+q")
            await pilot.press("ctrl+q")
            await until_reads(pilot, "stop: training ends")

    async def test_after_the_end_q_just_leaves(self) -> None:
        app = dashboard(FedSource(*trained(), State(time=NOW, state="finished")))
        async with app.run_test(size=(80, 24)) as pilot:
            await until_reads(pilot, "FINISHED")
            await pilot.press("q")
            await until(pilot, lambda: app.return_value == 0)


class TestColours:
    @pytest.mark.parametrize(
        ("environment", "name"),
        [
            ({}, "ansi-dark"),
            ({"COLORFGBG": "15;0"}, "ansi-dark"),
            ({"COLORFGBG": "0;15"}, "ansi-light"),
            ({"COLORFGBG": "0;default;7"}, "ansi-light"),
            ({"TUI3090_THEME": "light"}, "ansi-light"),
            ({"TUI3090_THEME": "dark", "COLORFGBG": "0;15"}, "ansi-dark"),
        ],
    )
    def test_the_theme_suits_the_background(
        self, environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        assert theme() == name

    @pytest.mark.parametrize("no_color", [True, False])
    async def test_no_color_leaves_no_colour_and_no_grey(self, no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if no_color:
            monkeypatch.setenv("NO_COLOR", "1")
        app = dashboard(FedSource(*trained()))
        async with app.run_test(size=(160, 50)) as pilot:
            await until_reads(pilot, "1 412")
            colours = {
                str(colour.name)
                for strip in app.screen._compositor.render_strips()
                for segment in strip
                if segment.style
                for colour in (segment.style.color, segment.style.bgcolor)
                if colour is not None and not colour.is_default
            }
        assert colours == (set() if no_color else {"green", "cyan", "magenta", "yellow"} & colours)
        assert bool(colours) is not no_color


KEYS = [*"acgktopwACGKTOPW+-=_[]uneslrmdx?h1234567q", "escape", "space", "ctrl+l", "ctrl+c"]
PRESSES = st.one_of(st.sampled_from(KEYS), st.tuples(st.integers(1, 220), st.integers(1, 70)))


@settings(max_examples=8, deadline=None)
@given(st.lists(PRESSES, max_size=25))
@example(["ctrl+c", "d"])
async def test_any_resizing_and_any_keys_leave_the_screen_alive(presses: list[str | tuple[int, int]]) -> None:
    source = FedSource(*trained())
    app = dashboard(source, View(name="x", folder="/dev/null/none"))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_reads(pilot, "TRAINING")
        for press in presses:
            if isinstance(press, tuple):
                await pilot.resize_terminal(*press)
            else:
                await pilot.press(press)
            if app._view.left:
                break
            source.waiting = [step(1413)]
        await pilot.pause()
        if app._view.left:  # as `d` in the question of `q` asks
            assert "d" in presses
            return
        assert app.is_running
        assert not any(isinstance(command, Stop) for command in source.sent) or app._view.stop_asked
        await pilot.resize_terminal(160, 50)
        await pilot.press("escape", "escape", "escape")
        await pilot.pause()
        shown = "\n".join(screen(app))
        assert app._zoomed or all(app._panels[name].display for name in ONE_COLUMN), shown


def test_the_dashboard_never_imports_torch() -> None:
    code = "import sys, tui3090.dashboard.app, tui3090.dashboard.source; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
