from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from dataclasses import fields
from typing import ClassVar

import pynvml
import pytest

from tui3090.lines import from_object, to_line
from tui3090.meters import poller as poller_module
from tui3090.meters.allocator import Held
from tui3090.meters.poller import Poller
from tui3090.records import Event, Reading

GIB = 1 << 30


class FakeAllocator:
    """Fails when it is asked while a capture is under way, as a CUDA call would make the capture fail."""

    def __init__(self) -> None:
        self.capturing = False
        self.disturbed = False

    def read(self):
        self.disturbed |= self.capturing
        return {"allocated": 10, "reserved": 20}


class Watching:
    """A running poller and what it told."""

    def __init__(self, **options) -> None:
        self._records: queue.SimpleQueue = queue.SimpleQueue()
        self.events: list[Event] = []
        self.poller = Poller(self._records.put, interval_s=0.01, **options)
        self.poller.start()

    def reading(self) -> Reading:
        """The next one."""
        while not isinstance(record := self._records.get(timeout=20), Reading):
            self.events.append(record)
        return record

    def until(self, condition) -> Reading:
        """The first reading, of the next 1000, that fulfils it."""
        for _ in range(1000):
            reading = self.reading()
            if condition(reading):
                return reading
        raise AssertionError(f"never came; the last was {reading}")


@pytest.fixture
def watching(fake_nvml):
    started: list[Watching] = []

    def start(**options) -> Watching:
        started.append(Watching(**options))
        return started[-1]

    yield start
    for one in started:
        one.poller.stop()
    assert fake_nvml.open == 0


def test_the_card_is_read_before_the_trainer_names_it(watching):
    reading = watching().reading()
    assert (reading.card_total, reading.card_missing, reading.allocated) == (24 * GIB, "", None)
    assert reading.rss
    assert from_object(json.loads(to_line(reading))) == reading


def test_the_asked_device_is_read(watching, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert watching(device="cuda:0").reading().card_total == 2 * GIB


def test_the_trainer_s_card_takes_its_place(watching):
    run = watching()
    run.poller.watch("aaaa", FakeAllocator())
    reading = run.until(lambda r: r.allocated is not None and r.card_total == 2 * GIB)
    assert (reading.allocated, reading.reserved) == (10, 20)


def test_a_number_that_only_cuda_can_resolve_is_waited_for(watching):
    run = watching(device="cuda:0")
    assert "once torch has loaded" in run.reading().card_missing
    run.poller.watch("bbbb", FakeAllocator())
    assert run.until(lambda r: r.card_missing == "").card_total == 24 * GIB


def test_what_model_and_optimizer_hold_is_told_on_the_cpu_too(watching):
    run = watching(device="cpu")
    run.poller.watch("", None)
    run.poller.held = Held(weights=4, gradients=5, optimizer_state=6)
    reading = run.until(lambda r: r.weights is not None)
    assert (reading.weights, reading.gradients, reading.optimizer_state) == (4, 5, 6)
    assert (reading.card_missing, reading.card_total) == ("Training runs on the CPU.", None)
    assert run.events == []


def test_training_on_the_cpu_beside_a_card(watching):
    run = watching()
    run.poller.watch("", None)
    run.until(lambda r: r.card_missing == "Training runs on the CPU.")


def test_without_a_driver_the_reason_stands_in_each_reading_and_is_told_once(fake_nvml, watching):
    fake_nvml.init_error = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    run = watching()
    run.poller.watch("", None)
    for _ in range(5):
        assert run.reading().card_missing == "No NVIDIA driver here: libnvidia-ml was not found."
    assert [(event.level, event.text) for event in run.events] == [
        ("info", "No NVIDIA driver here: libnvidia-ml was not found.")
    ]


def test_a_card_that_is_lost_is_told_once_and_the_readings_go_on(fake_nvml, watching):
    run = watching()
    run.poller.watch("bbbb", FakeAllocator())
    run.until(lambda r: r.allocated == 10 and r.util == 1.0)
    fake_nvml.broken = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    run.until(lambda r: r.card_missing)
    for _ in range(5):
        reading = run.reading()
        assert (reading.util, reading.card_total, reading.tensor_core) == (None, None, None)
        assert reading.allocated == 10
        assert reading.rss
    assert [(event.level, "lost" in event.text) for event in run.events] == [("warning", True)]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVML: the driver is gone: nvidia-smi says more."),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "NVML: the driver was updated without a restart"),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML: the card does not answer any more"),
    ],
)
def test_a_driver_that_goes_in_mid_run_leaves_no_old_figure(fake_nvml, watching, error, sentence):
    run = watching()
    run.poller.watch("bbbb", FakeAllocator())
    run.until(lambda r: r.allocated == 10 and r.util == 1.0)
    fake_nvml.broken = pynvml.NVMLError(error)
    gone = run.until(lambda r: r.card_missing)
    kept = {"time", "card_missing", "allocated", "reserved", "cpu", "worker_count", "rss", "host_total"}
    kept |= {"host_available", "ui_share"}
    for reading in (gone, run.reading()):
        assert reading.card_missing.startswith(sentence)
        told = {f.name for f in fields(Reading) if getattr(reading, f.name) not in (None, "")}
        assert told <= kept
        assert reading.allocated == 10
    assert [(event.level, event.text) for event in run.events] == [("warning", gone.card_missing)]


