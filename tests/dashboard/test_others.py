"""Other runs behind this one: which is the last, what is read of it, and how it is drawn."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.dashboard.views import NOW, step, texts, view
from tui3090.compare import table
from tui3090.dashboard.chart import draw
from tui3090.dashboard.curve import Curve, Other
from tui3090.dashboard.others import last_run, read_curve, read_last_run, read_others
from tui3090.dashboard.panels import loss
from tui3090.dashboard.text import row_width
from tui3090.dashboard.view import View
from tui3090.lines import to_line
from tui3090.records import Evaluated, Reading, Record, State
from tui3090.runlog import RunFolder


def run(
    path: Path, started: float, recipe: str = "/train.py", losses: tuple[float, ...] = (3.0, 2.0, 1.0)
) -> RunFolder:
    """A run folder that is over."""
    path.mkdir()
    folder = RunFolder(path)
    folder.write_info(recipe=recipe, started=started, exit_status=0)
    records: list[Record] = [step(n, loss=value) for n, value in enumerate(losses, start=1)]
    folder.records.write_text("".join(map(to_line, records)))
    os.utime(folder.records, (started, started))
    return folder


def curve(*losses: float, first: int = 1, every: int = 1) -> Curve:
    made = Curve()
    for n, value in enumerate(losses):
        made.add(first + n * every, value)
    return made


def test_the_last_run_is_the_newest_earlier_one_of_the_recipe_that_is_over(tmp_path: Path) -> None:
    ours = run(tmp_path / "ours", 100.0)
    info = ours.read_info()
    assert last_run(ours.path, info) is None
    run(tmp_path / "old", 10.0)
    last = run(tmp_path / "last", 20.0)
    run(tmp_path / "later", 200.0)
    run(tmp_path / "another", 30.0, recipe="/other.py")
    live = run(tmp_path / "live", 40.0)
    live.info_file.unlink()
    live.write_info(recipe="/train.py", started=40.0, pid=os.getpid(), pid_started=psutil.Process().create_time())
    run(tmp_path / "newer format", 50.0).write_info(format=999)
    broken = run(tmp_path / "broken", 60.0)
    broken.info_file.write_text('{"recipe": ["/train.py"], "started": "x"}')
    (tmp_path / "a file").write_text("")
    found = last_run(ours.path, info)
    assert found is not None
    assert found.path == last.path
    assert last_run(ours.path, {}) is None


def test_the_curve_of_a_run_is_read_and_damage_is_passed_over(tmp_path: Path) -> None:
    folder = run(tmp_path / "x", 1.0)
    with folder.records.open("ab") as file:
        file.write(b'{"type": "step", "loss": \n{"type": "step"}\n\xff\n' + b'{"type": "step"' + b"[" * 5000 + b"\n")
        file.write(to_line(step(4, loss=9.0, skipped="no labels")).encode() + to_line(step(5, loss=4.0)).encode()[:-9])
    read = Curve()
    read_curve(folder, read)
    assert [point.step for point in read.points] == [1, 2, 3]
    assert read.best == 1.0
    read_curve(RunFolder(tmp_path / "gone"), read)


def test_a_thread_finds_the_last_run_of_a_run(tmp_path: Path) -> None:
    run(tmp_path / "last", 20.0)
    ours = run(tmp_path / "ours", 100.0)
    seen = View()
    read_last_run(ours.path, ours.read_info(), seen.others, rest_s=0.0)
    wait_for(seen)
    assert (seen.others[0].letter, seen.others[0].name) == ("", "last")
    assert [point.step for point in seen.others[0].curve.points] == [1, 2, 3]


def wait_for(seen: View) -> None:
    deadline = time.monotonic() + 20
    while not seen.others or not seen.others[0].curve.points:
        assert time.monotonic() < deadline, "waited 20 s for it"
        time.sleep(0.01)


def test_compared_runs_are_read_by_a_thread(tmp_path: Path) -> None:
    seen = View(others=[Other("B", "b")])
    read_others([(seen.others[0], run(tmp_path / "b", 1.0))])
    wait_for(seen)
    assert seen.others[0].curve.best == 1.0


@pytest.mark.parametrize(("asked", "loss_then"), [(1, None), (10, 3.0), (15, 3.0), (30, 1.0), (31, None)])
def test_a_loss_is_that_of_the_same_step(asked: int, loss_then: float | None) -> None:
    other = Other("", "x", curve(3.0, 2.0, 1.0, first=10, every=10))
    for point, value in zip(other.curve.points, (3.0, 2.0, 1.0)):
        point.smooth = value
    assert other.at(asked) == loss_then


class TestChart:
    def test_the_last_run_is_dotted_and_goes_as_far_as_this_one(self) -> None:
        this = curve(*[1.0 + n / 50 for n in range(50)])
        rows = draw(this, [], 60, 10, behind=[Other("", "x", curve(*[2.5] * 500))])
        assert all(row_width(row) <= 60 for row in rows)
        assert "400" not in "\n".join(texts(rows))  # its own steps are no reason to squeeze this run
        # above this run's curve: a flat line of which every second cell has one dot
        assert [(role, {char for char in text if char != " "}) for text, role in rows[0][1:] if role != "plain"] == [
            ("dim", {"⠁"})
        ] * 26
        assert not any(role == "dim" for row in draw(this, [], 60, 10)[:8] for _, role in row[1:])

    def test_compared_runs_have_their_letters_and_their_whole_length(self) -> None:
        this = curve(*[1.0] * 50)
        others = [Other("B", "b", curve(*[2.0] * 500)), Other("C", "c", curve(*[1.5] * 200))]
        rows = texts(draw(this, [], 80, 10, behind=others))
        assert rows[0].count("B") == 4
        assert sum(row.count("C") for row in rows) == 2
        assert "400" in rows[-1]

    def test_a_run_within_the_raw_band_can_be_seen(self) -> None:
        this = curve(*[1.0, 3.0] * 200)
        rows = draw(this, [], 80, 12, behind=[Other("B", "b", curve(*[2.5] * 400))])
        cells = "".join(text for row in rows[:10] for text, role in row[1:] if role == "dim").replace(" ", "")
        assert cells.count("B") == 4
        assert len(cells) > 30

    def test_it_is_drawn_anew_when_another_run_was_read(self) -> None:
        this, past = curve(1.0, 2.0, 3.0), Other("", "x")
        first = draw(this, [], 60, 8, NOW, behind=[past])
        past.curve = curve(2.0, 2.0, 2.0)
        assert draw(this, [], 60, 8, NOW, behind=[past]) != first

    def test_a_run_far_away_does_not_flatten_this_one(self) -> None:
        this = curve(*[1.0 + n / 50 for n in range(50)])
        far = draw(this, [], 60, 12, behind=[Other("", "x", curve(*[1e9] * 50))])
        assert far == draw(this, [], 60, 12)


def test_the_panel_says_what_the_last_run_had_at_this_step() -> None:
    seen = view(*(step(n, loss=1.0) for n in range(1, 4)))
    seen.others.append(Other("", "x", curve(2.0, 2.0, 2.0, 2.0)))
    assert "last run 2.000" in texts(loss.rows(seen, 120, 12, NOW))[0]
    assert "dotted: the last run" in loss.note(seen, NOW)
    seen.others[0].curve = curve(2.0, 2.0)
    assert "last run ended at 2" in texts(loss.rows(seen, 120, 12, NOW))[0]


def test_the_panel_has_a_legend_of_the_runs_compared() -> None:
    seen = view(*(step(n, loss=1.0) for n in range(1, 4)), name="a")
    seen.others += [Other("B", "b[b]\x1b", curve(2.0, 2.0, 2.0)), Other("C", "c", curve(3.0))]
    rows = texts(loss.rows(seen, 120, 12, NOW))
    assert rows[1] == "A a 1.000   B b[b]␛ 2.000   C c no step 3"


def test_the_table_of_runs_compared() -> None:
    over = State(time=NOW, state="finished")
    one = view(*(step(n, loss=2.0) for n in range(1, 5)), over, folder="runs/one", live=False)
    reading = Reading(time=NOW, peak_allocated=3 << 29)
    evaluated = Evaluated(time=NOW, step=2, loss=0.5)
    two = view(step(1, loss=4.0), step(2, loss=4.0), reading, evaluated, folder="runs/two\x1b[31m", live=False)
    rows = table([one, two, View(folder="runs/empty")])
    assert rows[:4] == ["A  runs/one", "B  runs/two", "C  runs/empty", ""]
    found = {row[:15].strip(): row[15:].split() for row in rows[5:]}
    assert found["state"] == ["finished", "loading", "loading"]
    assert found["loss, smoothed"] == ["2", "4", "n/a"]
    assert found["… at step 2"] == ["2", "4", "n/a"]
    assert found["eval"] == ["n/a", "0.5", "(2)", "n/a"]
    assert found["peak at the end"][-3:] == ["1.50", "GiB", "n/a"]


def test_what_is_longer_than_a_column_goes_on_in_the_next_line() -> None:
    techniques = "amp=bf16 checkpointing=all accumulate=4 graph=on workers=2 prefetch=2"
    one = view(step(1, settings=techniques), folder="one", live=False)
    two = view(step(1, settings="amp=fp16"), folder="two", live=False)
    rows = table([one, two])
    start = next(number for number, row in enumerate(rows) if row.startswith("techniques"))
    assert rows[start].split()[-1] == "amp=fp16"
    assert len(rows[start:]) > 1
    words = [word for row in rows[start:] for word in row.split()]
    assert [word for word in words if word not in ("techniques", "amp=fp16")] == techniques.split()
    assert max(map(len, rows)) < 80
