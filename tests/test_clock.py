"""The system's clock set back in the middle of a run: durations stay what they are."""

from __future__ import annotations

import time

import pytest

from tests.conftest import Train
from tests.test_trainer import recipe
from tui3090.records import Stage, StepRecord


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
