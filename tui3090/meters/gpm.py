"""How busy the Tensor Cores are, by the hardware counters that NVML gives (GPM: GPU performance monitoring).

Data-centre cards from the H100 on have them. They see the whole card, whoever computes on it, and need no special
right. Everything else that NVML calls utilisation says only that some kernel was running, never what it ran on.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

import pynvml

EVERY_S = 2.0
"""Seconds between readings, and the time that one is the mean of; NVML wants 0.1 s at least."""
SOURCE = "GPM counters, whole card"
_NEEDS = "GPM: needs an H100 or newer"

_METRICS = (
    ("tensor_core", "NVML_GPM_METRIC_ANY_TENSOR_UTIL"),
    ("sm_util", "NVML_GPM_METRIC_SM_UTIL"),
    ("dram_util", "NVML_GPM_METRIC_DRAM_BW_UTIL"),
)


class TensorCores:
    """The counters of one card; where it has none, the readings say so."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._due = 0.0
        self._samples: list[Any] = []
        self._sampled = False
        """Whether the newer sample is one that the next can be compared with."""
        self._last: dict[str, Any] = {"tensor_core_source": self._begin() or SOURCE}

    def read(self) -> dict[str, Any]:
        """The fields of a `Reading`; the figures are of the last `EVERY_S` and carry the time they were read at."""
        now = time.monotonic()
        if self._samples and now >= self._due:
            self._due = now + EVERY_S
            try:
                self._last = self._measure()
            except pynvml.NVMLError as error:
                self._sampled = False
                self._last = {"tensor_core_source": f"GPM: {error}"}
        return self._last

    def close(self) -> None:
        """Free the samples."""
        for sample in self._samples:
            with suppress(pynvml.NVMLError):  # the driver may have gone away first
                pynvml.nvmlGpmSampleFree(sample)
        self._samples = []

    def _begin(self) -> str:
        """Make room for two samples. Returns why there are none; empty: there are."""
        try:
            if pynvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
                return ""
        except pynvml.NVMLError_FunctionNotFound:
            return f"{_NEEDS}, and a newer driver"
        except pynvml.NVMLError_NotSupported:
            pass
        except pynvml.NVMLError as error:
            return f"GPM: {error}"
        return _NEEDS

    def _measure(self) -> dict[str, Any]:
        """Take a sample and compare it with the one before; the first has nothing to be compared with."""
        self._samples.reverse()
        before, after = self._samples
        pynvml.nvmlGpmSampleGet(self._handle, after)
        if not self._sampled:
            self._sampled = True
            return {"tensor_core_source": SOURCE}
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_METRICS)
        request.sample1, request.sample2 = before, after
        for place, (_, metric) in enumerate(_METRICS):
            request.metrics[place].metricId = getattr(pynvml, metric)
        pynvml.nvmlGpmMetricsGet(request)
        fields = {name: _share(request.metrics[place]) for place, (name, _) in enumerate(_METRICS)}
        return {**fields, "tensor_core_source": SOURCE, "tensor_core_time": time.time()}


def _share(metric: Any) -> float | None:
    """Percent as a share of 1; None: this counter was not read."""
    return metric.value / 100 if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value) else None
