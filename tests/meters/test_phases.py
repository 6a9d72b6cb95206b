"""Where a window's time goes: marks at known times, and how often there are any."""

from __future__ import annotations

import pytest
import torch

from tests.dashboard.views import step
from tui3090.meters.phases import Sample, Sampler

CPU = torch.device("cpu")


class Clock:
    """Stands until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_phases_add_up_to_the_step() -> None:
    clock = Clock()
    sample = Sample(CPU, None, clock)
    # two micro-batches: what belongs to no phase is between them and at the end
    for phase, seconds in (
        ("copy", 0.01),
        ("other", 0.02),
        ("forward", 0.3),
        ("backward", 0.5),
        ("other", 0.03),
        ("copy", 0.01),
        ("other", 0.0),
        ("forward", 0.2),
        ("backward", 0.4),
        ("other", 0.01),
        ("optimizer", 0.25),
        ("end", 0.0),
    ):
        sample.mark(phase)
        clock.now += seconds
    found = sample.phases(step(7, seconds=2.0, stall_s=0.1, wait_s=0.1))
    assert found is not None
    assert (found.step, found.seconds, found.data_s) == (7, 2.0, 0.1)
    assert (found.copy_s, found.forward_s) == (pytest.approx(0.02), pytest.approx(0.5))
    assert (found.backward_s, found.optimizer_s, found.graph_s) == (pytest.approx(0.9), pytest.approx(0.25), 0.0)
    assert found.other_s == pytest.approx(2.0 - 0.1 - 0.02 - 0.5 - 0.9 - 0.25)


def test_on_a_card_the_marks_are_events_from_the_end_of_the_window_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeEvent:
        """Comes at the moment that it is recorded."""

        now = 10.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "the trainer's"
            self.came = FakeEvent.now

        def elapsed_time(self, later: FakeEvent) -> float:
            return (later.came - self.came) * 1000

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the trainer's")
    before = torch.cuda.Event(enable_timing=True)
    before.record("the trainer's")  # type: ignore[arg-type]
    FakeEvent.now += 0.3  # idle: 0.2 s of it for want of data
    sample = Sample(torch.device("cuda", 0), before)
    for phase, seconds in (("copy", 0.1), ("graph", 0.5), ("other", 0.02), ("optimizer", 0.08), ("end", 0.0)):
        sample.mark(phase)
        FakeEvent.now += seconds
    found = sample.phases(step(3, seconds=9.0, stall_s=0.2, wait_s=0.4))
    assert found is not None
    assert found.seconds == pytest.approx(1.0)
    assert (found.data_s, found.copy_s) == (0.2, pytest.approx(0.1))
    assert (found.graph_s, found.optimizer_s) == (pytest.approx(0.5), pytest.approx(0.08))
    assert (found.forward_s, found.backward_s) == (0.0, 0.0)
    assert found.other_s == pytest.approx(0.12)
    assert sample.cost_s > 0


def test_a_window_without_an_end_tells_nothing() -> None:
    sample = Sample(CPU, None)
    assert sample.phases(step()) is None
    sample.mark("forward")
    assert sample.phases(step()) is None


def test_samples_cost_less_than_half_a_percent() -> None:
    clock = Clock()
    sampler = Sampler(CPU, clock)
    sample = sampler.begin(None)
    assert sample is not None
    sample.cost_s = 0.0001
    sampler.took(sample)
    clock.now += 0.99
    assert sampler.begin(None) is None
    clock.now += 0.02
    sample = sampler.begin(None)
    assert sample is not None
    sample.cost_s = 0.05  # as slow as no machine is
    sampler.took(sample)
    clock.now += 0.05 / 0.005
    assert sampler.begin(None) is None
    clock.now += 3.0
    assert sampler.begin(None) is not None


def test_on_a_card_a_window_after_something_else_has_no_beginning() -> None:
    assert Sampler(torch.device("cuda", 0)).begin(None) is None
