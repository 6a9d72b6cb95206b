"""The memory panel: a bar that reads without colour, figures that add up, n/a where something is not known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tests.dashboard.views import GIB, HOSTILE, NOW, SIZES, any_view, assert_fits, role_of, started, step, texts, view
from tui3090.dashboard.panels import memory
from tui3090.dashboard.view import View
from tui3090.records import Activations, Changed, Reading


def reading(**changes: Any) -> Reading:
    given_: dict[str, Any] = {
        "time": NOW - 0.5,
        "allocated": 5 * GIB,
        "reserved": 14 * GIB,
        "peak_allocated": 12 * GIB,
        "weights": GIB,
        "gradients": GIB,
        "optimizer_state": 2 * GIB,
        "retries": 0,
        "card_total": 24 * GIB,
        "card_used": 16 * GIB,
        "others": GIB,
        "own": 15 * GIB,
        "holders": "user1 1.0 GiB",
    }
    return Reading(**given_ | changes)


def test_the_whole_panel() -> None:
    seen = view(started(), reading())
    assert memory.note(seen, NOW) == "GiB, 0.5 s"
    assert texts(memory.rows(seen, 96, 7, NOW)) == [
        "0                       6                      12                      18                     24",
        "wwwwggggssssssssaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa▒▒▒▒▒▒▒▒xxxxoooo································",
        "w weights 1.00    g gradients    1.00    s optimizer state 2.00    a activations, peak 8.00",
        "▒ cached  2.00    x CUDA context 1.00    o other processes 1.00    · free              8.00",
        "allocated    5.00 now, 12.00 peak   what tensors hold   peak since the start",
        "reserved    14.00   what torch took   fragmentation 14 %   retries 0",
        "nvidia-smi  16.00   all of it + other processes: user1 1.0 GiB",
    ]


def test_in_fewer_columns_the_legend_takes_more_rows() -> None:
    assert texts(memory.rows(view(reading()), 56, 9, NOW)) == [
        "0             6            12            18           24",
        "wwgggssssaaaaaaaaaaaaaaaaaaa▒▒▒▒▒xxoo···················",
        "w weights         1.00    g gradients         1.00",
        "s optimizer state 2.00    a activations, peak 8.00",
        "▒ cached          2.00    x CUDA context      1.00",
        "o other processes 1.00    · free              8.00",
        "allocated    5.00 now, 12.00 peak   what tensors hold",
        "reserved    14.00   what torch took   fragmentation 14 %",
        "nvidia-smi  16.00   all of it + other processes: user1…",
    ]


def test_in_little_height_bar_and_figures_stay() -> None:
    assert [text[:10].rstrip() for text in texts(memory.rows(view(reading()), 70, 4, NOW))] == [
        "wwwgggssss",
        "allocated",
        "reserved",
        "nvidia-smi",
    ]


def test_one_row() -> None:
    seen = view(reading())
    assert texts([memory.line(seen, 69, NOW)]) == [
        "wgssaaaaaaaaaa▒▒xo·········  12.00 peak  14.00 reserved  of 24.00 GiB"
    ]
    assert texts([memory.line(seen, 50, NOW)]) == ["gaaa▒···  12.00 peak  14.00 reserved  of 24.00 GiB"]


def test_the_peak_is_since_the_last_change() -> None:
    change = Changed(time=NOW, step=1251, technique="amp", old="off", new="bf16")
    assert "peak since step 1 251" in texts(memory.rows(view(change, reading()), 96, 7, NOW))[4]


def test_under_replay_what_is_beyond_the_weights_is_not_called_activations() -> None:
    rows = texts(memory.rows(view(started(), step(replayed=True), reading()), 96, 7, NOW))
    assert "a other tensors, peak 8.00" in rows[2]
    assert "▒ cached + graphs 2.00" in rows[3]
    assert not any("activations" in row for row in rows)
    assert "fragmentation n/a" in rows[5]  # what graphs keep is not known here, and would count as unused


def test_graph_pools_are_a_figure_of_their_own_and_activations_are_not_made_up() -> None:
    # what tensors hold now is 5 GiB, 4 of them kept; the graphs keep 6 of the 9 that no tensor holds
    seen = view(started(), step(replayed=True), reading(graph_pools=6 * GIB))
    rows = texts(memory.rows(seen, 96, 8, NOW))
    assert rows[1:5] == [
        "wwwwggggssssssssppppppppppppppppppppppppaaaa▒▒▒▒▒▒▒▒▒▒▒▒xxxxoooo································",
        "w weights       1.00    g gradients 1.00    s optimizer state 2.00    p graph pools     6.00",
        "a other tensors 1.00    ▒ cached    3.00    x CUDA context    1.00    o other processes 1.00",
        "· free          8.00",
    ]
    assert "fragmentation 21 %" in rows[6]  # 3 of 14
    # where a row is missing the scale goes first, then the legend
    assert texts(memory.rows(seen, 96, 7, NOW))[0].startswith("wwwwgggg")


def sizes(seen: View) -> dict[str, float]:
    """What the legend of a panel in one column says, in GiB."""
    rows = texts(memory.rows(seen, 30, 40, NOW))[2:11]
    return {row[0]: float(row.split()[-1]) for row in rows if row[:2] in {f"{c} " for c in "wgspa▒xo·"}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"graph_pools": 6 * GIB},
        {"graph_pools": 0},
        {"peak_allocated": 20 * GIB},  # the cache was given back since
        {"allocated": 3 * GIB, "graph_pools": 6 * GIB, "reserved": 12 * GIB, "own": 13 * GIB, "card_used": 14 * GIB},
    ],
)
def test_it_adds_up_to_the_card(changes: dict[str, Any]) -> None:
    given_ = reading(**changes)
    found = sizes(view(started(), given_))
    assert sum(found.values()) == pytest.approx(24.0)
    of_torch = sum(found[letter] for letter in found if letter in "wgspa▒")
    assert of_torch == pytest.approx((given_.reserved or 0) / GIB)


def test_the_layers_whose_activations_hold_most() -> None:
    measured = Activations(
        time=NOW, step=7, total=4 * GIB, layers=f"{3 * GIB} blocks.*.up × 12\n{GIB // 2} head\nnonsense"
    )
    rows = texts(memory.rows(view(started(), reading(), measured), 100, 30, NOW))
    assert rows[7:] == [
        "",
        "kept for backward by one micro-batch, step 7: 4.00 GiB",
        "    3.00  75 %  blocks.*.up × 12                         " + "a" * 30,
        "    0.50  12 %  head                                     aaaaa",
        "    0.00   0 %",
    ]
    assert "m measures" in texts(memory.rows(view(started(), reading()), 100, 30, NOW))[8]
    assert len(memory.rows(view(started(), reading(), measured), 100, 9, NOW)) == 7  # no room for them


def test_what_a_small_model_keeps_is_told_in_mib() -> None:
    measured = Activations(time=NOW, step=3, total=3 << 20, layers=f"{2 << 20} head\n{1 << 18} norm")
    rows = texts(memory.rows(view(started(), reading(), measured), 100, 30, NOW))
    assert rows[8] == "kept for backward by one micro-batch, step 3: 3.0 MiB"
    assert [row.split()[:2] for row in rows[9:]] == [["2.0", "67"], ["0.2", "8"]]


def test_before_torch_uses_the_card_its_figures_are_missing_with_the_reason() -> None:
    loading = reading(allocated=None, reserved=None, peak_allocated=None, retries=None)
    rows = texts(memory.rows(view(loading), 96, 7, NOW))
    assert rows[4].startswith("allocated     n/a now, n/a peak   torch has not used the card yet")


def test_they_do_not_outlive_a_change() -> None:
    measured = Activations(time=NOW, step=7, total=GIB, layers=f"{GIB} head")
    change = Changed(time=NOW, step=9, technique="amp", old="off", new="bf16")
    rows = texts(memory.rows(view(started(), reading(), measured, change), 100, 30, NOW))
    assert "m measures" in rows[8]


def test_retries_are_a_warning() -> None:
    rows = memory.rows(view(reading(retries=3)), 96, 7, NOW)
    assert role_of(rows, "retries 3") == "warn"


def test_without_nvml_the_bar_is_torchs_and_the_rest_is_a_question_mark() -> None:
    seen = view(
        started(),
        Reading(
            time=NOW,
            allocated=5 * GIB,
            reserved=18 * GIB,
            peak_allocated=12 * GIB,
            card_missing="NVML: driver/library mismatch.",
        ),
    )
    assert texts(memory.rows(seen, 96, 7, NOW)) == [
        "0                       6                      12                      18                     24",
        "a" * 48 + "▒" * 24 + "?" * 24,
        "w weights  n/a    g gradients    n/a    s optimizer state n/a    a other tensors, peak 12.00",
        "▒ cached  6.00    x CUDA context n/a    o other processes n/a    · free                  n/a",
        "allocated    5.00 now, 12.00 peak   what tensors hold   peak since the start",
        "reserved    18.00   what torch took   fragmentation 33 %   retries n/a",
        "nvidia-smi    n/a   NVML: driver/library mismatch.",
    ]


def test_where_whose_memory_it_is_can_not_be_told_the_reason_is() -> None:
    contained = reading(own=None, others=None, holders="")
    rows = texts(memory.rows(view(started(), contained), 96, 7, NOW))
    assert "x CUDA context  n/a    o other processes  n/a" in rows[3]
    assert rows[6].endswith("all of it + other processes (n/a: processes are hidden here)")


def test_on_a_cpu_it_is_the_hosts_memory() -> None:
    host = Reading(
        time=NOW,
        card_missing="There is no NVIDIA driver here.",
        rss=2 * GIB,
        worker_count=2,
        worker_rss=GIB,
        host_total=8 * GIB,
        host_available=4 * GIB,
    )
    seen = view(started(device="cpu"), host)
    assert texts(memory.rows(seen, 64, 7, NOW)) == [
        "host memory",
        "0               2               4               6              8",
        "ppppppppppppppppwwwwwwwwoooooooo································",
        "p process 2.00  w workers 1.00  o others 1.00  · available 4.00",
        "Training on the CPU: torch keeps no allocator figures there.",
        "There is no NVIDIA driver here.",
    ]
    assert texts([memory.line(seen, 69, NOW)]) == [
        "pppppppwwwoooo·············  2.00 process  4.00 available of 8.00 GiB"
    ]


def test_before_the_first_reading_and_after_the_last() -> None:
    assert texts(memory.rows(View(), 96, 7, NOW)) == ["n/a: no reading yet"]
    stale = view(reading(time=NOW - 12))
    assert memory.note(stale, NOW) == "GiB, stale: 12 s old"
    assert {role for row in memory.rows(stale, 96, 7, NOW) for _, role in row} == {"dim"}
    assert texts([memory.line(stale, 50, NOW)])[0].startswith("stale: 12 s old")
    over = view(reading(time=NOW - 12), live=False)
    assert memory.note(over, NOW).startswith("GiB, at ")


def test_who_holds_it_is_text_from_outside() -> None:
    rows = texts(memory.rows(view(reading(holders=HOSTILE)), 96, 7, NOW))
    assert rows[6].startswith("nvidia-smi  16.00   all of it + other processes: [/data/train] [b]x ␛[31m red")


@given(any_view(), SIZES)
def test_it_fits(seen: View, size: tuple[int, int]) -> None:
    assert_fits(memory, seen, *size, NOW)
