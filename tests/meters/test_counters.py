"""CUPTI PM sampling against a stand-in for libcupti: the order of the calls, their structures, and every refusal."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.meters.conftest import Clock
from tui3090 import cli
from tui3090.counters_check import judged
from tui3090.meters import counters
from tui3090.meters.counters import METRIC, SOURCE, Counters, CountersMissing, Params, PipeMeter, find_library
from tui3090.meters.kernels import Profiler

OPENED = [
    "cuptiProfilerInitialize",
    "cuptiDeviceGetChipName",
    "cuptiProfilerHostInitialize",
    "cuptiProfilerHostConfigAddMetrics",
    "cuptiProfilerHostGetConfigImageSize",
    "cuptiProfilerHostGetConfigImage",
    "cuptiProfilerHostGetNumOfPasses",
    "cuptiPmSamplingEnable",
    "cuptiPmSamplingSetConfig",
    "cuptiPmSamplingGetCounterDataSize",
    "cuptiPmSamplingCounterDataImageInitialize",
    "cuptiPmSamplingStart",
]
CLOSED = {
    "cuptiPmSamplingStart": "cuptiPmSamplingStop",
    "cuptiPmSamplingEnable": "cuptiPmSamplingDisable",
    "cuptiProfilerHostInitialize": "cuptiProfilerHostDeinitialize",
    "cuptiProfilerInitialize": "cuptiProfilerDeInitialize",
}
"""What closes what, in the order of closing."""
HOST, OBJECT = 0x1000, 0x2000


class FakeCupti:
    """libcupti as far as it is used: fills in what it is asked for, and fails where it is told to."""

    def __init__(self, chip: bytes = b"GA102", passes: int = 1, fails: dict[str, int] | None = None) -> None:
        self.chip, self.passes, self.fails = chip, passes, fails or {}
        self.samples: list[float] = []
        """Percent, of the samples that the next decoding finds."""
        self.calls: list[str] = []
        self.given: dict[str, dict[str, Any]] = {}
        """Function -> what it was last called with."""

    def __getattr__(self, function: str) -> Callable[[Any], int]:
        if not function.startswith("cupti"):
            raise AttributeError(function)
        return lambda reference: self._called(function, reference._obj)

    def _called(self, function: str, params: Any) -> int:
        self.calls.append(function)
        assert params.pPriv is None
        assert params.structSize > 0
        self.given[function] = {name: getattr(params, name) for name, *_ in params._fields_}
        if function in self.fails:
            return self.fails[function]
        fill = getattr(self, f"_{function}", None)
        if fill is not None:
            fill(params)
        return 0

    def _cuptiDeviceGetChipName(self, params: Any) -> None:  # noqa: N802
        params.pChipName = self.chip

    def _cuptiProfilerHostInitialize(self, params: Any) -> None:  # noqa: N802
        params.pHostObject = HOST

    def _cuptiProfilerHostGetConfigImageSize(self, params: Any) -> None:  # noqa: N802
        params.configImageSize = 7

    def _cuptiProfilerHostGetConfigImage(self, params: Any) -> None:  # noqa: N802
        ctypes.memmove(params.pConfigImage, b"config!", params.configImageSize)

    def _cuptiProfilerHostGetNumOfPasses(self, params: Any) -> None:  # noqa: N802
        assert ctypes.string_at(params.pConfigImage, params.configImageSize) == b"config!"
        params.numOfPasses = self.passes

    def _cuptiPmSamplingEnable(self, params: Any) -> None:  # noqa: N802
        params.pPmSamplingObject = OBJECT

    def _cuptiPmSamplingSetConfig(self, params: Any) -> None:  # noqa: N802
        assert ctypes.string_at(params.pConfig, params.configSize) == b"config!"

    def _cuptiPmSamplingGetCounterDataSize(self, params: Any) -> None:  # noqa: N802
        assert params.pMetricNames[0] == METRIC
        params.counterDataSize = 4096

    def _cuptiPmSamplingCounterDataImageInitialize(self, params: Any) -> None:  # noqa: N802
        assert params.counterDataSize == 4096

    def _cuptiPmSamplingGetCounterDataInfo(self, params: Any) -> None:  # noqa: N802
        params.numCompletedSamples = len(self.samples)

    def _cuptiProfilerHostEvaluateToGpuValues(self, params: Any) -> None:  # noqa: N802
        assert params.ppMetricNames[0] == METRIC
        params.pMetricValues[0] = self.samples[params.rangeIndex]


def test_the_order_of_the_calls_from_begin_to_end() -> None:
    cupti = FakeCupti()
    sampling = Counters(cupti, 2)
    assert cupti.calls == OPENED
    cupti.calls.clear()
    cupti.samples = [90.0, 80.0]
    assert sampling.read() == pytest.approx(0.85)
    evaluated = ["cuptiProfilerHostEvaluateToGpuValues"] * 2
    begun = ["cuptiPmSamplingDecodeData", "cuptiPmSamplingGetCounterDataInfo"]
    assert cupti.calls == [*begun, *evaluated, "cuptiPmSamplingCounterDataImageInitialize"]
    cupti.calls.clear()
    sampling.close()
    assert cupti.calls == list(CLOSED.values())
    sampling.close()
    assert len(cupti.calls) == len(CLOSED)


def test_what_is_asked_for() -> None:
    cupti = FakeCupti()
    Counters(cupti, 2)
    assert cupti.given["cuptiDeviceGetChipName"]["deviceIndex"] == 2
    assert cupti.given["cuptiPmSamplingEnable"]["deviceIndex"] == 2
    host = cupti.given["cuptiProfilerHostInitialize"]
    assert (host["profilerType"], host["pChipName"]) == (1, b"GA102")
    config = cupti.given["cuptiPmSamplingSetConfig"]
    assert (config["pPmSamplingObject"], config["triggerMode"], config["samplingInterval"]) == (OBJECT, 1, 20_000_000)
    assert (config["hwBufferAppendMode"], config["hardwareBufferSize"]) == (1, 64 << 20)
    assert cupti.given["cuptiProfilerHostConfigAddMetrics"]["pHostObject"] == HOST


def test_a_ga100_is_sampled_by_its_clock() -> None:
    cupti = FakeCupti(chip=b"GA100")
    Counters(cupti, 0)
    config = cupti.given["cuptiPmSamplingSetConfig"]
    assert (config["triggerMode"], config["samplingInterval"]) == (0, 24_000_000)


def test_without_a_sample_there_is_no_figure() -> None:
    assert Counters(FakeCupti(), 0).read() is None


@pytest.mark.parametrize("function", OPENED)
def test_what_was_begun_is_undone_where_it_fails(function: str) -> None:
    cupti = FakeCupti(fails={function: 999})
    with pytest.raises(CountersMissing, match=f"{function} failed with CUPTI's error 999"):
        Counters(cupti, 0)
    done = OPENED[: OPENED.index(function)]
    assert cupti.calls == [*done, function, *(close for begin, close in CLOSED.items() if begin in done)]


@pytest.mark.parametrize(
    ("function", "result", "sentence"),
    [
        ("cuptiPmSamplingEnable", 35, "NVreg_RestrictProfilingToAdminUsers=0"),
        ("cuptiPmSamplingEnable", 7, "something else uses the card's counters"),
        ("cuptiPmSamplingStart", 26, "something else uses the card's counters"),
        ("cuptiPmSamplingEnable", 27, "not supported on this card or by this driver"),
        ("cuptiPmSamplingEnable", 8, "memory for the samples ran out"),
        ("cuptiProfilerInitialize", 15, "CUPTI can't start"),
        ("cuptiProfilerHostConfigAddMetrics", 17, "this chip has no such counter"),
        ("cuptiProfilerInitialize", 39, "another CUPTI tool"),
        ("cuptiProfilerInitialize", 36, "an older profiler"),
        ("cuptiPmSamplingEnable", 33, "a virtual machine's card"),
        ("cuptiPmSamplingEnable", 40, "this virtual machine may not"),
        ("cuptiPmSamplingEnable", 41, "confidential computing"),
        ("cuptiPmSamplingEnable", 42, "a mining card"),
        ("cuptiPmSamplingEnable", 43, "a MIG instance"),
        ("cuptiPmSamplingEnable", 44, "cards in SLI"),
        ("cuptiPmSamplingEnable", 45, "WSL"),
        ("cuptiProfilerHostInitialize", 46, r"this CUPTI does not know the chip.*\(GA102\)"),
        ("cuptiProfilerHostInitialize", 1, r"this CUPTI does not know the chip.*\(GA102\)"),
    ],
)
def test_every_refusal_is_a_sentence(function: str, result: int, sentence: str) -> None:
    with pytest.raises(CountersMissing, match=sentence):
        Counters(FakeCupti(fails={function: result}), 0)


def test_a_chip_that_needs_two_passes() -> None:
    with pytest.raises(CountersMissing, match="a TU102 can't read the Tensor Cores' counter in one pass"):
        Counters(FakeCupti(chip=b"TU102", passes=2), 0)


def test_a_cupti_that_is_too_old() -> None:
    with pytest.raises(CountersMissing, match=r"older than 12\.6"):
        Counters(object(), 0)


class TestLibrary:
    def test_the_one_that_the_process_has_loaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        maps = tmp_path / "maps"
        maps.write_text(
            "7f00-7f01 r-xp 00000000 00:00 1      /usr/lib/libc.so.6\n7f02-7f03 rw-p 00000000 00:00 0 \n"
            "7f04-7f05 r-xp 00000000 00:00 2      /opt/my envs/nvidia/lib/libcupti.so.13\n"
        )
        monkeypatch.setattr(counters, "MAPS", maps)
        assert find_library() == "/opt/my envs/nvidia/lib/libcupti.so.13"

    def test_the_one_that_pip_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(counters, "MAPS", tmp_path / "none")
        library = tmp_path / "nvidia" / "cu13" / "lib" / "libcupti.so.13"
        library.parent.mkdir(parents=True)
        library.write_text("no library")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert find_library() == str(library)
        with pytest.raises(CountersMissing, match="libcupti can't be loaded"):
            counters.load_library()

    def test_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(counters, "MAPS", tmp_path / "none")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(CountersMissing, match="libcupti was not found"):
            find_library()


STRUCTURES = [value for value in vars(counters).values() if isinstance(value, type) and issubclass(value, Params)]
SIZES = {
    "CUpti_Profiler_Initialize_Params": 16,
    "CUpti_Profiler_DeInitialize_Params": 16,
    "CUpti_Device_GetChipName_Params": 32,
    "CUpti_Profiler_Host_Initialize_Params": 48,
    "CUpti_Profiler_Host_Deinitialize_Params": 24,
    "CUpti_Profiler_Host_ConfigAddMetrics_Params": 40,
    "CUpti_Profiler_Host_GetConfigImageSize_Params": 32,
    "CUpti_Profiler_Host_GetConfigImage_Params": 40,
    "CUpti_Profiler_Host_GetNumOfPasses_Params": 40,
    "CUpti_Profiler_Host_EvaluateToGpuValues_Params": 72,
    "CUpti_PmSampling_Enable_Params": 32,
    "CUpti_PmSampling_Disable_Params": 24,
    "CUpti_PmSampling_Start_Params": 24,
    "CUpti_PmSampling_Stop_Params": 24,
    "CUpti_PmSampling_SetConfig_Params": 64,
    "CUpti_PmSampling_GetCounterDataSize_Params": 56,
    "CUpti_PmSampling_CounterDataImage_Initialize_Params": 40,
    "CUpti_PmSampling_DecodeData_Params": 45,
    "CUpti_PmSampling_GetCounterDataInfo_Params": 56,
}
"""The headers' STRUCT_SIZE of each; of Host_Initialize that of 12.6 to 12.9, which 13.5 has made longer."""


