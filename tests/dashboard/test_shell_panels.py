"""Header, Techniques, Changes, Try next and footer: what they say of given views."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dashboard.views import (
    GIB,
    HOSTILE,
    NOW,
    SIZES,
    any_view,
    gain,
    role_of,
    started,
    step,
    texts,
    view,
)
from tui3090.dashboard.panels import changes, footer, header, techniques, try_next
from tui3090.dashboard.panels.footer import ANSWERED_S
from tui3090.dashboard.view import Pending, View
from tui3090.records import Available, Changed, Evaluated, Event, Reading, Resumed, Saved, State
from tui3090.runlog import RecordReader
from tui3090.settings import CORES, TECHNIQUES, Settings

TRAINING = State(time=NOW - 800, state="training")
PANELS = [header, techniques, changes, try_next, footer]


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def running(**changes: object) -> View:
    """A run at step 1 412 of 6 000."""
    seen = view(started(settings=Settings(amp="bf16").short()), TRAINING, step(1412), name="bert-large", **changes)
    return seen


class TestHeader:
    def test_the_roomy_form(self) -> None:
        seen = running(folder="runs/0612-bert-large")
        seen.absorb([Reading(time=NOW, holders="user1 1.1 GiB")])
        assert texts(header.rows(seen, 160, 2, NOW)) == [
            " tui3090  ● TRAINING   bert-large · GPT   step 1 412 / 6 000   epoch 1 of 3   "
            "███████▌························   23.5 %   left 1 h 16 min → 03:03",
            "           cuda:0 RTX 3090 24 GiB (user1 1.1 GiB)   16 000 tok/s   1.00 s/step   elapsed 15 min".ljust(139)
            + "runs/0612-bert-large",
        ]

    def test_the_narrow_form(self) -> None:
        assert texts(header.rows(running(), 80, 2, NOW)) == [
            " ● TRAINING  bert-large  1 412/6 000  24 %  left 1 h 16 min → 03:03",
            "   16 000 tok/s   1.00 s/step   epoch 1/3   cuda:0 RTX 3090   elapsed 15 min",
        ]
        seen = running()
        saved = Saved(time=NOW - 180, step=1250, name="s", seconds=4.1, waited_s=0.3, reason="by you", bytes=9)
        seen.absorb([saved])
        assert texts(header.rows(seen, 80, 2, NOW))[1] == (
            "   16 000 tok/s   1.00 s/step   saved 3 min ago   epoch 1/3   cuda:0 RTX 3090"
        )

    def test_a_speed_that_is_not_known_says_why(self) -> None:
        seen = running()
        seen.absorb([Changed(time=NOW, step=1413, technique="tf32", old=False, new=True)])
        assert "speed n/a: no step since the change" in texts(header.rows(seen, 80, 2, NOW))[1]
        assert "n/a s/step" not in texts(header.rows(seen, 160, 2, NOW))[1]

    @pytest.mark.parametrize("width", [80, 160])
    def test_what_training_waits_for(self, width: int) -> None:
        seen = running()
        seen.absorb([State(time=NOW, state="training", detail="compiling, block 3 of 12")])
        assert "bert-large  compiling, block 3 of 12  " in texts(header.rows(seen, width, 2, NOW))[0]
        seen.absorb([State(time=NOW, state="training")])
        assert "compiling" not in texts(header.rows(seen, width, 2, NOW))[0]

    def test_the_pace_is_that_of_steps_in_which_nothing_was_compiled(self) -> None:
        seen = running()
        before = texts(header.rows(seen, 160, 2, NOW))[1]
        assert "1.00 s/step" in before
        seen.absorb([step(1413, seconds=70.0, compiled=True)])
        assert texts(header.rows(seen, 160, 2, NOW))[1] == before

    def test_loading(self) -> None:
        seen = View(name="bert-large")
        assert texts(header.rows(seen, 80, 2, NOW)) == [" ● LOADING  bert-large", "   device: not chosen yet"]

    def test_without_a_planned_number_of_steps_there_is_no_end(self) -> None:
        seen = view(started(), TRAINING, step(5, planned_steps=None), name="x")
        assert texts(header.rows(seen, 80, 1, NOW)) == [" ● TRAINING  x  step 5 of an unknown number  left n/a"]

    def test_the_time_left_goes_by_the_steps_since_the_last_change(self) -> None:
        seen = running()
        seen.absorb([Changed(time=NOW, step=1413, technique="accumulate", old=1, new=2), step(1413, seconds=0.5)])
        assert header.seconds_left(seen) == (6000 - 1413) * 0.5

    def test_the_evaluations_to_come_are_counted_in_the_time_left(self) -> None:
        evaluated = Evaluated(time=NOW, step=100, loss=1.0, seconds=30.0)
        windows = [step(number, planned_steps=300, epoch=number / 100) for number in (110, 120, 150)]
        seen = view(started(epochs=3), TRAINING, evaluated, *windows, name="x")
        assert header.seconds_left(seen) == 150 * 1.0 + 2 * 30.0  # at the ends of the second and third epoch
        last = view(started(epochs=3), TRAINING, evaluated, step(300, planned_steps=300, epoch=3.0), name="x")
        assert header.seconds_left(last) == 0

    def test_while_paused_the_end_is_not_promised(self) -> None:
        seen = running()
        seen.absorb([State(time=NOW, state="paused")])
        assert "PAUSED" in texts(header.rows(seen, 160, 1, NOW))[0]
        assert texts(header.rows(seen, 160, 1, NOW))[0].endswith("left 1 h 16 min of training · space goes on")

    def test_an_end_on_another_day_says_so(self) -> None:
        seen = view(started(), TRAINING, step(1, planned_steps=200_001), name="x")
        assert texts(header.rows(seen, 80, 1, NOW))[0].endswith("left 2 d 8 h → 09:20 in 2 d")

    def test_stopping_from_the_moment_it_was_asked(self) -> None:
        seen = running(stop_asked=True)
        assert texts(header.rows(seen, 80, 1, NOW))[0].startswith(" ● STOPPING")

    def test_a_failure_says_why_and_takes_two_rows_where_it_must(self) -> None:
        seen = running()
        seen.absorb([State(time=NOW, state="failed", detail="train.py, line 12: no [b]labels\x1b[31m in the batch.")])
        assert texts(header.rows(seen, 160, 2, NOW))[0] == (
            " tui3090  ■ FAILED  train.py, line 12: no [b]labels␛[31m in the batch."
        )
        assert texts(header.rows(seen, 40, 2, NOW)) == [
            " ■ FAILED  train.py, line 12: no",
            "           [b]labels␛[31m in the batch.",
        ]
        assert role_of(header.rows(seen, 160, 2, NOW), "labels") == "bad"

    def test_after_the_end_the_time_gone_stands_still(self) -> None:
        seen = running()
        seen.absorb([State(time=NOW, state="finished")])
        assert "elapsed 15 min" in texts(header.rows(seen, 160, 2, NOW + 5000))[1]

    @pytest.mark.parametrize(
        ("share", "shown"), [(0.0, "········"), (0.5, "████····"), (0.55, "████▍···"), (1.0, "████████")]
    )
    def test_the_bar(self, share: float, shown: str) -> None:
        assert texts([header.bar(share, 8)]) == [shown]


class TestTechniques:
    def test_the_table(self) -> None:
        seen = running()
        seen.absorb(
            [
                Available(time=NOW, technique="graph", reason="needs a CUDA card"),
                Changed(time=NOW, step=1413, technique="accumulate", old=1, new=2),
            ]
        )
        seen.pending["checkpointing"] = Pending(2, NOW)
        assert texts(techniques.rows(seen, 56, 12, NOW)) == [
            " key technique      in force  next",
            "≈a   AMP            bf16",
            " c   checkpointing  off       ▸ every 2nd, step 1 414",
            "≈+ - accumulation   2         32 samples a step",
            " g   graph replay   –         needs a CUDA card",
            " k   torch.compile  off",
            "≈t   TF32           off",
            " o   offload        off",
            f" w   loader workers 0         of {CORES} core{'s' if CORES > 1 else ''}",
            " p   prefetch       off",
            "≈] [ learning rate  × 1       now 3.82e-05",
            "u undo   esc cancel ▸   capital: backwards   n lock",
        ]

    def test_the_short_form(self) -> None:
        seen = running()
        seen.pending["graph"] = Pending(True, NOW, sent=True)
        assert texts(techniques.rows(seen, 78, 3, NOW)) == [
            "a AMP bf16         c ckpt off         +- accum 1         g graph off ▸ on",
            "k compile off      t TF32 off         o offload off      w workers 0",
            "p prefetch off     ][ lr × 1",
        ]

    def test_one_row_says_what_is_on(self) -> None:
        assert texts([techniques.line(running(), 60, NOW)]) == ["a AMP bf16"]
        assert texts([techniques.line(View(), 60, NOW)]) == ["all off"]

    def test_locked_keys_are_said_to_be(self) -> None:
        assert techniques.note(running(locked=True), NOW) == "keys locked: n unlocks"


class TestChanges:
    def changed(self) -> View:
        """A run with one change of every outcome."""
        seen = running()
        seen.absorb(
            [
                Changed(time=NOW, step=251, technique="amp", old="off", new="bf16"),
                gain(251, "amp", "off", "bf16"),
                Changed(time=NOW, step=733, technique="checkpointing", old=0, new=1),
                gain(
                    *(733, "checkpointing", 0, 1),
                    verdict="slower",
                    rate_before=15_450.0,
                    rate_after=11_900.0,
                    peak_before=round(12.4 * GIB),
                    peak_after=round(5.4 * GIB),
                    loss="higher",
                ),
                Changed(time=NOW, step=1320, technique="workers", old=0, new=4),
                gain(1320, "workers", 0, 4, verdict="noisy", noise=0.03, peak_before=5 * GIB, peak_after=5 * GIB),
                Changed(time=NOW, step=1330, technique="accumulate", old=2, new=1),
                Changed(time=NOW, step=1330, technique="tf32", old=False, new=True),
                Changed(time=NOW, step=1331, technique="prefetch", old=0, new=2),
            ]
        )
        return seen

    def test_the_figures_of_every_outcome(self) -> None:
        seen = self.changed()
        assert texts(changes.rows(seen, 57, 8, NOW)) == [
            " step  key     tokens/s       peak GiB   ms/step  loss",
            "  251  a bf16  10 780→15 450  16.5→12.4  760→530  same",
            "  733  c all   15 450→11 900  12.4→5.4   760→530  higher",
            "1 320  w 4     too noisy to tell (±3 %)",
            "1 330  - 1     together with the next one",
            "1 330  t on    not measured: the next one came too soon",
            "1 331  p 2     not measured: too few steps before it",
        ]
        assert role_of(changes.rows(seen, 57, 8, NOW), "15 450→11 900") == "bad"
        assert role_of(changes.rows(seen, 57, 8, NOW), "10 780→15 450") == "good"
        assert role_of(changes.rows(seen, 57, 8, NOW), "higher") == "bad"

    def test_a_wide_panel_has_all_figures_and_a_narrow_one_the_throughput(self) -> None:
        seen = self.changed()
        assert texts(changes.rows(seen, 120, 8, NOW))[:3] == [
            " step  key     tokens/s       peak GiB   ms/step  loss    change  stall %  MFU %      TFLOPS",
            "  251  a bf16  10 780→15 450  16.5→12.4  760→530  same    +43 %   0.4→0.6  65.2→46.9  23.2→33.3",
            "  733  c all   15 450→11 900  12.4→5.4   760→530  higher  −23 %   0.4→0.6  65.2→46.9  23.2→33.3",
        ]
        assert texts(changes.rows(seen, 30, 8, NOW))[:2] == [
            " step  key     tokens/s",
            "  251  a bf16  10 780→15 450",
        ]

    def test_who_else_changed_something_is_said(self) -> None:
        seen = running()
        change = Changed(time=NOW, step=902, technique="accumulate", old=1, new=2, origin="out of memory")
        seen.absorb([step(901), change])
        assert texts(changes.rows(seen, 66, 1, NOW)) == [
            " 902  + 2     not measured: too few steps before it  by out of memory"
        ]
        seen.absorb([gain(902, "accumulate", 1, 2, verdict="same", rate_after=10_790.0, peak_after=None)])
        assert texts(changes.rows(seen, 66, 4, NOW)) == [
            "step  key     tokens/s       ms/step  loss  change  by",
            " 902  + 2     10 780→10 790  760→530  same  same    out of memory",
        ]

    def test_what_a_save_takes_back_has_no_gain_any_more(self) -> None:
        seen = running()
        seen.absorb(
            [Changed(time=NOW, step=251, technique="amp", old="off", new="bf16"), gain(251, "amp", "off", "bf16")]
        )
        seen.absorb([Resumed(time=NOW, step=200, name="step-00000200")])
        assert (len(seen.changes), seen.gains) == (0, {})

    def test_the_gains_of_a_log_that_holds_none(self) -> None:
        seen = view(*RecordReader(Path(__file__).parent.parent / "data" / "h200.jsonl").read(), live=False)
        assert texts(changes.rows(seen, 66, 6, NOW))[1:3] == [
            " 137  a bf16  146 100→294 300  10.6→8.9  56.1→27.8  same  +100 %",
            " 275  c 2nd   not measured: the next one came too soon",
        ]

    def test_how_far_a_measurement_is(self) -> None:
        seen = running()
        seen.absorb(step(n, seconds=1.0) for n in range(30))
        seen.absorb([Changed(time=NOW, step=30, technique="amp", old="off", new="bf16")])
        assert texts(changes.rows(seen, 66, 1, NOW)) == ["  30  a bf16  waiting for its first step"]
        seen.absorb(step(30 + n, seconds=1.0) for n in range(7))
        assert texts(changes.rows(seen, 66, 1, NOW)) == ["  30  a bf16  measuring 4 of 20"]

    def test_what_is_pending_comes_last_and_a_long_step_is_counted_down(self) -> None:
        seen = self.changed()
        seen.pending["workers"] = Pending(2, NOW, sent=True)
        assert texts(changes.rows(seen, 66, 2, NOW)) == [
            "1 331  p 2     not measured: too few steps before it",
            "1 414  w 2 ▸ waiting for the step to end",
        ]
        seen = view(TRAINING, step(7, time=NOW - 10, seconds=30.0))
        seen.pending["tf32"] = Pending(True, NOW, sent=True)
        assert texts(changes.rows(seen, 70, 2, NOW)) == ["   9  t on ▸ waiting for the step to end, 20 s"]

    def test_before_the_first(self) -> None:
        assert texts(changes.rows(View(), 70, 8, NOW)) == ["none yet: a technique's key makes one while it trains"]

    def test_a_technique_of_another_version_is_shown_as_it_stands(self) -> None:
        seen = view(Changed(time=NOW, step=3, technique="fsdp\x1b[2J", old="a", new="b"))
        assert texts(changes.rows(seen, 70, 1, NOW)) == ["   3  fsdp␛[2J b  not measured: too few steps before it"]


class TestTryNext:
    def seen(self) -> View:
        """A run in fp32 that waits for its loader half of the time."""
        seen = view(
            started(device_name="NVIDIA GeForce RTX 3090"), *(Available(time=NOW, technique=t.name) for t in TECHNIQUES)
        )
        seen.absorb(step(n, seconds=1.0, stall_s=0.5, wait_s=0.5, precision="fp32") for n in range(30))
        return seen

    def test_each_piece_with_its_reason_where_there_is_room(self) -> None:
        assert texts(try_next.rows(self.seen(), 56, 6, NOW)) == [
            "w  1 loader worker   up to +100 %",
            "   the loader starves it 50 % of the time, with 0",
            "a  AMP bf16   at most × 2.0",
            "   matmuls run in fp32, beside the Tensor Cores",
            "t  TF32",
            "   matmuls run in fp32; TF32 keeps its range, with 10",
        ]
        assert texts(try_next.rows(self.seen(), 56, 8, NOW))[2] == "   workers"
        assert texts(try_next.rows(self.seen(), 64, 3, NOW))[:2] == [
            "w  1 loader worker   up to +100 %   the loader starves it 50 %…",
            "a  AMP bf16   at most × 2.0   matmuls run in fp32, beside the T…",
        ]

    def test_one_row_says_how_many_more_there_are(self) -> None:
        assert texts([try_next.line(self.seen(), 60, NOW)])[0].split("   ")[0] == "w  1 loader worker"
        assert texts([try_next.line(self.seen(), 60, NOW)])[0].endswith("   2 more")

    def test_nothing(self) -> None:
        assert texts(try_next.rows(View(), 60, 3, NOW)) == ["nothing yet: it takes the figures of some steps"]
        ended = view(step(3), State(time=NOW, state="stopped"))
        assert texts(try_next.rows(ended, 60, 3, NOW)) == ["nothing: too few steps to tell"]
        seen = view(started(device="cpu"), *(step(n, stall_s=0.0) for n in range(30)))
        assert texts(try_next.rows(seen, 60, 3, NOW)) == ["nothing: no figure of this run stands out"]

    def test_it_is_drawn_anew_after_some_seconds_and_after_a_change(self) -> None:
        seen = self.seen()
        assert len(seen.advice()) == 3
        seen.absorb(step(100 + n, seconds=1.0, stall_s=0.0) for n in range(600))
        assert len(seen.advice()) == 3
        seen.absorb([step(800, time=NOW + 3, stall_s=0.0, precision="bf16")])
        assert seen.advice() == []


class TestFooter:
    def test_the_keys_as_many_as_fit(self) -> None:
        assert texts([footer.line(View(), 160, NOW)]) == [
            " space pause   s save   e evaluate   r Tensor Cores   m activations   l log   1-7 zoom   u undo"
            "   n lock   x picture   ? help   q leave"
        ]
        assert texts([footer.line(View(), 80, NOW)]) == [
            " space pause   s save   l log   1-7 zoom   u undo   n lock   ? help   q leave"
        ]
        assert texts([footer.line(View(), 12, NOW)]) == [" q leave"]

    def test_only_the_keys_that_do_something_now(self) -> None:
        paused = view(step(3), State(time=NOW, state="paused"))
        assert texts([footer.line(paused, 160, NOW)])[0].startswith(" space go on   b back to the last save   s save")
        ended = view(step(3), State(time=NOW, state="finished"))
        assert texts([footer.line(ended, 80, NOW)]) == [" l log   1-7 zoom   x picture   ? help   q leave"]

    def test_an_answer_stands_for_some_seconds(self) -> None:
        seen = View(answer="Nothing to undo.", answer_time=NOW)
        assert texts([footer.line(seen, 80, NOW + ANSWERED_S - 1)]) == [" Nothing to undo."]
        assert texts([footer.line(seen, 12, NOW + ANSWERED_S)]) == [" q leave"]

    def test_q_offers_force_only_while_stopping(self) -> None:
        assert "Q stop now" not in texts([footer.line(View(), 200, NOW)])[0]
        assert "Q stop now" in texts([footer.line(View(stop_asked=True), 200, NOW)])[0]


@pytest.mark.parametrize("panel", PANELS)
@settings(max_examples=40, deadline=None)
@given(any_view(), SIZES, st.sampled_from([0.0, NOW]))
def test_any_view_fits_any_size(panel: ModuleType, seen: View, size: tuple[int, int], now: float) -> None:
    width, height = size
    rows = panel.rows(seen, width, height, now)
    assert all(text.isprintable() for row in rows for text, _ in row)
    if panel is header:
        assert len(rows) <= 2


def test_hostile_words_are_shown_and_not_obeyed() -> None:
    seen = view(
        started(device_name=HOSTILE, model=HOSTILE),
        Reading(time=NOW, holders=HOSTILE),
        Available(time=NOW, technique="tf32", reason=HOSTILE),
        Event(time=NOW, level="info", source="x", text=HOSTILE),
        Changed(time=NOW, step=1, technique=HOSTILE, old=HOSTILE, new=HOSTILE, origin=HOSTILE),
        step(),
        name=HOSTILE,
        folder=HOSTILE,
    )
    for panel in PANELS:
        for row in panel.rows(seen, 160, 12, NOW):
            assert all(text.isprintable() for text, _ in row)
