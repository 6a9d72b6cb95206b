from __future__ import annotations

import os

import pynvml
import pytest

from tui3090.meters.watched import PCIE_S, STEADY_S, WatchedCard
from tui3090.records import Reading

GIB = 1 << 30


@pytest.fixture
def card(fake_nvml, clock):
    watched = WatchedCard()
    watched.follow(lambda: "GPU-bbbb")
    yield watched
    watched.close()
    assert fake_nvml.open == 0


class TestFigures:
    def test_each_in_the_record_s_unit(self, fake_nvml, card):
        fake_nvml.cards[1].throttle = pynvml.nvmlClocksThrottleReasonSwPowerCap
        figures = card.read(on_card=False)
        assert figures == {
            "card_total": 24 * GIB,
            "card_used": GIB,
            "util": 1.0,
            "power_w": pytest.approx(341.5),
            "power_limit_w": pytest.approx(350.0),
            "temperature_c": 79.0,
            "fan": pytest.approx(0.82),
            "clock_mhz": 1695,
            "clock_max_mhz": 1965,
            "held_back": "power",
            "own": None,
            "others": 0,
            "holders": "",
            "tensor_core_source": "GPM: needs an H100 or newer",
        }
        assert Reading(time=0.0, **figures).card_missing == ""

    @pytest.mark.parametrize(
        ("call", "fields"),
        [
            ("nvmlDeviceGetMemoryInfo", {"card_total", "card_used"}),
            ("nvmlDeviceGetUtilizationRates", {"util"}),
            ("nvmlDeviceGetPowerUsage", {"power_w"}),
            ("nvmlDeviceGetEnforcedPowerLimit", {"power_limit_w"}),
            ("nvmlDeviceGetTemperature", {"temperature_c"}),
            ("nvmlDeviceGetFanSpeed", {"fan"}),
            ("nvmlDeviceGetClockInfo", {"clock_mhz"}),
            ("nvmlDeviceGetMaxClockInfo", {"clock_max_mhz"}),
        ],
    )
    def test_one_that_is_not_supported_is_unknown_and_no_other(self, fake_nvml, card, clock, call, fields):
        whole = card.read(on_card=False)
        fake_nvml.unsupported = {call}
        clock.now += STEADY_S
        rest = card.read(on_card=False)
        assert {name for name in whole if rest[name] is None and whole[name] is not None} == fields
        assert {name: rest[name] for name in rest if name not in fields} == {
            name: whole[name] for name in whole if name not in fields
        }

    def test_reasons_that_are_not_supported_are_no_reason(self, fake_nvml, card):
        fake_nvml.cards[1].throttle = pynvml.nvmlClocksThrottleReasonSwPowerCap
        fake_nvml.unsupported = {"nvmlDeviceGetCurrentClocksThrottleReasons"}
        assert card.read(on_card=False)["held_back"] == ""

    def test_an_old_driver_has_only_the_first_version_of_the_memory(self, fake_nvml, card, monkeypatch):
        newer = fake_nvml._nvmlDeviceGetMemoryInfo

        def first_version_only(card, version=None):
            if version is not None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return newer(card)

        monkeypatch.setattr(fake_nvml, "_nvmlDeviceGetMemoryInfo", first_version_only, raising=False)
        assert card.read(on_card=False)["card_used"] == GIB + (400 << 20)

    def test_utilisation_is_never_a_tensor_core_figure(self, card):
        figures = card.read(on_card=True)
        assert figures["util"] == 1.0
        assert "tensor_core" not in figures

    @pytest.mark.parametrize(
        ("reasons", "words"),
        [
            ([], ""),
            (["GpuIdle"], ""),
            (["HwThermalSlowdown", "HwSlowdown"], "heat"),
            (["HwThermalSlowdown", "SwThermalSlowdown"], "heat"),
            (["SwPowerCap", "SwThermalSlowdown"], "power, heat"),
            (["HwPowerBrakeSlowdown", "HwSlowdown"], "power brake"),
            (["HwSlowdown"], "hardware slowdown"),
            (["ApplicationsClocksSetting"], "clocks set by hand"),
        ],
    )
    def test_why_the_clock_is_held_back(self, fake_nvml, card, reasons, words):
        fake_nvml.cards[1].throttle = sum(getattr(pynvml, f"nvmlClocksThrottleReason{reason}") for reason in reasons)
        assert card.read(on_card=False)["held_back"] == words

    def test_pcie_traffic_blocks_and_is_asked_for_seldom(self, fake_nvml, card, clock):
        assert "pcie_in_s" not in card.read(on_card=False)
        clock.now += PCIE_S
        for _ in range(10):
            figures = card.read(on_card=False)
        assert (figures["pcie_in_s"], figures["pcie_out_s"]) == (4e8, 1e8)
        assert fake_nvml.calls["nvmlDeviceGetPcieThroughput"] == 2