class TestLayout:
    def test_sizes(self) -> None:
        given = {structure.__name__: structure().structSize for structure in STRUCTURES if structure is not Params}
        assert given == SIZES

    def test_every_field_lies_where_the_headers_put_it(self, tmp_path: Path) -> None:
        folder, compiler = headers(), shutil.which("c++")
        if folder is None or compiler is None:
            pytest.skip("needs the headers of nvidia-cuda-cupti and a C++ compiler")
        fields = [(s, name) for s in STRUCTURES if s is not Params for name, *_ in s._fields_]
        lines = [f'printf("%zu\\n", offsetof({s.__name__}, {name}));' for s, name in fields]
        names = ("pmsampling", "profiler_host", "profiler_target", "target")
        includes = [f"#include <cupti_{name}.h>\n" for name in names]
        source = tmp_path / "layout.cpp"
        source.write_text(f"#include <stdio.h>\n{''.join(includes)}int main() {{ {' '.join(lines)} return 0; }}\n")
        # of CUDA's own header only these names are needed
        (tmp_path / "cuda.h").write_text("typedef struct CUctx_st *CUcontext; typedef int CUdevice;\n")
        program = tmp_path / "layout"
        subprocess.run([compiler, f"-I{folder}", f"-I{tmp_path}", str(source), "-o", str(program)], check=True)
        offsets = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
        assert [int(offset) for offset in offsets] == [getattr(s, name).offset for s, name in fields]


