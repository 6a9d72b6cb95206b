# ruff: noqa: N802 - the names are NVML's own
"""A stand-in for the NVML library: cards with figures, each of which can be unsupported, and drivers that fail."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from tui3090.meters import cards, gpm, nvml, watched

GIB = 1 << 30


@dataclass
class FakeCard:
    uuid: str
    name: str = "NVIDIA GeForce RTX 3090"
    total: int = 24 * GIB
    used: int = GIB
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    """Pid and bytes."""
    throttle: int = 0
    capability: tuple[int, int] = (8, 6)
    gpm: dict[str, float] | None = None
    """Percent by metric; None: the card has no counters."""


@dataclass
class FakeNvml:
    """Constants and errors are pynvml's own; a handle is the card itself."""

    cards: list[FakeCard]
    mig: list[FakeCard] = field(default_factory=list)
    unsupported: set[str] = field(default_factory=set)
    """Calls that this card or driver lacks."""
    broken: Exception | None = None
    """What every call but init and shutdown raises."""
    init_error: Exception | None = None
    open: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("nvmlDevice", "nvmlGpm")):
            return getattr(pynvml, name)

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            if self.open < 1:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            if self.broken is not None:
                raise self.broken
            if name in self.unsupported:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return getattr(self, f"_{name}")(*args)

        return call

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def _nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        return card.capability

    def _nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:
        for card in (*self.cards, *self.mig):
            if card.uuid == uuid:
                return card
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card: FakeCard) -> FakeCard:
        return self.cards[0]

    def _nvmlDeviceGetIndex(self, card: FakeCard) -> int:
        return self.cards.index(card)

    def _nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def _nvmlDeviceGetName(self, card: FakeCard) -> str:
        return card.name

    def _nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> SimpleNamespace:
        reserve = 400 << 20
        used = card.used if version else card.used + reserve
        return SimpleNamespace(total=card.total, used=used, free=card.total - card.used - reserve, reserved=reserve)

    def _nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes]

    def _nvmlDeviceGetGraphicsRunningProcesses(self, card: FakeCard) -> list[SimpleNamespace]:
        return self._nvmlDeviceGetComputeRunningProcesses(card)[:1]

    def _nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> SimpleNamespace:
        return SimpleNamespace(gpu=100, memory=40)

    def _nvmlDeviceGetPowerUsage(self, card: FakeCard) -> int:
        return 341_500

    def _nvmlDeviceGetEnforcedPowerLimit(self, card: FakeCard) -> int:
        return 350_000

    def _nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 79

    def _nvmlDeviceGetFanSpeed(self, card: FakeCard) -> int:
        return 82

    def _nvmlDeviceGetClockInfo(self, card: FakeCard, clock: int) -> int:
        assert clock == pynvml.NVML_CLOCK_SM
        return 1695

    def _nvmlDeviceGetMaxClockInfo(self, card: FakeCard, clock: int) -> int:
        assert clock == pynvml.NVML_CLOCK_SM
        return 1965

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, card: FakeCard) -> int:
        return card.throttle

    def _nvmlDeviceGetPcieThroughput(self, card: FakeCard, counter: int) -> int:
        return {pynvml.NVML_PCIE_UTIL_RX_BYTES: 400_000, pynvml.NVML_PCIE_UTIL_TX_BYTES: 100_000}[counter]

    def _nvmlGpmQueryDeviceSupport(self, card: FakeCard) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(card.gpm is not None))

    def _nvmlGpmSampleAlloc(self) -> Any:
        return pynvml.c_nvmlGpmSample_t()

    def _nvmlGpmSampleFree(self, sample: Any) -> None:
        pass

    def _nvmlGpmSampleGet(self, card: FakeCard, sample: Any) -> None:
        self.sampled = card

    def _nvmlGpmMetricsGet(self, request: Any) -> None:
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for place in range(request.numMetrics):
            metric = request.metrics[place]
            value = (self.sampled.gpm or {}).get(metric.metricId)
            metric.nvmlReturn = pynvml.NVML_SUCCESS if value is not None else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = value or 0.0


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A machine whose NVML lists a display card before the 3090; no CUDA variable is set."""
    fake = FakeNvml([FakeCard("GPU-aaaa", "NVIDIA GeForce GT 1030", 2 * GIB), FakeCard("GPU-bbbb")])
    for module in (nvml, cards, watched, gpm):
        monkeypatch.setattr(module, "pynvml", fake)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    processes = SimpleNamespace(Process=lambda pid: SimpleNamespace(username=lambda: _user(pid)), Error=psutil.Error)
    monkeypatch.setattr(nvml, "psutil", processes)
    return fake


def _user(pid: int) -> str:
    if pid == os.getpid() or pid < 2000:
        return f"user{pid % 10}"
    raise psutil.NoSuchProcess(pid)


class Clock:
    """Takes the place of `time` in a module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the card's meters, which stands until a test moves it."""
    fake = Clock()
    for module in (watched, gpm):
        monkeypatch.setattr(module, "time", fake)
    return fake