class TestHolders:
    def test_ours_and_others(self, fake_nvml, card):
        fake_nvml.cards[1].processes = [(os.getpid(), 5 * GIB), (1001, GIB), (5000, GIB // 2)]
        figures = card.read(on_card=True)
        assert (figures["own"], figures["others"]) == (5 * GIB, 3 * GIB // 2)
        assert figures["holders"] == "user1 1.0 GiB, someone 0.5 GiB"

    def test_before_we_are_on_the_card_all_are_others(self, fake_nvml, card):
        fake_nvml.cards[1].processes = [(1001, GIB)]
        assert card.read(on_card=False)["others"] == GIB

    def test_in_a_container_where_we_do_not_find_ourselves_nobody_is_named(self, fake_nvml, card):
        fake_nvml.cards[1].processes = [(1001, 6 * GIB)]
        figures = card.read(on_card=True)
        assert not {"own", "others", "holders"} & set(figures)

    def test_sizes_that_the_driver_does_not_say(self, fake_nvml, card):
        fake_nvml.cards[1].processes = [(1001, None)]
        figures = card.read(on_card=False)
        assert (figures["others"], figures["holders"]) == (None, "user1")

    def test_lists_that_are_not_supported(self, fake_nvml, card):
        fake_nvml.unsupported = {"nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"}
        assert not {"own", "others", "holders"} & set(card.read(on_card=False))

    def test_who_left_is_gone_after_a_while(self, fake_nvml, card, clock):
        fake_nvml.cards[1].processes = [(1001, GIB)]
        assert card.read(on_card=False)["holders"] == "user1 1.0 GiB"
        fake_nvml.cards[1].processes = []
        clock.now += STEADY_S
        assert card.read(on_card=False)["holders"] == ""


class TestMissing:
    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "No NVIDIA driver here"),
            (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
            (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
            (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
        ],
    )
    def test_a_driver_that_does_not_answer(self, fake_nvml, code, words):
        fake_nvml.init_error = pynvml.NVMLError(code)
        card = WatchedCard()
        card.follow(lambda: "GPU-bbbb")
        figures = card.read(on_card=True)
        assert set(figures) == {"card_missing"}
        assert words in figures["card_missing"]
        card.close()
        assert fake_nvml.open == 0

    def test_a_card_that_nvml_does_not_know_is_no_other_card(self, fake_nvml):
        card = WatchedCard()
        card.follow(lambda: "cccc")
        assert card.read(on_card=True) == {"card_missing": "NVML: device not identified (cccc)."}
        assert fake_nvml.open == 0

    @pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNINITIALIZED])
    def test_a_card_that_is_lost_is_not_asked_again(self, fake_nvml, card, code):
        assert card.read(on_card=False)["util"] == 1.0
        fake_nvml.broken = pynvml.NVMLError(code)
        assert set(card.read(on_card=False)) == {"card_missing"}
        asked = fake_nvml.calls.total()
        assert "lost" in card.read(on_card=False)["card_missing"]
        assert fake_nvml.calls.total() == asked

    def test_another_card_can_be_followed_afterwards(self, fake_nvml, card):
        card.follow(lambda: "cccc")
        card.follow(lambda: "aaaa")
        assert card.read(on_card=False)["card_total"] == 2 * GIB
        assert card.missing == ""