def headers() -> Path | None:
    """The folder of CUPTI's headers that pip installed."""
    try:
        folder = Path(find_library()).parent.parent / "include"
    except CountersMissing:
        return None
    return folder if (folder / "cupti_pmsampling.h").exists() else None


@pytest.mark.parametrize("chip", [b"GA102", b"GA104", b"AD102", b"GH100", b"GB202"])
def test_the_library_itself_reads_the_metric_in_one_pass(chip: bytes) -> None:
    """The host's side needs no card and no driver."""
    try:
        library = counters.load_library()
    except CountersMissing:
        pytest.skip("needs nvidia-cuda-cupti")
    if library.cuptiGetVersion(ctypes.byref(ctypes.c_uint32())):
        pytest.skip("this version of CUPTI does nothing without a driver")

    class HostOnly:
        """Says that the chip is there, and lets nothing through to a driver."""

        def __getattr__(self, function: str) -> Any:
            if function.startswith("cuptiProfilerHost"):
                return getattr(library, function)
            return getattr(fake, function)

    fake = FakeCupti(chip=chip)
    fake._cuptiPmSamplingSetConfig = lambda params: None  # type: ignore[method-assign]
    Counters(HostOnly(), 0).close()
    assert fake.given["cuptiPmSamplingSetConfig"]["configSize"] > 100


