"""How busy the Tensor Cores are, by CUPTI's PM sampling: the one hardware counter that a GeForce card gives.

NOT YET VERIFIED ON HARDWARE. Opt-in (`tui3090 run --counters`), because the driver may hold the clocks meanwhile.
Built against the headers of CUPTI 12.9 and 13.5; that the metric exists and takes one pass on the chips from Ampere to
Blackwell was asked of the library itself, which needs no card for that. `tui3090 doctor --counters` checks the readings
of a card against matmuls whose use of the Tensor Cores is known.

The order of the calls is that of NVIDIA's documentation: host side (chip, metric, config image), then enable, set the
configuration, start, and again and again decode and evaluate; at the end stop and disable.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")
METRIC = b"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
SOURCE = "CUPTI counters, whole card, not yet verified"
EVERY_S = 2.0
"""Seconds between readings, and the time that one is the mean of."""
SAMPLE_S = 0.02
"""Between two samples of the hardware."""
SAMPLES = 1024
"""In the counter data image: as many as ten readings left out would give."""
HARDWARE_BUFFER = 64 << 20
"""Bytes."""
PM_SAMPLING = 1
"""CUPTI_PROFILER_TYPE_PM_SAMPLING"""
BY_CLOCK, BY_TIME = 0, 1
"""Trigger modes: by cycles of the system's clock, by nanoseconds."""
KEEP_LATEST = 1
"""Append mode: new samples overwrite the oldest when the hardware's buffer is full."""
CLOCK_HZ = 1.2e9
"""About, of the system's clock: a GA100 samples by its cycles only. (A Turing chip can't in one pass at all.)"""

INVALID_PARAMETER, INSUFFICIENT_PRIVILEGES, INVALID_CHIP_NAME = 1, 35, 46
_BUSY = "something else uses the card's counters (Nsight, DCGM, another run with --counters): end it first"
_REFUSALS = {
    7: _BUSY,
    8: "memory for the samples ran out",
    15: "CUPTI can't start: the driver, or its libnvperf_host.so, was not found",
    17: "this chip has no such counter",
    26: _BUSY,
    27: "not supported on this card or by this driver",
    33: "a virtual machine's card gives none",
    INSUFFICIENT_PRIVILEGES: (
        "this user may not read them: the admin allows it by the driver's option "
        "NVreg_RestrictProfilingToAdminUsers=0, or run as root"
    ),
    36: "an older profiler of this process holds CUPTI",
    39: "another CUPTI tool is loaded into this process",
    40: "this virtual machine may not read them",
    41: "confidential computing forbids them",
    42: "a mining card gives none",
    43: "a MIG instance gives none",
    44: "cards in SLI give none",
    45: "WSL gives none",
    INVALID_CHIP_NAME: "this CUPTI does not know the chip: a newer torch brings a newer one",
}
"""CUPTI's results, in cupti_result.h, and what they mean for the user."""

_FUNCTION = "cuptiPmSamplingEnable"
"""Came with CUPTI 12.6."""


class CountersMissing(Exception):
    """The counters can't be read; its text says why, without a full stop."""


class Params(ctypes.Structure):
    """What every call takes: a structure that begins with its size, up to its last field's end, and a null pointer."""

    def __init__(self, **values: Any) -> None:
        last = getattr(type(self), self._fields_[-1][0])
        super().__init__(structSize=last.offset + last.size, **values)


def _params(name: str, *fields: tuple[str, Any]) -> type[Params]:
    """The structure `name` of the headers, with the fields after structSize and pPriv."""
    return type(name, (Params,), {"_fields_": [("structSize", c_size_t), ("pPriv", c_void_p), *fields]})


_OBJECT = ("pPmSamplingObject", c_void_p)
_HOST = ("pHostObject", c_void_p)
_METRICS = (("ppMetricNames", POINTER(c_char_p)), ("numMetrics", c_size_t))
_IMAGE = (("pCounterDataImage", c_void_p), ("counterDataImageSize", c_size_t))