def test_a_card_that_never_gave_a_figure_is_not_called_gone(fake_nvml, watching):
    fake_nvml.unsupported |= {
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetClockInfo",
    }
    run = watching()
    for _ in range(3):
        reading = run.reading()
        assert (reading.card_missing, reading.util, reading.card_total) == ("", None, 24 * GIB)


def test_an_nvml_that_hangs_does_not_hold_the_end(fake_nvml, monkeypatch):
    monkeypatch.setattr(poller_module, "STOPPED_S", 0.05)
    hangs, go_on = threading.Event(), threading.Event()

    def hang(card):
        hangs.set()
        assert go_on.wait(60)
        return 341_500

    fake_nvml._nvmlDeviceGetPowerUsage = hang
    poller = Poller(queue.SimpleQueue().put, interval_s=0.01)
    poller.start()
    assert hangs.wait(60)
    poller.stop()
    assert poller._thread.is_alive()
    go_on.set()
    poller._thread.join(60)
    assert fake_nvml.open == 0


def test_a_meter_that_fails_is_told_once_and_the_others_go_on(watching):
    class Broken:
        def read(self):
            nonlocal failed
            failed += 1
            raise RuntimeError(f"counters gone, {failed}")

    failed = 0

    run = watching()
    run.poller.watch("bbbb", Broken())
    run.until(lambda r: bool(run.events))
    for _ in range(5):
        assert run.reading().util == 1.0
    assert [event.text for event in run.events] == ["The allocator meter does not work: RuntimeError: counters gone, 1"]


def test_an_alarm_when_the_allocator_had_to_give_its_cache_back(watching, monkeypatch):
    class Retrying(FakeAllocator):
        retries = 0

        def read(self):
            return {**super().read(), "retries": self.retries}

    run, allocator = watching(), Retrying()
    run.poller.watch("bbbb", allocator)
    run.until(lambda r: r.retries == 0)
    assert run.events == []
    allocator.retries = 3
    run.until(lambda r: bool(run.events))
    allocator.retries = 5
    run.until(lambda r: r.retries == 5)
    for _ in range(5):
        run.reading()
    (event,) = run.events  # not one a reading
    assert (event.level, event.source) == ("warning", "memory")
    assert event.text.startswith("The card's memory is full: 3 times torch gave its cache back")
    monkeypatch.setattr("tui3090.meters.poller.ALARM_S", 0.0)
    run.poller._retries_due = 0.0
    run.until(lambda r: len(run.events) == 2)
    assert ": 2 times torch" in run.events[1].text


class TestDuringACapture:
    def test_nothing_is_asked_of_torch_while_the_card_is_still_read(self, watching):
        run, allocator = watching(), FakeAllocator()
        run.poller.watch("bbbb", allocator)
        run.until(lambda r: r.allocated == 10)
        for _ in range(5):
            with run.poller.quiet():
                allocator.capturing = True
                reading = run.until(lambda r: r.allocated is None)
                assert reading.util == 1.0
                allocator.capturing = False
            run.until(lambda r: r.allocated == 10)
        assert not allocator.disturbed

    def test_a_capture_waits_for_a_reading_that_has_begun(self, watching):
        begun, finish, captured = threading.Event(), threading.Event(), threading.Event()

        class Slow:
            def read(self):
                begun.set()
                assert finish.wait(60)
                return {}

        run = watching()
        run.poller.watch("bbbb", Slow())
        assert begun.wait(60)

        def capture():
            with run.poller.quiet():
                captured.set()

        thread = threading.Thread(target=capture)
        thread.start()
        assert not captured.wait(0.05)
        finish.set()
        assert captured.wait(60)
        thread.join()

    def test_a_capture_that_fails_ends_the_quiet(self, watching):
        run = watching()
        run.poller.watch("bbbb", FakeAllocator())
        with pytest.raises(RuntimeError, match="capture"), run.poller.quiet():
            raise RuntimeError("capture")
        run.until(lambda r: r.allocated == 10)


def test_stopping_does_not_wait_for_the_next_reading(fake_nvml):
    told: queue.SimpleQueue = queue.SimpleQueue()
    poller = Poller(told.put, interval_s=3600)
    poller.start()
    told.get(timeout=20)
    poller.stop()
    assert not any(thread.name == "poller" for thread in threading.enumerate())
    assert fake_nvml.open == 0


def test_it_needs_neither_torch_nor_textual_and_its_import_is_light():
    code = (
        "import sys, queue; from tui3090.meters.poller import Poller; "
        "assert not {'pynvml', 'psutil'} & set(sys.modules); "
        "told = queue.SimpleQueue(); poller = Poller(told.put); poller.start(); told.get(timeout=20); poller.stop(); "
        "assert not {'torch', 'textual', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_counters_are_read_on_the_trainers_card_where_they_were_asked_for(watching, monkeypatch):
    closed = []

    class Pipe:
        last: ClassVar = {}

        def read(self, device):
            return {"tensor_core": device / 4, "tensor_core_source": "CUPTI"}

        def close(self):
            closed.append(True)

    monkeypatch.setattr("tui3090.meters.counters.PipeMeter", Pipe)
    allocator = FakeAllocator()
    allocator.device = 3
    watched = watching(counters=True)
    assert watched.reading().tensor_core is None
    watched.poller.watch("GPU-bbbb", allocator)
    reading = watched.until(lambda reading: reading.tensor_core is not None)
    assert (reading.tensor_core, reading.tensor_core_source) == (0.75, "CUPTI")
    watched.poller.stop()
    assert closed == [True]