class TestMeter:
    def test_readings_are_means_with_their_time(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(counters, "time", clock)
        cupti = FakeCupti()
        meter = PipeMeter(lambda device: Counters(cupti, device))
        begun = {"tensor_core": None, "tensor_core_time": None, "tensor_core_source": SOURCE}
        assert meter.read(1) == begun
        cupti.samples = [50.0]
        clock.now += 1.0
        assert meter.read(1) == begun
        clock.now += 1.0
        assert meter.read(1) == {**begun, "tensor_core": 0.5, "tensor_core_time": clock.time()}
        assert meter.last["tensor_core"] == 0.5
        meter.close()
        assert cupti.calls[-1] == "cuptiProfilerDeInitialize"

    def test_a_profile_beside_it_leaves_cupti_where_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setenv("TEARDOWN_CUPTI", "")  # put back afterwards
        del os.environ["TEARDOWN_CUPTI"]
        PipeMeter()
        Profiler()
        assert os.environ["TEARDOWN_CUPTI"] == "0"

    def test_a_refusal_is_told_and_not_asked_again(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(counters, "time", clock)
        cupti = FakeCupti(fails={"cuptiPmSamplingEnable": 45})
        meter = PipeMeter(lambda device: Counters(cupti, device))
        refused = {"tensor_core": None, "tensor_core_time": None, "tensor_core_source": "CUPTI: WSL gives none"}
        assert meter.read(0) == refused
        cupti.calls.clear()
        clock.now += 100.0
        assert meter.read(0) == refused
        assert cupti.calls == []

    def test_one_that_breaks_off_is_closed(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(counters, "time", clock)
        cupti = FakeCupti()
        meter = PipeMeter(lambda device: Counters(cupti, device))
        meter.read(0)
        cupti.fails = {"cuptiPmSamplingDecodeData": 26}
        clock.now += 3.0
        assert meter.read(0)["tensor_core_source"].startswith("CUPTI: something else uses")
        assert cupti.calls[-4:] == list(CLOSED.values())


class TestCheck:
    @pytest.mark.parametrize(
        ("half", "single", "right", "words"),
        [
            (0.87, 0.0, True, "right: fp16 matmul 87 %, fp32 matmul 0.0 %"),
            (0.87, 0.4, False, "implausible"),
            (0.1, 0.0, False, "implausible"),
            (None, 0.0, False, "they gave no sample"),
        ],
    )
    def test_the_verdict(self, half: float | None, single: float | None, right: bool, words: str) -> None:
        sentence, trusted = judged(half, single)
        assert sentence.startswith(words)
        assert trusted is right

    def test_without_a_card_the_command_says_so(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert cli.main(["doctor", "--counters"]) == 1
        assert "counters      not checked: torch sees no card" in capsys.readouterr().out