Initialize = _params("CUpti_Profiler_Initialize_Params")
DeInitialize = _params("CUpti_Profiler_DeInitialize_Params")
GetChipName = _params("CUpti_Device_GetChipName_Params", ("deviceIndex", c_size_t), ("pChipName", c_char_p))
HostInitialize = _params(
    "CUpti_Profiler_Host_Initialize_Params",
    ("profilerType", c_int),
    ("pChipName", c_char_p),
    ("pCounterAvailabilityImage", c_void_p),
    _HOST,
)
"""As of 12.6; what later versions added at its end is not used, and the size tells them so."""
HostDeinitialize = _params("CUpti_Profiler_Host_Deinitialize_Params", _HOST)
AddMetrics = _params("CUpti_Profiler_Host_ConfigAddMetrics_Params", _HOST, *_METRICS)
GetConfigImageSize = _params("CUpti_Profiler_Host_GetConfigImageSize_Params", _HOST, ("configImageSize", c_size_t))
GetConfigImage = _params(
    "CUpti_Profiler_Host_GetConfigImage_Params", _HOST, ("configImageSize", c_size_t), ("pConfigImage", c_void_p)
)
GetNumOfPasses = _params(
    "CUpti_Profiler_Host_GetNumOfPasses_Params",
    ("configImageSize", c_size_t),
    ("pConfigImage", c_void_p),
    ("numOfPasses", c_size_t),
)
Evaluate = _params(
    "CUpti_Profiler_Host_EvaluateToGpuValues_Params",
    _HOST,
    *_IMAGE,
    ("rangeIndex", c_size_t),
    *_METRICS,
    ("pMetricValues", POINTER(c_double)),
)
Enable = _params("CUpti_PmSampling_Enable_Params", ("deviceIndex", c_size_t), _OBJECT)
Disable = _params("CUpti_PmSampling_Disable_Params", _OBJECT)
Start = _params("CUpti_PmSampling_Start_Params", _OBJECT)
Stop = _params("CUpti_PmSampling_Stop_Params", _OBJECT)
SetConfig = _params(
    "CUpti_PmSampling_SetConfig_Params",
    _OBJECT,
    ("configSize", c_size_t),
    ("pConfig", c_void_p),
    ("hardwareBufferSize", c_size_t),
    ("samplingInterval", c_uint64),
    ("triggerMode", c_int),
    ("hwBufferAppendMode", c_int),
)
GetCounterDataSize = _params(
    "CUpti_PmSampling_GetCounterDataSize_Params",
    _OBJECT,
    ("pMetricNames", POINTER(c_char_p)),
    ("numMetrics", c_size_t),
    ("maxSamples", c_uint32),
    ("counterDataSize", c_size_t),
)
ImageInitialize = _params(
    "CUpti_PmSampling_CounterDataImage_Initialize_Params",
    _OBJECT,
    ("counterDataSize", c_size_t),
    ("pCounterData", c_void_p),
)
Decode = _params(
    "CUpti_PmSampling_DecodeData_Params", _OBJECT, *_IMAGE, ("decodeStopReason", c_int), ("overflow", c_uint8)
)
GetDataInfo = _params(
    "CUpti_PmSampling_GetCounterDataInfo_Params",
    *_IMAGE,
    ("numTotalSamples", c_size_t),
    ("numPopulatedSamples", c_size_t),
    ("numCompletedSamples", c_size_t),
)


def find_library() -> str:
    """The libcupti that this process, torch that is, has loaded, or else one that pip installed. Raises
    CountersMissing."""
    with suppress(OSError):
        for line in MAPS.read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith("libcupti.so"):
                return path
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for library in sorted(Path(folder).glob("*/lib/libcupti.so.*"), reverse=True):
            return str(library)
    raise CountersMissing("libcupti was not found: a CUDA build of torch brings it")


def load_library() -> Any:
    """libcupti, ready to be called. Raises CountersMissing."""
    path = find_library()
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise CountersMissing(f"libcupti can't be loaded: {error}") from None


