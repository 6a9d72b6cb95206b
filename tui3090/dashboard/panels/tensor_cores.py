"""How much of the card's arithmetic training gets: by counted FLOPs, hardware counters, and the kernels that run."""

from __future__ import annotations

from dataclasses import dataclass

from tui3090.dashboard.figures import PROFILE_OLD_S, SHORT_DTYPES, age, beside, shown, steps_note, steps_stale, wrapped
from tui3090.dashboard.text import UNKNOWN, Row, clean, clock, cut, duration, number, percent, rounded, row_width
from tui3090.dashboard.view import View
from tui3090.recent import busy_share
from tui3090.records import Reading

TITLE = "Tensor Cores"

MASK_PADDING = "A vocabulary padded to a multiple of 8: mask the padding's logits in the loss; labels stay as they are."
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
    """Achieved FLOPs, counters, the kernels of a profiled step, what could use the Tensor Cores and does not."""
    achieved = shown(_achieved(view), width, height, steps_stale(view, now))
    counters = _counters(view, now, width)
    counted = view.reading is not None and view.reading.tensor_core is not None
    others = [counters] if counted else []
    others += [_profiled(view, width, now), *_beside(view, width), *_missed(view, width)]
    others += [] if counted else [counters]
    others += [*_units(view, now, width), _precision(view)]
    if len(achieved) + len(others) < height:
        others += _more(view, width)
    return [*achieved, *shown(others, width, height - len(achieved))]


def line(view: View, width: int, now: float) -> Row:
    """Achieved FLOPs, and the best source there is for the Tensor Cores: counters, else the profiled step."""
    counted = view.reading is not None and view.reading.tensor_core is not None
    profiled = view.profiled is not None and view.profiled.tensor_core_share is not None
    if profiled and not counted:
        return shown([beside([_achieved(view, brief=True)[0], _profiled(view, 0, now)], width)], width, 1)[0]
    achieved = _achieved(view, brief=counted)[0]
    return shown([beside([achieved, _counters(view, now, width - row_width(achieved) - 3)], width)], width, 1)[0]


def _rate(view: View) -> _Rate | None:
    """Over the windows whose FLOPs were counted; None where there is none."""
    recent = view.recent
    uncounted = [step for step in recent if step.uncounted] if recent.total("uncounted") else []
    seconds = recent.total("seconds") - sum(step.seconds * step.steps for step in uncounted)
    if len(uncounted) == len(recent) or not seconds > 0:
        return None
    hardware = None if recent.total("unexecuted") else recent.total("hardware_flops") / seconds
    return _Rate(recent.total("flops") / seconds, hardware, recent[-1].peak_flops_s)


def _achieved(view: View, brief: bool = False) -> list[Row]:
    rate = _rate(view)
    if rate is None:
        if view.recent and view.recent[-1].micro_batches:
            why = "not counted for this batch shape"
        else:
            why = "no step since the change" if view.step and not view.recent else "not counted yet"
        return [[(f"TFLOPS {UNKNOWN}: {why}", "plain")]]
    same = rate.hardware is not None and abs(rate.hardware - rate.model) <= SAME * rate.model
    achieved: Row = [(_flops(rate.model), "bold")]
    if rate.peak:
        peak = f"{rate.peak / 1e12:.4g}"
        achieved += [
            (f" = {percent(rate.model / rate.peak, 1)}", "bold"),
            (f" of {peak}" if brief else f" of the card's {peak} (MFU{' = HFU' if same else ''})", "plain"),
        ]
    else:
        achieved.append((f"   MFU {UNKNOWN}: {_no_peak(view)}", "plain"))
    if rate.hardware is None or same:
        return [achieved]
    # fused attention computes its scores a second time whatever the technique
    again = "recomputation" if view.value("checkpointing") else "attention recomputed"
    executed = f"with {again} {_flops(rate.hardware)}"
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


def _counters(view: View, now: float, width: int) -> Row:
    """The hardware counters' reading, with its source and age."""
    reading = view.reading
    if reading is None:
        return [(f"counters {UNKNOWN}: no reading yet", "dim")]
    source = cut(clean(reading.tensor_core_source), 120)
    if reading.tensor_core is None:
        return [(f"counters {UNKNOWN}: {source or _no_counters(view, reading)}", "dim")]
    old = age(view, reading.time if reading.tensor_core_time is None else reading.tensor_core_time, now)
    share = f"busy {percent(reading.tensor_core)}"
    told: Row = [(f" ({source or 'counters'}, {old})", "dim")]
    role = "dim" if old.startswith("stale") else "bold"
    full: Row = [(f"Tensor Cores {share}", role), *told]
    return full if row_width(full) <= width else [(f"TC {share}", role), *told]


