"""The card that is trained on, as NVML sees it; or why it can't be seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pynvml

from tui3090.meters.gpm import TensorCores
from tui3090.meters.nvml import CardMissing, ask, by_user, close_nvml, handle_of, holders_of, memory_of, open_nvml

STEADY_S = 2.0
"""Seconds between looks at what changes slowly: memory, its holders, temperature, limits, what holds the clock back."""
PCIE_S = 5.0
"""Seconds between looks at the PCIe traffic; NVML blocks for 20 ms a direction."""

_THROTTLE = (
    ("SwPowerCap", "power"),
    ("HwPowerBrakeSlowdown", "power brake"),
    ("SwThermalSlowdown", "heat"),
    ("HwThermalSlowdown", "heat"),
    ("SyncBoost", "sync boost"),
    ("ApplicationsClocksSetting", "clocks set by hand"),
    ("DisplayClockSetting", "display"),
)
"""NVML's reasons for a lowered clock and our words; being idle is no reason."""


class WatchedCard:
    """Reads one card at a time: none at first, then the one that `follow` names. To be used from one thread."""

    def __init__(self) -> None:
        self.missing = "The card has not been looked at yet."
        """Why there are no figures, a sentence; empty: there are."""
        self._handle: Any = None
        self._answered = False
        self._tensor_cores: TensorCores | None = None
        self._steady: dict[str, Any] = {}
        self._steady_due = 0.0
        self._pcie: dict[str, Any] = {}
        self._pcie_due = 0.0

    def follow(self, which: Callable[[], str]) -> None:
        """Go over to the card whose UUID `which` gives; it may raise CardMissing."""
        self.close()
        try:
            open_nvml()
        except CardMissing as missing:
            self.missing = str(missing)
            return
        try:
            handle = handle_of(which())
            self._handle, self._tensor_cores, self.missing = handle, TensorCores(handle), ""
        except CardMissing as missing:
            self.missing = str(missing)
        finally:
            if self._handle is None:
                close_nvml()

    def close(self) -> None:
        """Let go of the card; nothing is read until `follow` names one."""
        if self._handle is None:
            return
        if self._tensor_cores is not None:
            self._tensor_cores.close()
        self._handle = self._tensor_cores = None
        self._answered = False
        self._steady, self._steady_due = {}, 0.0
        self._pcie, self._pcie_due = {}, 0.0
        close_nvml()

    def read(self, on_card: bool) -> dict[str, Any]:
        """The card's fields of a `Reading`. `on_card`: whether this process has memory there.

        A card that is lost is let go: it would not answer, and each question could hang.
        """
        if self._handle is not None and self._tensor_cores is not None:
            try:
                return {**self._figures(), **self._slow_figures(on_card), **self._tensor_cores.read()}
            except CardMissing as missing:
                self.missing = str(missing)
                self.close()
        return {"card_missing": self.missing}

    def _figures(self) -> dict[str, Any]:
        """What moves from step to step."""
        card = self._handle
        busy = ask(pynvml.nvmlDeviceGetUtilizationRates, card)
        figures = {
            "util": busy.gpu / 100 if busy else None,
            "power_w": _scaled(ask(pynvml.nvmlDeviceGetPowerUsage, card), 1e-3),
            "clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, card, pynvml.NVML_CLOCK_SM),
        }
        if any(figure is not None for figure in figures.values()):
            self._answered = True
        elif self._answered:  # no figure is missing on this card: it stopped giving any
            raise CardMissing("NVML: the card does not answer any more: nvidia-smi and dmesg say more.")
        return figures

    def _slow_figures(self, on_card: bool) -> dict[str, Any]:
        """Figures that are asked for less often: each question costs CPU time, and there are many."""
        now = time.monotonic()
        if now >= self._steady_due:
            self._steady, self._steady_due = _steady(self._handle, on_card), now + STEADY_S
        if self._pcie_due == 0.0:
            self._pcie_due = now + PCIE_S  # the first reading comes without the wait
        elif now >= self._pcie_due:
            self._pcie, self._pcie_due = _pcie(self._handle), now + PCIE_S
        return {**self._steady, **self._pcie}


def _steady(card: Any, on_card: bool) -> dict[str, Any]:
    memory = memory_of(card)
    return {
        "card_total": memory.total if memory else None,
        "card_used": memory.used if memory else None,
        "power_limit_w": _scaled(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, card), 1e-3),
        "temperature_c": _scaled(ask(pynvml.nvmlDeviceGetTemperature, card, pynvml.NVML_TEMPERATURE_GPU), 1.0),
        "fan": _scaled(ask(pynvml.nvmlDeviceGetFanSpeed, card), 0.01),
        "clock_max_mhz": ask(pynvml.nvmlDeviceGetMaxClockInfo, card, pynvml.NVML_CLOCK_SM),
        "held_back": _held_back(card),
        **_holders(card, on_card),
    }


def _holders(card: Any, on_card: bool) -> dict[str, Any]:
    holders = holders_of(card)
    if holders is None:
        return {}
    own = next((h.memory for h in holders if h.pid == os.getpid()), None)
    if on_card and own is None:
        # In a container our process may stand in the list under the host's number for it: who is who is unknown.
        return {}
    others = tuple(h for h in holders if h.pid != os.getpid())
    sizes = [h.memory for h in others]
    return {
        "own": own,
        "others": None if None in sizes else sum(size or 0 for size in sizes),
        "holders": by_user(others),
    }


def _pcie(card: Any) -> dict[str, Any]:
    received = ask(pynvml.nvmlDeviceGetPcieThroughput, card, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    sent = ask(pynvml.nvmlDeviceGetPcieThroughput, card, pynvml.NVML_PCIE_UTIL_TX_BYTES)
    return {"pcie_in_s": _scaled(received, 1e3), "pcie_out_s": _scaled(sent, 1e3)}


def _held_back(card: Any) -> str:
    # The older of the call's two names: every driver and every version of the Python module has it.
    bits = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, card) or 0
    words = [word for name, word in _THROTTLE if bits & getattr(pynvml, f"nvmlClocksThrottleReason{name}")]
    if not words and bits & pynvml.nvmlClocksThrottleReasonHwSlowdown:  # heat and power brake set it too
        words.append("hardware slowdown")
    return ", ".join(dict.fromkeys(words))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