class Counters:
    """Samples the Tensor Core pipe of one card from its making to `close`. To be used from one thread.

    `device` is CUDA's number of the card. Raises CountersMissing; what was begun is undone then.
    """

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self._undo: list[tuple[str, Params]] = []
        """What closes, in the order in which it was opened."""
        self._names = (c_char_p * 1)(METRIC)
        if getattr(library, _FUNCTION, None) is None:
            raise CountersMissing("this CUPTI is older than 12.6: a newer torch brings a newer one")
        try:
            self._open(device)
        except BaseException:
            self.close()
            raise

    def read(self) -> float | None:
        """The mean over the samples since the last call, a share of 1; None where there is none. Raises
        CountersMissing."""
        image = {"pCounterDataImage": ctypes.addressof(self._data), "counterDataImageSize": len(self._data)}
        self._call("cuptiPmSamplingDecodeData", Decode(pPmSamplingObject=self._object, **image))
        info = self._call("cuptiPmSamplingGetCounterDataInfo", GetDataInfo(**image))
        values = []
        for index in range(info.numCompletedSamples):
            value = (c_double * 1)()
            self._call(
                "cuptiProfilerHostEvaluateToGpuValues",
                Evaluate(
                    pHostObject=self._host,
                    rangeIndex=index,
                    ppMetricNames=self._names,
                    numMetrics=1,
                    pMetricValues=value,
                    **image,
                ),
            )
            values.append(value[0])
        self._empty_image()
        return sum(values) / len(values) / 100 if values else None

    def close(self) -> None:
        """Stop sampling and give the card's counters back; what fails on the way is left at that."""
        while self._undo:
            function, params = self._undo.pop()
            getattr(self._library, function)(byref(params))

    def _open(self, device: int) -> None:
        self._call("cuptiProfilerInitialize", Initialize())
        self._undo.append(("cuptiProfilerDeInitialize", DeInitialize()))
        chip: bytes = self._call("cuptiDeviceGetChipName", GetChipName(deviceIndex=device)).pChipName
        host = HostInitialize(profilerType=PM_SAMPLING, pChipName=chip)
        try:
            self._host = self._call("cuptiProfilerHostInitialize", host).pHostObject
        except CountersMissing as missing:
            raise CountersMissing(f"{missing} ({chip.decode(errors='replace')})") from None
        self._undo.append(("cuptiProfilerHostDeinitialize", HostDeinitialize(pHostObject=self._host)))
        config = self._config(chip)
        self._object = self._call("cuptiPmSamplingEnable", Enable(deviceIndex=device)).pPmSamplingObject
        self._undo.append(("cuptiPmSamplingDisable", Disable(pPmSamplingObject=self._object)))
        by_clock = chip == b"GA100"
        self._call(
            "cuptiPmSamplingSetConfig",
            SetConfig(
                pPmSamplingObject=self._object,
                configSize=len(config),
                pConfig=ctypes.addressof(config),
                hardwareBufferSize=HARDWARE_BUFFER,
                samplingInterval=round(SAMPLE_S * (CLOCK_HZ if by_clock else 1e9)),
                triggerMode=BY_CLOCK if by_clock else BY_TIME,
                hwBufferAppendMode=KEEP_LATEST,
            ),
        )
        size = self._call(
            "cuptiPmSamplingGetCounterDataSize",
            GetCounterDataSize(
                pPmSamplingObject=self._object, pMetricNames=self._names, numMetrics=1, maxSamples=SAMPLES
            ),
        )
        self._data = (c_uint8 * size.counterDataSize)()
        self._empty_image()
        self._call("cuptiPmSamplingStart", Start(pPmSamplingObject=self._object))
        self._undo.append(("cuptiPmSamplingStop", Stop(pPmSamplingObject=self._object)))

    def _config(self, chip: bytes) -> Any:
        """The config image for the metric, which must be read in one pass."""
        self._call(
            "cuptiProfilerHostConfigAddMetrics",
            AddMetrics(pHostObject=self._host, ppMetricNames=self._names, numMetrics=1),
        )
        size = self._call("cuptiProfilerHostGetConfigImageSize", GetConfigImageSize(pHostObject=self._host))
        config = (c_uint8 * size.configImageSize)()
        image = {"configImageSize": len(config), "pConfigImage": ctypes.addressof(config)}
        self._call("cuptiProfilerHostGetConfigImage", GetConfigImage(pHostObject=self._host, **image))
        passes = self._call("cuptiProfilerHostGetNumOfPasses", GetNumOfPasses(**image)).numOfPasses
        if passes != 1:
            name = chip.decode(errors="replace")
            raise CountersMissing(f"a {name} can't read the Tensor Cores' counter in one pass, as sampling must")
        return config

    def _empty_image(self) -> None:
        self._call(
            "cuptiPmSamplingCounterDataImageInitialize",
            ImageInitialize(
                pPmSamplingObject=self._object,
                counterDataSize=len(self._data),
                pCounterData=ctypes.addressof(self._data),
            ),
        )

    def _call(self, function: str, params: Params) -> Any:
        """Call CUPTI; `params` with what it filled in. Raises CountersMissing."""
        result = getattr(self._library, function)(byref(params))
        if result == INVALID_PARAMETER and function == "cuptiProfilerHostInitialize":  # how 12.x says it
            result = INVALID_CHIP_NAME
        if result:
            raise CountersMissing(_REFUSALS.get(result, f"{function} failed with CUPTI's error {result}"))
        return params


class PipeMeter:
    """The fields of a `Reading` for the poller: begins when the card is known, and tells why there is nothing."""

    def __init__(self, open_counters: Callable[[int], Counters] | None = None) -> None:
        os.environ.setdefault("TEARDOWN_CUPTI", "0")  # torch's profiler would take CUPTI down under the sampling
        self._open = open_counters or (lambda device: Counters(load_library(), device))
        self._counters: Counters | None = None
        self._due = 0.0
        self._given_up = False
        self.last: dict[str, Any] = {}
        """The newest figures, with the time they were read at."""

    def read(self, device: int) -> dict[str, Any]:
        """The mean of the last `EVERY_S` on CUDA's card `device`."""
        now = time.monotonic()
        if self._given_up or now < self._due:
            return self.last
        self._due = now + EVERY_S
        try:
            if self._counters is None:
                self._counters = self._open(device)
                self._take(None, SOURCE)
            elif (busy := self._counters.read()) is not None:
                self._take(busy, SOURCE)
        except CountersMissing as missing:
            self.close()
            self._given_up = True
            self._take(None, f"CUPTI: {missing}")
        return self.last

    def _take(self, busy: float | None, source: str) -> None:
        at = time.time() if busy is not None else None
        self.last = {"tensor_core": busy, "tensor_core_time": at, "tensor_core_source": source}

    def close(self) -> None:
        """Give the card's counters back."""
        if self._counters is not None:
            self._counters.close()
            self._counters = None