def _no_counters(view: View, reading: Reading) -> str:
    """Why there are no counters where the source does not say it."""
    if view.started is not None and view.started.device == "cpu":
        return "needs an NVIDIA card"
    return cut(clean(reading.card_missing), 120) or "this machine gives none"


def _profiled(view: View, width: int, now: float) -> Row:
    """The share of kernel time in Tensor Core kernels, with its age; before there is one why."""
    found = view.profiled
    if found is None:
        if view.started is not None and view.started.device == "cpu":
            why = "needs an NVIDIA card"
        else:
            why = f"none profiled{' since the change' if view.changes else '' if view.over else ' yet'}"
            why += "" if view.over else ", r reads now"
        return [(f"kernels {UNKNOWN}: {why}", "dim")]
    if found.tensor_core_share is None:
        return [(f"kernels {UNKNOWN}: {cut(clean(found.missing), 120) or 'none was seen'}", "dim")]
    when = f"{duration(max(0.0, now - found.time))} ago"
    if view.over or not view.live:
        when = f"at {clock(found.time, seconds=True)}"
    role = "dim" if when.endswith("ago") and now - found.time > PROFILE_OLD_S else "bold"
    share = percent(found.tensor_core_share)
    source = (f" (profile, {when})", "dim")
    for words in (f"{share} of kernel time in Tensor Core kernels", f"{share} of kernel time in TC kernels"):
        if row_width([(words, role), source]) <= width:
            return [(words, role), source]
    return [(f"TC kernels {share}", role), source]


def _beside(view: View, width: int) -> list[Row]:
    """The longest kernels that do not use them, and the share whose names don't tell."""
    found = view.profiled
    if found is None or not (found.without or found.unknown_share):
        return []
    unknown: Row = [(f"unknown {percent(found.unknown_share)}", "plain")] if found.unknown_share else []
    without = _as_many("without: ", found.without, width - row_width(unknown) - 3 if unknown else width)
    return [beside([without, unknown], width)]


def _missed(view: View, width: int) -> list[Row]:
    """What could use them and does not: matmuls in fp32, dimensions that 8 does not divide."""
    found = view.profiled
    if found is None:
        return []
    fp32: Row = [(f"fp32 matmuls {percent(found.fp32_share)}", "warn")] if (found.fp32_share or 0) >= 0.005 else []
    off = _as_many("not by 8: ", found.off_by_8, width - row_width(fp32) - 3 if fp32 else width)
    return [beside([fp32, off], width)] if fp32 or off else []


def _as_many(words: str, names: str, cells: int) -> Row:
    """As many of the names as fit whole, one at the least."""
    if not names:
        return []
    first, *others = clean(names[:2000]).split(", ")
    told = cut(words + first, max(cells, 12))
    for name in others:
        if row_width([(told + name, "")]) + 2 > cells:
            break
        told += ", " + name
    return [(told, "plain")]


def _more(view: View, width: int) -> list[Row]:
    """For the whole screen: the lists in full."""
    found = view.profiled
    if found is None or found.tensor_core_share is None:
        return []
    lists = (
        ("on the Tensor Cores", found.with_tensor_cores),
        ("without", found.without),
        ("unknown (Triton's and others whose names don't tell)", found.unknown),
        ("layers with a dimension that 8 does not divide", found.off_by_8),
    )
    told: list[Row] = [[]]
    for words, names in lists:
        told += [[(text, "plain")] for text in wrapped(f"{words}: {names}", width)] if names else []
    if found.off_by_8:
        told += [[(text, "dim")] for text in wrapped(MASK_PADDING, width)]
    ran = f"{number(found.kernels)} kernels of step {number(found.step)}{', by replay,' if found.replayed else ''}"
    took = f"{rounded(1e3 * found.kernel_s)} ms, {percent(busy_share(found, view.recent))} of a step's time"
    told.append([(f"{ran} took {took}; the rest is gaps between launches", "plain")])
    told.append([(f"the look cost {rounded(1e3 * found.seconds)} ms; the next comes by itself, or with r", "dim")])
    return told


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
    words, the = f"matmuls in {clean(view.step.precision)}", "the "
    weights = clean(view.started.weights_dtype) if view.started is not None else ""
    if weights and (weights != "float32" or view.value("amp") != "off"):  # by autocast, or because the weights are
        words, the = f"{clean(view.step.precision)} matmuls, {SHORT_DTYPES.get(weights, weights)} weights", ""
    if view.started is not None and view.started.device == "cpu":
        return [(f"{words} on a CPU: no Tensor Cores", "dim")]
    if view.step.precision == "fp32":
        return [(f"{words}: {the}Tensor Cores don't take them", "warn")]
    return [(f"{words}: {the}Tensor Cores can take them", "plain")]
