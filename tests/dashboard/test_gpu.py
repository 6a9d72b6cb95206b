"""The GPU panel: NVML's figures under their right names, each of which may be missing."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from tests.dashboard.views import HOSTILE, NOW, SIZES, any_view, assert_fits, role_of, started, texts, view
from tui3090.dashboard.panels import gpu
from tui3090.dashboard.view import View
from tui3090.records import Reading


def reading(**changes: Any) -> Reading:
    given_: dict[str, Any] = {
        "time": NOW - 0.5,
        "util": 0.99,
        "power_w": 341.2,
        "power_limit_w": 350.0,
        "temperature_c": 79.0,
        "fan": 0.82,
        "clock_mhz": 1695,
        "clock_max_mhz": 1965,
        "held_back": "power",
        "pcie_in_s": 4e8,
        "pcie_out_s": 1e8,
    }
    return Reading(**given_ | changes)


def test_the_whole_panel() -> None:
    seen = view(*(reading(time=NOW - 120 + i / 2, util=0.99 if i < 200 else 0.3) for i in range(240)))
    assert gpu.note(seen, NOW) == "NVML, 0.5 s"
    known = started(device_uuid="GPU-5c8b9f3e-0000-1111-2222-d0a1b2c3d4e5")
    assert gpu.note(view(known, *seen.readings), NOW) == "NVML …c3d4e5, 0.5 s"  # which of several cards it is
    assert texts(gpu.rows(seen, 56, 4, NOW)) == [
        "busy 30 %   'a kernel was running'   341 of 350 W",
        "clock 1 695 of 1 965 MHz: held by power",
        "79 °C, fan 82 %   PCIe 0.4 in, 0.1 out GB/s",
        "busy, 2 min " + "█" * 36 + "▆" + "▃" * 7,
    ]


def test_one_row() -> None:
    assert texts([gpu.line(view(reading()), 69, NOW)]) == [
        "busy 99 %  341 of 350 W  79 °C  clock 1 695 MHz: held by power"
    ]


def test_a_clock_that_nothing_holds_back() -> None:
    assert texts(gpu.rows(view(reading(held_back="")), 56, 4, NOW))[1] == "clock 1 695 of 1 965 MHz"


def test_every_field_may_be_unknown() -> None:
    assert texts(gpu.rows(view(Reading(time=NOW)), 56, 5, NOW)) == [
        "busy n/a   'a kernel was running'   power n/a",
        "clock n/a",
        "temperature n/a, fan n/a   PCIe n/a",
        "",
    ]
    assert gpu.note(view(Reading(time=NOW)), NOW) == "NVML, 0.0 s, n/a: not told"
    assert texts([gpu.line(view(Reading(time=NOW)), 90, NOW)]) == [
        "busy n/a  power n/a  temperature n/a  clock n/a  n/a: NVML does not tell"
    ]
    partly = view(reading(power_limit_w=None, fan=None, clock_max_mhz=None, pcie_out_s=None))
    assert texts(gpu.rows(partly, 56, 3, NOW)) == [
        "busy 99 %   'a kernel was running'   341 W",
        "clock 1 695 MHz: held by power",
        "79 °C, fan n/a   PCIe 0.4 in, n/a out GB/s",
    ]


def test_without_a_card_there_is_a_sentence() -> None:
    sentence = "There is no NVIDIA driver here: the card's figures are not known."
    seen = view(Reading(time=NOW, card_missing=sentence))
    assert gpu.note(seen, NOW) == "no card"
    assert texts(gpu.rows(seen, 40, 4, NOW)) == [
        "There is no NVIDIA driver here: the",
        "card's figures are not known.",
    ]
    assert texts([gpu.line(seen, 69, NOW)]) == [sentence]


def test_a_stale_reading_says_so_and_is_dim() -> None:
    seen = view(reading(time=NOW - 12))
    assert gpu.note(seen, NOW) == "NVML, stale: 12 s old"
    rows = gpu.rows(seen, 56, 5, NOW)
    assert texts(rows)[:2] == [
        "no reading for 12 s; the last one was:",
        "busy 99 %   'a kernel was running'   341 of 350 W",
    ]
    assert {role for row in rows[1:] for _, role in row} == {"dim"}
    assert role_of(rows, "no reading") == "warn"
    assert texts([gpu.line(seen, 69, NOW)])[0].startswith("stale: 12 s old  busy 99 %")


def test_of_a_run_that_is_over_the_last_reading_is_shown_with_its_time() -> None:
    seen = view(reading(time=NOW - 3600), live=False)
    assert gpu.note(seen, NOW).startswith("NVML, at ")
    rows = texts(gpu.rows(seen, 56, 4, NOW))
    assert rows[0].startswith("busy 99 %")
    assert rows[3].endswith("█")


def test_gaps_in_the_history_stay_blank() -> None:
    seen = view(reading(time=NOW - 119, util=1.0), reading(time=NOW - 0.1, util=0.0))
    assert texts(gpu.rows(seen, 24, 4, NOW))[3] == "busy, 2 min █          ▁"


def test_words_from_the_driver_are_harmless() -> None:
    row = texts(gpu.rows(view(reading(held_back=HOSTILE)), 80, 4, NOW))[1]
    assert row.startswith("clock 1 695 of 1 965 MHz: held by [/data/train] [b]x ␛[31m red  漢字🙂")


@given(any_view(), SIZES)
def test_it_fits(seen: View, size: tuple[int, int]) -> None:
    assert_fits(gpu, seen, *size, NOW)
