"""How much of the card's arithmetic training gets, by counted FLOPs and by hardware counters."""

from __future__ import annotations

from dataclasses import dataclass

from tui3090.dashboard.figures import age, beside, shown, steps_note, steps_stale
from tui3090.dashboard.text import UNKNOWN, Row, clean, cut, percent, rounded
from tui3090.dashboard.view import View

TITLE = "Tensor Cores"

_PROFILED = "profiled kernels: not in this version (r)"
SAME = 0.005
"""MFU and HFU that differ by less than this share are shown as one."""


@dataclass(frozen=True, slots=True)
class _Rate:
    """FLOPs per second since the last change."""

    model: float
    """Recomputation left out."""
    hardware: float | None
    """As executed."""
    peak: float | None
    """The card's dense peak for the precision in force."""


def note(view: View, now: float) -> str:
    """What the figures are the mean of, and how old they are."""
    return steps_note(view, now)


def rows(view: View, width: int, height: int, now: float) -> list[Row]:
    """Achieved FLOPs, the counters, what the matmuls run in."""
    achieved = shown(_achieved(view), width, height, steps_stale(view, now))
    others = [_counters(view, now), *_units(view, now, width), _precision(view), [(_PROFILED, "dim")]]
    return [*achieved, *shown(others, width, height - len(achieved))]


def line(view: View, width: int, now: float) -> Row:
    """Achieved FLOPs and the counters."""
    return shown([beside([_achieved(view)[0], _counters(view, now)], width)], width, 1)[0]


def _rate(view: View) -> _Rate | None:
    """Over the windows whose FLOPs were counted; None where there is none."""
    model = hardware = seconds = 0.0
    executed = True
    for step in view.recent:
        if step.flops is None:
            continue
        model += step.flops * step.steps
        hardware += (step.hardware_flops or 0.0) * step.steps
        executed = executed and step.hardware_flops is not None
        seconds += step.seconds * step.steps
    if seconds <= 0:
        return None
    return _Rate(model / seconds, hardware / seconds if executed else None, view.recent[-1].peak_flops_s)


def _achieved(view: View) -> list[Row]:
    rate = _rate(view)
    if rate is None:
        why = "no step since the change" if view.step and not view.recent else "not counted yet"
        return [[(f"TFLOPS {UNKNOWN}: {why}", "plain")]]
    same = rate.hardware is not None and abs(rate.hardware - rate.model) <= SAME * rate.model
    achieved: Row = [(_flops(rate.model), "bold")]
    if rate.peak:
        achieved += [
            (f" = {percent(rate.model / rate.peak, 1)}", "bold"),
            (f" of the card's {rate.peak / 1e12:.4g} (MFU{' = HFU' if same else ''})", "plain"),
        ]
    else:
        achieved.append((f"   MFU {UNKNOWN}: {_no_peak(view)}", "plain"))
    if rate.hardware is None or same:
        return [achieved]
    executed = f"with recomputation {_flops(rate.hardware)}"
    if rate.peak:
        executed += f" = {percent(rate.hardware / rate.peak, 1)} (HFU)"
    return [achieved, [(executed, "plain")]]


def _flops(per_second: float) -> str:
    """`33.3 TFLOPS`; below a tenth in GFLOPS."""
    return f"{rounded(per_second / 1e12)} TFLOPS" if per_second >= 1e11 else f"{rounded(per_second / 1e9)} GFLOPS"


def _no_peak(view: View) -> str:
    if view.started is not None and view.started.device == "cpu":
        return "a CPU's peak is not known"
    return "this card's peak is not known"


def _counters(view: View, now: float) -> Row:
    """The hardware counters' reading, with its source and age."""
    reading = view.reading
    if reading is None:
        return [(f"counters {UNKNOWN}: no reading yet", "dim")]
    source = cut(clean(reading.tensor_core_source), 120)
    if reading.tensor_core is None:
        return [(f"counters {UNKNOWN}: {source or 'this machine gives none'}", "dim")]
    old = age(view, reading.time if reading.tensor_core_time is None else reading.tensor_core_time, now)
    busy = f"Tensor Cores busy {percent(reading.tensor_core)}"
    return [(busy, "dim" if old.startswith("stale") else "bold"), (f" ({source or 'counters'}, {old})", "dim")]


def _units(view: View, now: float, width: int) -> list[Row]:
    """How busy multiprocessors and memory are, where the counters tell."""
    reading = view.reading
    if reading is None or (reading.sm_util is None and reading.dram_util is None):
        return []
    role = "dim" if age(view, reading.time, now).startswith("stale") else "plain"
    sms, memory = f"SMs busy {percent(reading.sm_util)}", f"memory bandwidth {percent(reading.dram_util)}"
    return [beside([[(sms, role)], [(memory, role)]], width)]


def _precision(view: View) -> Row:
    if view.step is None:
        return [(f"precision {UNKNOWN}: no step so far", "dim")]
    if view.started is not None and view.started.device == "cpu":
        return [(f"matmuls in {clean(view.step.precision)} on a CPU: no Tensor Cores", "dim")]
    if view.step.precision == "fp32":
        return [("matmuls in fp32: the Tensor Cores don't take them", "warn")]
    return [(f"matmuls in {clean(view.step.precision)}: the Tensor Cores can take them", "plain")]
