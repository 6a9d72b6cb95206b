"""The table: which cells are run, what it says of them, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fit.fakes import GIB, FakeCard
from tui3090 import cli
from tui3090.fit.command import run_fit
from tui3090.fit.process import CellDied
from tui3090.fit.table import Asked
from tui3090.recipe import RecipeError

EAGER = ("fp32", "fp32+checkpointing", "fp32+graph", "bf16", "bf16+checkpointing", "bf16+graph")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A train.py that is only read."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text('def recipe(batch_size: int = 8, size: str = "small"): ...\n')
    return Path("train.py")


class Told:
    """What `run_fit` printed, and its status."""

    def __init__(self, card: Any, capsys: pytest.CaptureFixture[str], *argv: str, as_object: bool = True) -> None:
        asked = Asked("train.py", argv, vram_gib=24.0)
        self.status = run_fit(asked, Path("train.py"), as_object, card)
        said = capsys.readouterr()
        self.out, self.err = said.out, said.err
        self.object: dict[str, Any] = json.loads(self.out) if as_object else {}

    @property
    def statuses(self) -> dict[tuple[int, str], str]:
        return {(cell["batch"], cell["column"]): cell["status"] for cell in self.object["cells"]}

    def cell(self, batch: int, column: str) -> dict[str, Any]:
        return next(c for c in self.object["cells"] if (c["batch"], c["column"]) == (batch, column))


Capture = pytest.CaptureFixture[str]


def test_rows_double_until_nothing_fits(recipe: Path, capsys: Capture) -> None:
    card = FakeCard()
    told = Told(card, capsys, "--batch-size", "8")
    # 12 GiB an FP32 batch of 8 besides 6: 16 would take 30, which is far over 24 and not run
    row = dict.fromkeys(EAGER, "ok")
    assert {c: s for (b, c), s in told.statuses.items() if b == 8} == row
    assert {c: s for (b, c), s in told.statuses.items() if b == 16} == row | {"fp32": "oom", "fp32+graph": "oom"}
    # bf16: 30 GiB; with checkpointing FP32 15.6
    assert [c for (b, c), s in told.statuses.items() if b == 32 and s == "ok"] == [
        "fp32+checkpointing",
        "bf16+checkpointing",
    ]
    # 25.2 of 24 GiB is near enough to be run; bf16 takes 15.6, and at 128 25.2
    assert told.statuses[64, "fp32+checkpointing"] == told.statuses[128, "bf16+checkpointing"] == "oom"
    assert [cell for cell in card.ran if cell[0] >= 64] == [
        (64, "fp32+checkpointing"),
        (64, "bf16+checkpointing"),
        (128, "bf16+checkpointing"),
    ]
    assert {b for b, _ in told.statuses} == {8, 16, 32, 64, 128}
    assert told.status == 0


def test_where_the_look_found_nothing_the_cells_before_are_gone_by(recipe: Path, capsys: Capture) -> None:
    card = FakeCard(room=13.0, predicts=False)
    told = Told(card, capsys)
    assert [told.cell(batch, "fp32")["predicted"] for batch in (1, 2, 4)] == [None, None, 12 * GIB]
    # 18 GiB of 13 are predicted
    assert [cell for cell in card.ran if cell[1] == "fp32"] == [(b, "fp32") for b in (1, 2, 4)]
    assert told.cell(8, "fp32")["sentence"] == "predicted to take 18.00 GiB of 13.00"
    # nothing is known of a first row
    told = Told(FakeCard(room=13.0, predicts=False), capsys, "--batch-size", "28")
    assert told.statuses[28, "fp32+checkpointing"] == "oom"
    assert told.cell(28, "fp32+checkpointing")["sentence"] == ""
    assert told.cell(56, "fp32+checkpointing")["sentence"] == "batch 28 did not fit"


def test_a_cell_says_what_was_predicted_and_measured(recipe: Path, capsys: Capture) -> None:
    cell = Told(FakeCard(), capsys).cell(8, "bf16")
    assert cell == {
        "batch": 8,
        "column": "bf16",
        "settings": {"amp": "bf16", "checkpointing": "off", "graph": "off"},
        "status": "ok",
        "predicted": 12 * GIB,
        "peak_allocated": 12 * GIB,
        "peak_reserved": 13 * GIB,
        "peak_rss": GIB,
        "step_s": pytest.approx(0.085),
        "steps": 10,
        "samples_s": pytest.approx(8 / 0.085),
        "speed": pytest.approx(2.0),
        "speed_against_batch": 8,
        "sentence": "",
    }


def test_speed_where_fp32_does_not_fit_is_against_its_biggest_batch(recipe: Path, capsys: Capture) -> None:
    cell = Told(FakeCard(), capsys).cell(16, "bf16")
    assert cell["speed_against_batch"] == 8
    assert cell["speed"] == pytest.approx((16 / 0.165) / (8 / 0.17))


def test_the_fastest_with_margin_and_its_command(recipe: Path, capsys: Capture) -> None:
    told = Told(FakeCard(), capsys, "--size", "big", "--batch-size=4")
    # replay at 16 takes 18 + 1 GiB of 24
    assert told.object["best"]["column"] == "bf16+graph"
    assert told.object["best"]["batch"] == 16
    assert told.object["best"]["command"] == (
        "tui3090 run train.py --amp bf16 --graph --vram 24 -- --size big --batch-size 16"
    )


def test_the_command_is_one_that_run_takes(recipe: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(Told(FakeCard(), capsys).object["best"]["command"])
    plans: list[Any] = []

    class Session:
        def __init__(self, plan: Any, *_: Any, **__: Any) -> None:
            plans.append(plan)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("tui3090.session.Session", Session)
    assert cli.main(words[1:]) == 0
    assert (plans[0].options["batch_size"], plans[0].settings.amp, plans[0].settings.graph) == (16, "bf16", True)


def test_less_than_the_margin_is_not_recommended(recipe: Path, capsys: Capture) -> None:
    # at batch 8 bf16 takes 12 GiB, 13 with graphs: of 13 nothing is to spare
    best = Told(FakeCard(room=13.0), capsys).object["best"]
    assert (best["batch"], best["column"]) == (4, "bf16+graph")
    told = Told(FakeCard(room=6.8), capsys, as_object=False)
    assert "What fits leaves less than 10% of the memory free" in told.out


def test_when_nothing_fits_it_says_so(recipe: Path, capsys: Capture) -> None:
    told = Told(FakeCard(room=6.0, predicts=False), capsys, as_object=False)
    assert "Nothing that fits was measured" in told.out
    assert told.status == 1
    assert {cell["status"] for cell in Told(FakeCard(room=6.0), capsys).object["cells"]} == {"oom"}


def test_a_dying_process_is_a_sentence_in_its_cell(recipe: Path, capsys: Capture) -> None:
    def dies() -> dict[str, Any]:
        raise CellDied("its process was ended by SIGSEGV")

    card = FakeCard()
    card.answers[2, "bf16"] = dies
    told = Told(card, capsys)
    assert told.cell(2, "bf16")["status"] == "died"
    assert told.cell(2, "bf16")["sentence"] == "its process was ended by SIGSEGV"
    assert told.cell(4, "bf16")["sentence"] == "the process of batch 2 died"
    assert (4, "bf16") not in card.ran
    assert told.cell(4, "bf16+checkpointing")["status"] == "ok"
    assert "batch 2, AMP bf16: its process was ended by SIGSEGV" in told.err
    assert "AMP bf16, batch 2: its process was ended by SIGSEGV." in Told(card, capsys, as_object=False).out


def test_a_batch_that_fails_is_passed_over_once(recipe: Path, capsys: Capture) -> None:
    card = FakeCard()
    card.answers[1, "fp32"] = lambda: {"error": "train.py, line 3: ValueError: one value per channel."}
    card.answers[2, "bf16"] = card.answers[4, "bf16"] = lambda: {"error": "no."}
    told = Told(card, capsys)
    assert told.cell(1, "fp32")["sentence"] == "train.py, line 3: ValueError: one value per channel"
    assert told.statuses[2, "fp32"] == "ok"
    assert told.cell(8, "bf16")["sentence"] == "batches 2 and 4 failed"


def test_what_is_known_is_printed_when_it_is_interrupted(recipe: Path, capsys: Capture) -> None:
    def interrupted() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return {"error": "the signal was not noticed"}

    card = FakeCard()
    card.answers[2, "fp32+graph"] = interrupted
    before = signal.getsignal(signal.SIGINT)
    told = Told(card, capsys)
    assert told.status == 130
    assert told.object["interrupted"]
    assert len(told.object["cells"]) == 8
    assert told.object["best"] is not None
    assert signal.getsignal(signal.SIGINT) is before
    assert "Interrupted: the table is what was known by then." in Told(card, capsys, as_object=False).out


def test_an_interrupted_look_says_that_nothing_is_known(recipe: Path, capsys: Capture) -> None:
    class Slow(FakeCard):
        def ask(self, wanted: Any, tick: Any) -> dict[str, Any]:
            os.kill(os.getpid(), signal.SIGTERM)
            tick()
            raise AssertionError("the signal came late")

    told = Told(Slow(), capsys, as_object=False)
    assert (told.status, told.out) == (143, "")
    assert told.err == "tui3090: interrupted before anything was measured\n"


def test_a_batch_holds_no_more_samples_than_there_are(recipe: Path, capsys: Capture) -> None:
    assert {b for b, _ in Told(FakeCard(rows=7), capsys).statuses} == {1, 2, 4}
    assert {b for b, _ in Told(FakeCard(rows=7), capsys, "--batch-size", "9").statuses} == {7}


def test_a_batch_that_cannot_be_varied_is_one_row(recipe: Path, capsys: Capture) -> None:
    card = FakeCard(fixed=True, batch_size=5, points={}, by_option=False)
    told = Told(card, capsys)
    assert {b for b, _ in told.statuses} == {5}
    assert {w["batch"] for w in card.wanted[1:]} == {5}
    assert "--batch-size" not in told.object["best"]["command"]
    assert "sampler makes the batches" in Told(card, capsys, as_object=False).out


def test_a_batch_size_without_an_option_is_to_be_set_in_the_file(recipe: Path, capsys: Capture) -> None:
    told = Told(FakeCard(by_option=False), capsys, as_object=False)
    assert "    tui3090 run train.py --amp bf16 --graph --vram 24\n" in told.out
    assert "Set the batch size to 16 in the train.py first" in told.out


def test_columns_that_cannot_be_had_say_why_once(recipe: Path, capsys: Capture) -> None:
    refused = dict.fromkeys(("fp32+checkpointing", "bf16+checkpointing"), "There are no blocks.")
    told = Told(FakeCard(refused=refused), capsys, as_object=False)
    assert "Without FP32 + checkpointing, AMP bf16 + checkpointing: There are no blocks." in told.out.replace("\n", " ")
    assert "checkpt." not in told.out


def test_the_cpu_is_asked_until_bigger_batches_bring_nothing(recipe: Path, capsys: Capture) -> None:
    refused = {"fp32+graph": "No card.", "bf16+graph": "No card."}
    card = FakeCard(room=1e4, device="cpu", refused=refused, points={})

    def measured(batch: int, step: float) -> dict[str, Any]:
        return {"status": "ok", "step_s": step, "steps": 3, "peak_rss": (1 + batch) * GIB}

    for name in ("fp32+checkpointing", "bf16", "bf16+checkpointing"):
        card.answers[1, name] = lambda: measured(1, 20.0)
    for batch, step in ((1, 1.0), (2, 1.1), (4, 1.2), (8, 2.3), (16, 4.5)):
        card.answers[batch, "fp32"] = lambda batch=batch, step=step: measured(batch, step)  # type: ignore[misc]
    told = Told(card, capsys)
    assert [batch for batch, name in card.ran if name == "fp32"] == [1, 2, 4, 8]
    assert told.cell(2, "bf16")["sentence"] == "a step would take longer than 30 s"
    assert told.cell(16, "fp32")["sentence"] == "batch 8 was hardly faster than 4"
    assert (told.cell(8, "fp32")["predicted"], told.cell(2, "fp32")["predicted"]) == (9 * GIB, None)
    assert told.object["best"]["batch"] == 8


def test_the_table_is_80_wide_and_says_what_its_figures_are(recipe: Path, capsys: Capture) -> None:
    told = Told(FakeCard(), capsys, "--batch-size", "8", as_object=False)
    table = told.out.split("Fastest")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert table[0] == "train.py on Fake 3090, 24.00 GiB, torch 2.11"
    assert table[2].split() == ["batch", *["FP32"] * 3, *["AMP", "bf16"] * 3]
    assert " ".join(table[4].split()) == "8 18.00 GiB 8.40 GiB 18.00 GiB 12.00 GiB 7.20 GiB 12.00 GiB"
    assert " ".join(table[5].split()) == "~18.00 ~8.40 ~18.00 ~12.00 ~7.20 ~12.00"
    assert " ".join(table[6].split()) == "170.0 ms 221.0 ms 164.0 ms 85.0 ms 110.5 ms 82.0 ms"
    assert " ".join(table[7].split()) == "x 1.00 x 0.77 x 1.04 x 2.00 x 1.54 x 2.07"
    text = told.out.replace("\n", " ")
    assert "Predicted within 0.0% of measured (" in text
    assert "Checkpointing saves 53% of FP32's memory at batch 8." in text
    assert "Checkpointing saves 53% of AMP bf16's memory at batch 16." in text
    assert "* where FP32 was not measured, against its batch 8" in text
    assert "Fastest with 10% of the memory to spare: AMP bf16 + replay at batch 16" in text
    assert "(98.8 samples/s, 19.00 GiB reserved, graphs included, 21% to spare)" in text


def test_progress_goes_to_stderr_with_the_time_left(recipe: Path, capsys: Capture) -> None:
    lines = Told(FakeCard(), capsys).err.splitlines()
    assert lines[0] == (
        "predicted to fit 24.00 GiB: FP32 up to batch 8, FP32 + checkpointing up to batch 32, FP32 + replay up to "
        "batch 8, AMP bf16 up to batch 16, AMP bf16 + checkpointing up to batch 64, AMP bf16 + replay up to batch 16"
    )
    assert lines[1].startswith("batch 1, FP32: 7.50 GiB, predicted 7.50, 30.0 ms a step, x 1.00, about ")
    assert lines[1].endswith(" left")
    assert lines[-1].endswith(", about 0 s left")


def test_data_without_a_length_and_a_model_that_takes_nothing_come_to_an_end(recipe: Path, capsys: Capture) -> None:
    flat = [{"elements": float(n), "peaks": [GIB], "gradients": [0]} for n in (2, 4)]
    card = FakeCard(rows=None, points=dict.fromkeys(("fp32", "fp32+checkpointing", "bf16", "bf16+checkpointing"), flat))
    told = Told(card, capsys, "--batch-size", "8")
    assert "FP32 up to batch 65536" in told.err
    assert told.statuses[16, "fp32"] == "oom"  # it was run, and did not fit


def test_a_look_that_fails_is_the_commands_error(recipe: Path) -> None:
    class Fails(FakeCard):
        def ask(self, wanted: Any, tick: Any) -> dict[str, Any]:
            return {"error": "train.py, line 2: no"}

    class Dies(FakeCard):
        def ask(self, wanted: Any, tick: Any) -> dict[str, Any]:
            raise CellDied("its process was ended by SIGKILL")

    with pytest.raises(RecipeError, match="line 2: no"):
        run_fit(Asked("train.py"), recipe, False, Fails())
    with pytest.raises(RecipeError, match=r"train\.py can't be measured: its process was ended by SIGKILL\."):
        run_fit(Asked("train.py"), recipe, False, Dies())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("fit", "the following arguments are required: recipe"),
        ("fit nope", "has no recipe 'nope'"),
        ("fit nope.py", "nope.py"),
        ("fit train.py --amp bf16", "there is nothing called --amp here"),
        ("fit train.py --vram 0", "'0' is not a number above 0"),
        ("fit train.py --batch-size 3", "options of the train.py after --"),
        ("fit train.py -- --batch-size many", "--batch-size: takes a whole number"),
        ("fit train.py -- --sise big", "did you mean --size?"),
    ],
)
def test_bad_usage_is_one_sentence_and_status_2(line: str, sentence: str, recipe: Path, capsys: Capture) -> None:
    assert cli.main(line.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert sentence in said.err
