from __future__ import annotations

import multiprocessing
import os
import time
from types import SimpleNamespace

import psutil
import pytest

from tui3090.meters import host
from tui3090.meters.host import Host


def spin(stop) -> None:
    while not stop.is_set():
        sum(range(1000))


@pytest.fixture
def eager(monkeypatch):
    """Looks at workers at every reading."""
    monkeypatch.setattr(host, "SLOW_S", 0.0)


def test_this_process_and_this_machine():
    figures = Host().read()
    assert figures["rss"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert figures["host_total"] == psutil.virtual_memory().total
    assert 0 < figures["host_available"] < figures["host_total"]
    assert (figures["worker_count"], figures["worker_cpu"], figures["worker_rss"]) == (0, None, None)


def test_cpu_is_the_process_s_time_over_the_wall_clock(monkeypatch):
    clock = SimpleNamespace(wall=10.0, cpu=5.0)
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: clock.wall, process_time=lambda: clock.cpu))
    meter = Host()
    clock.wall, clock.cpu = 10.5, 5.75
    assert meter.read()["cpu"] == pytest.approx(1.5)
    clock.wall = 11.5
    assert meter.read()["cpu"] == 0.0


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_are_counted_and_their_cpu_and_memory_read(eager, method):
    context = multiprocessing.get_context(method)
    stop = context.Event()
    worker = context.Process(target=spin, args=(stop,), daemon=True)
    meter = Host()
    worker.start()
    try:
        deadline = time.monotonic() + 60
        while (figures := meter.read()).get("worker_cpu") in (None, 0.0) and time.monotonic() < deadline:
            worker.join(0.2)
        assert figures["worker_count"] == 1
        assert 0 < figures["worker_cpu"] < 1.5
        assert figures["worker_rss"] > 1 << 20
    finally:
        stop.set()
        worker.join(60)
    figures = meter.read()
    assert (figures["worker_count"], figures["worker_cpu"], figures["worker_rss"]) == (0, None, None)


def test_a_worker_that_ends_while_it_is_looked_at(eager, monkeypatch):
    gone = SimpleNamespace(pid=os.getpid())
    monkeypatch.setattr(host.multiprocessing, "active_children", lambda: [gone, SimpleNamespace(pid=None)])

    def process(pid=None):
        if pid is not None:
            raise psutil.NoSuchProcess(pid)
        return psutil.Process.__new__(psutil.Process)

    meter = Host()
    monkeypatch.setattr(host.psutil, "Process", process)
    assert meter.read()["worker_count"] == 0
