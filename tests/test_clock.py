"""The system's clock set back in the middle of a run: durations stay what they are, and the log goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.conftest import Train
from tests.test_headless import step
from tests.test_trainer import recipe
from tui3090 import runlog
from tui3090.records import Stage, StepRecord
from tui3090.runlog import RecordReader, RunFolder, RunLog


def test_durations_outlive_a_clock_that_goes_back(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    real, began = time.time, time.time()
    # each look at it finds it a minute further back
    looks = iter(range(1_000_000))
    monkeypatch.setattr(time, "time", lambda: real() - 60 * next(looks))
    ran = train(recipe(count=12))
    spent = real() - began
    assert ran.status == 0
    stages = [stage.seconds for stage in ran.of(Stage) if stage.seconds is not None]
    assert len(stages) >= 4
    for seconds in [*stages, *(s for record in ran.of(StepRecord) for s in (record.seconds, record.wait_s))]:
        assert 0 <= seconds <= spent


def test_thinned_steps_are_written_although_the_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlog, "EVERY_STEP", 0)
    folder = RunFolder(tmp_path)
    log = RunLog(folder)
    for number, at in enumerate((5000.0, 5000.1, 1400.0, 1400.1, 1400.5)):
        log.put(step(number, time=at))
    log.put(step(9, time=1401.0))
    log.close()
    written = [(r.step, r.steps) for r in RecordReader(folder.records).read() if isinstance(r, StepRecord)]
    assert written == [(2, 3), (4, 2), (9, 1)]
