from __future__ import annotations

import pynvml
import pytest

from tui3090.meters.gpm import EVERY_S, SOURCE, TensorCores

PERCENT = {
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 90.0,
    pynvml.NVML_GPM_METRIC_SM_UTIL: 97.5,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 12.0,
}


@pytest.fixture
def card(fake_nvml, clock):
    fake_nvml.open = 1
    fake_nvml.cards[1].gpm = dict(PERCENT)
    return fake_nvml.cards[1]


def test_shares_of_the_time_between_two_samples(fake_nvml, clock, card):
    meter = TensorCores(card)
    assert meter.read() == {"tensor_core_source": SOURCE}
    clock.now += EVERY_S
    first = meter.read()
    assert first == {
        "tensor_core": 0.9,
        "sm_util": 0.975,
        "dram_util": 0.12,
        "tensor_core_source": SOURCE,
        "tensor_core_time": clock.time(),
    }
    clock.now += EVERY_S / 4
    assert meter.read() == first
    assert fake_nvml.calls["nvmlGpmMetricsGet"] == 1
    meter.close()
    assert fake_nvml.calls["nvmlGpmSampleFree"] == fake_nvml.calls["nvmlGpmSampleAlloc"] == 2


@pytest.mark.parametrize("bad", [None, float("nan")])
def test_a_counter_that_was_not_read_is_unknown(clock, card, bad):
    if bad is None:
        del card.gpm[pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL]
    else:
        card.gpm[pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL] = bad
    meter = TensorCores(card)
    meter.read()
    clock.now += EVERY_S
    figures = meter.read()
    assert (figures["tensor_core"], figures["sm_util"]) == (None, 0.975)


def test_a_card_without_counters_says_so(fake_nvml, card):
    card.gpm = None
    meter = TensorCores(card)
    assert meter.read() == {"tensor_core_source": "GPM: needs an H100 or newer"}
    assert fake_nvml.calls["nvmlGpmSampleGet"] == 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, "GPM: needs an H100 or newer"),
        (pynvml.NVML_ERROR_UNKNOWN, "GPM: Unknown Error"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "GPM: needs an H100 or newer, and a newer driver"),
    ],
)
def test_a_driver_without_counters_says_so(fake_nvml, card, code, reason):
    fake_nvml.broken = pynvml.NVMLError(code)
    assert TensorCores(card).read() == {"tensor_core_source": reason}


def test_a_failed_reading_is_unknown_and_the_next_is_of_fresh_samples(fake_nvml, clock, card):
    meter = TensorCores(card)
    for _ in range(2):
        meter.read()
        clock.now += EVERY_S
    fake_nvml.broken = pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
    assert meter.read() == {"tensor_core_source": "GPM: Timeout"}
    fake_nvml.broken = None
    clock.now += EVERY_S
    assert "tensor_core" not in meter.read()
    clock.now += EVERY_S
    assert meter.read()["tensor_core"] == 0.9
