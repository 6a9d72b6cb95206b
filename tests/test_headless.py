"""Plain lines for a run without a screen, and the summary."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from tui3090.dashboard.view import View
from tui3090.headless import PlainOutput, Reporter
from tui3090.records import (
    Changed,
    Evaluated,
    Event,
    Reading,
    Record,
    Refused,
    Saved,
    Stage,
    Started,
    State,
    StepRecord,
)
from tui3090.summary import summary


def step(number: int, **fields: Any) -> StepRecord:
    values: dict[str, Any] = {
        "time": 100.0 + number,
        "step": number,
        "planned_steps": 1200,
        "epoch": 0.5,
        "micro_batches": 1,
        "loss": 2.0,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "samples": 8,
        "tokens": 1000,
        "seconds": 0.5,
        "wait_s": 0.0,
        "stall_s": 0.0,
    }
    return StepRecord(**(values | fields))


def started(**fields: Any) -> Started:
    values: dict[str, Any] = {
        "time": 99.0,
        "model": "GPT",
        "parameters": 124_000_000,
        "trainable": 124_000_000,
        "weights_dtype": "float32",
        "rows": 10,
        "eval_rows": None,
        "batch_size": 8,
        "epochs": 1,
        "device": "cpu",
        "device_name": "CPU, 2 threads",
        "device_uuid": "",
        "memory": 1 << 30,
        "unit": "tokens",
        "torch": "2.13",
        "settings": "amp=bf16",
    }
    return Started(**(values | fields))


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (Stage(time=1.0, name="torch"), []),
        (Stage(time=1.0, name="torch", seconds=2.34, detail="2.13"), ["torch ready in 2.3 s: 2.13"]),
        (started(), ["training GPT (124 000 000 parameters) on CPU, 2 threads, amp=bf16"]),
        (
            Changed(time=1.0, step=1413, technique="checkpointing", old=0, new=1),
            ["checkpointing off → all from step 1 413 on"],
        ),
        (
            Changed(time=1.0, step=2, technique="graph", old=True, new=False, origin="a failed capture"),
            ["graph replay on → off from step 2 on (a failed capture)"],
        ),
        (
            Refused(time=1.0, technique="tf32", value=True, reason="A CPU has no Tensor Cores."),
            ["TF32 on can't be had: A CPU has no Tensor Cores."],
        ),
        (
            Evaluated(time=1.0, step=1000, loss=0.4472, metrics="acc 0.862"),
            ["eval at step 1 000: loss 0.4472 acc 0.862"],
        ),
        (Evaluated(time=1.0, step=7, loss=None), ["eval at step 7: loss n/a"]),
        (
            Evaluated(time=1.0, step=7, loss=2.0, metrics="perplexity 7.389", text="one\ntwo" + 200 * "."),
            ["eval at step 7: loss 2 perplexity 7.389  wrote 'one two" + 112 * "." + "…'"],
        ),
        (Event(time=1.0, level="info", source="run", text="nothing of note"), []),
        (State(time=1.0, state="training"), []),
        (State(time=1.0, state="training", detail="compiling, block 1 of 4"), ["compiling, block 1 of 4"]),
        (Event(time=1.0, level="info", source="compile", text="compiled in 21 s"), ["compiled in 21 s"]),
        (Event(time=1.0, level="warning", source="run", text="slow [b]\x1b[31mdisk\n"), ["warning: slow [b]disk "]),
        (Event(time=1.0, level="error", source="run", text="full disk"), ["error: full disk"]),
    ],
)
def test_what_a_record_says(record: Record, line: list[str]) -> None:
    assert list(Reporter(View()).lines([record])) == line


def test_progress_comes_every_few_seconds_and_only_when_there_is_some() -> None:
    reporter = Reporter(View(), every_s=1000.0)
    assert list(reporter.lines([])) == []
    assert list(reporter.lines([step(1)])) == ["step 1/1 200  loss 2 (smooth 2)  500 ms/step  2 000 tokens/s"]
    assert list(reporter.lines([step(2)])) == []

    reporter = Reporter(View(), every_s=0.0)
    assert list(reporter.lines([step(1)])) != []
    assert list(reporter.lines([])) == []
    memory = Reading(time=1.0, allocated=1 << 30, peak_allocated=3 << 29)
    line = "step 2/1 200  loss 4 (smooth 3.01)  500 ms/step  2 000 tokens/s  skipped: overflow"
    skipped = step(2, loss=4.0, skipped="overflow")
    assert list(reporter.lines([memory, skipped])) == [f"{line}  allocated 1.00 GiB, peak 1.50"]


def test_samples_are_counted_where_there_are_no_tokens() -> None:
    reporter = Reporter(View(), every_s=0.0)
    assert "16.0 samples/s" in next(iter(reporter.lines([step(1, tokens=0, planned_steps=None)])))


def test_the_summary_of_a_finished_run() -> None:
    view = View(name="bert", folder="runs/0612-bert")
    changed = Changed(time=2.0, step=2, technique="amp", old="off", new="bf16")
    view.absorb([started(), step(1, loss=4.0), changed])
    view.absorb([step(1200, time=1000.0, loss=2.0, settings="amp=bf16")])
    view.absorb(
        [Evaluated(time=3.0, step=1200, loss=1.5), State(time=3.0, state="finished", detail="after 1200 steps")]
    )
    assert summary(view) == [
        "tui3090: bert finished at step 1 200/1 200",
        "  loss        4 → 2.99 (smoothed), eval 1.5 at step 1 200",
        "  time        14 min 59 s, 500 ms/step, 2 000 tokens/s",
        "  techniques  amp=bf16; 1 change during the run",
        "  run folder  runs/0612-bert",
    ]


def test_the_summary_says_the_whole_command_that_goes_on() -> None:
    view = View(name="bert", folder="runs/a", again="tui3090 run train.py --resume runs/a")
    saved = Saved(time=2.0, step=1200, name="step-00001200", reason="the end", seconds=1.0, waited_s=0.1, bytes=9)
    view.absorb([started(), step(1200), saved])
    assert "  saved       step 1 200 (the end); tui3090 run train.py --resume runs/a goes on from it" in summary(view)


def test_the_summary_of_a_run_that_failed() -> None:
    view = View(name="bert", folder="runs/[b]x\x1b[31m")
    view.absorb([State(time=3.0, state="failed", detail="train.py, line 3: ValueError: boom")])
    assert summary(view) == [
        "tui3090: bert failed at step 0: train.py, line 3: ValueError: boom",
        "  loss        no step was taken",
        "  time        none spent in steps",
        "  techniques  all off; no change during the run",
        "  run folder  runs/[b]x",
    ]


class TestPlainOutput:
    def test_lines_are_written_whole(self) -> None:
        reader, writer = os.pipe()
        PlainOutput(writer).say("one ⊕")
        assert os.read(reader, 100) == "one ⊕\n".encode()
        os.close(reader)
        os.close(writer)

    def test_a_reader_that_is_gone_is_no_error(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        out = PlainOutput(writer)
        out.say("one")
        out.say("two")
        os.close(writer)

    def test_a_reader_that_takes_nothing_holds_nothing_up(self) -> None:
        reader, writer = os.pipe()
        out = PlainOutput(writer)
        speaker = threading.Thread(target=lambda: [out.say("x" * 100) for _ in range(2000)], daemon=True)
        speaker.start()
        speaker.join(20)
        assert not speaker.is_alive()
        os.close(writer)
        os.close(reader)
