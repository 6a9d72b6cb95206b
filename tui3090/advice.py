"""What to try next: at most three pieces of advice from a run's own figures, each with its reason, the key to press
and, where it can be computed, the gain to expect.

Each rule is a function of `Facts`. It gives nothing where the machine can't follow, nor what this run has measured to
be no gain. A gain 'up to' or 'at most' is a bound that the figures give, no promise.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tui3090.facts import Facts
from tui3090.meters.peaks import peak
from tui3090.recent import busy_share
from tui3090.settings import BY_NAME, CORES

MOST = 3
GIB = 1 << 30

STARVED = 0.05
"""Data stall from which on the loader is spoken of."""
IDLE, SHORT_S = 0.85, 0.1
"""Launch-bound: a kernel runs for less than this share of the time, and micro-batches are shorter than this."""
FULL, HALF, ROOM = 0.92, 0.6, 0.9
"""Shares of the memory: nearly full; half empty; what a bigger batch may fill."""
WORTH = 1.5
"""How many times the batch must fit to be spoken of."""
OVERFLOWING, SCALE_FOUND = 0.05, 20
"""Share of windows lost to fp16's range; the first windows, in which the scaler finds its scale, are left out."""
SLOW, SLOW_PACES = 0.85, 5
"""Throughput over the run's own median, for so many paces in a row."""
CLOCK = 0.92
"""Clock over its maximum."""
PADDED = 0.3
OTHERS = GIB


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to try."""

    key: str
    """To press; empty: it is for the next start, or not in the dashboard's power."""
    what: str
    reason: str
    gain: str = ""
    """What to expect; empty: it can't be computed."""
    weight: float = 0.0
    """By which advice is ordered: the share of time to win, above 5 where training itself is in danger."""


def advise(facts: Facts) -> list[Advice]:
    """The weightiest pieces of advice, at most three."""
    found = [advice for rule in RULES if (advice := rule(facts)) is not None]
    return sorted(found, key=lambda advice: -advice.weight)[:MOST]


def unmoved(facts: Facts) -> Advice | None:
    """bf16 weights whose updates round away."""
    if not facts.unmoved:
        return None
    return Advice(
        "",
        "float32 weights and --amp bf16: next start",
        "bf16 weights don't move, their updates round away: load the model with dtype=torch.float32",
        weight=9,
    )


def overflowing(facts: Facts) -> Advice | None:
    """fp16's loss scaler skips more than now and then."""
    recent = list(facts.windows)[-min(100, max(0, facts.count - SCALE_FOUND)) :]
    if facts.settings.amp != "fp16" or facts.count < SCALE_FOUND + 40:
        return None
    lost = sum(window.skipped == "overflow" for window in recent) / len(recent)
    if lost < OVERFLOWING:
        return None
    reason = f"the loss scaler skipped {_percent(lost)} of the last {len(recent)} steps"
    if _bf16(facts):
        return Advice("A", "AMP bf16: fp32's range, no scaler", reason, _won(lost), 8)
    key = "[" if facts.settings.lr > min(float(v) for v in BY_NAME["lr"].values) else ""  # else it is at its lowest
    what = "lower the learning rate" + ("" if key else ": next start")
    return Advice(key, what, f"{reason}; bf16 is not for this card", weight=8)


def memory_full(facts: Facts) -> Advice | None:
    """The card is nearly full, or the allocator had to give its cache back to go on."""
    memory = _memory(facts)
    if memory is None:
        return None
    retries = max(0, (facts.reading.retries or 0) - facts.retries) if facts.reading else 0
    if memory.taken < FULL * memory.total and not retries:
        return None
    reason = f"memory is nearly full: {_gib(memory.taken)} of {_gib(memory.total)} GiB"
    if retries:
        reason = f"the allocator ran out {retries} times and gave its cache back"
    frees = f"frees at most {_gib(memory.activations)} GiB" if memory.activations else ""
    if facts.settings.checkpointing == 0 and facts.can("checkpointing"):
        return Advice("c", "activation checkpointing", reason, frees, 7)
    if facts.settings.amp == "off" and facts.can("amp"):
        return Advice(*_amp(facts), reason, "", 7)
    if not facts.settings.offload and facts.can("offload"):
        return Advice("o", "activation offload to the host's memory", reason, "", 7)
    return Advice("", "half the batch, twice the accumulation: next start", reason, "", 7)


def room(facts: Facts) -> Advice | None:
    """The memory is half empty: the batch that fits, from the activations that a sample takes."""
    memory = _memory(facts)
    if memory is None or not memory.activations or facts.settings.checkpointing or not facts.steady:
        return None
    batch = max((math.ceil(w.samples / w.micro_batches) for w in facts.windows if w.micro_batches), default=0)
    if not batch or memory.taken > HALF * memory.total or facts.settings.graph:
        return None
    each, fixed = memory.activations / batch, memory.taken - memory.activations
    fits = int((ROOM * memory.total - fixed) / each)
    fits -= fits % 8 if fits >= 8 else 0
    rows = facts.started.rows if facts.started is not None else None
    fits = fits if rows is None else min(fits, rows)  # there are no more to put into a batch
    if fits < WORTH * batch:
        return None
    reason = f"estimated: {_gib(memory.total - memory.taken)} GiB are free, a sample takes {_gib(each)}"
    micro_batches = facts.settings.accumulate
    times = max(k for k in range(1, micro_batches + 1) if micro_batches % k == 0 and k * batch <= fits)
    what, weight = f"batch {fits} fits: next start", 0.1
    if times > 1:  # the same samples a step, in fewer launches
        fits, weight = batch * times, 0.12
        what = f"batch {fits}, accumulate {micro_batches // times}: next start"
        reason += "; the samples of a step stay the same"
    return Advice("", what, reason, f"{_gib(fixed + fits * each)} of {_gib(memory.total)} GiB", weight)


def without_checkpointing(facts: Facts) -> Advice | None:
    """Checkpointing is on, and this run has seen that it fits without."""
    memory, on = _memory(facts), facts.settings.checkpointing
    if memory is None or not on or not facts.steady or facts.tried("checkpointing", 0):
        return None
    peaks = [gain.peak_before for gain in facts.gains if gain.technique == "checkpointing" and gain.old == 0]
    without = peaks[-1] if peaks else None
    if without is None or memory.outside + without > ROOM * memory.total:
        return None
    last = facts.windows[-1]
    extra = last.hardware_flops / last.flops - 1 if last.flops and last.hardware_flops else 0.0
    reason = f"it fits without: {_gib(memory.outside + without)} of {_gib(memory.total)} GiB"
    gain = f"up to +{_percent(extra)}" if extra > 0 else ""
    return Advice("C" if on == 2 else "c", "checkpointing off", reason, gain, max(extra, 0.1))


def starved(facts: Facts) -> Advice | None:
    """The device waits for the loader."""
    stall = facts.share("stall_s") if facts.steady else 0.0
    if stall < STARVED:
        return None
    workers, wait = facts.settings.workers, facts.share("wait_s")
    weight = min(4.0, stall / max(0.2, 1 - stall))
    # without workers the wait is the whole loading: so many processes load as fast as the rest of a step takes
    needed = math.ceil(wait / max(0.05, 1 - wait)) if workers == 0 else workers + 1
    offered = [value for value in BY_NAME["workers"].values if isinstance(value, int) and value > workers]
    value = next((v for v in offered if v >= needed), offered[-1] if offered else 0)
    reason = f"the loader starves it {_percent(stall)} of the time, with {workers} workers"
    if value and value <= CORES and facts.can("workers") and not facts.tried("workers", value):
        least = wait / value if workers == 0 else workers / value  # what loading still takes
        gain = _won(min(stall, 1 - least), "up to ")
        return Advice("w", f"{value} loader worker{'s' if value > 1 else ''}", reason, gain, weight)
    gain = _won(stall, "up to ")
    if facts.cuda and facts.settings.prefetch == 0 and facts.can("prefetch") and not facts.tried("prefetch", 2):
        return Advice("p", "prefetch to the card", reason, gain, weight)
    return Advice("", "cheaper samples: prepare or cache them", reason, gain, weight)


def launch_bound(facts: Facts) -> Advice | None:
    """The card idles between many small kernels."""
    if not _launch_bound(facts):
        return None
    busy = _busy(facts) or 1.0
    reason = f"a kernel runs {_percent(busy)} of the time, and no data is waited for: launching is the limit"
    weight = min(4.0, 1 / max(busy, 0.05) - 1)
    if facts.can("graph") and not facts.tried("graph", True):
        return Advice("g", "CUDA graph replay", reason, f"up to × {1 / max(busy, 0.05):.1f}", weight)
    if facts.can("compile") and not facts.settings.compile and not facts.tried("compile", True):
        return Advice("k", "torch.compile: fewer kernels", reason, "", weight)
    return None


def fp32_matmuls(facts: Facts) -> Advice | None:
    """Matmuls in fp32 or TF32 while 16 bits would do."""
    if not _in_fp32(facts) or not facts.can("amp") or _launch_bound(facts):
        return None
    key, what = _amp(facts)
    value = "bf16" if _bf16(facts) else "fp16"
    if facts.tried("amp", value):
        return None
    now = facts.windows[-1].precision
    times = _times(facts, now, value)
    gain = f"at most × {times:.1f}" if times else ""
    reason = f"matmuls run in {'TF32' if now == 'tf32' else now}"
    reason += ", beside the Tensor Cores" if now == "fp32" else ""
    return Advice(key, what, reason, gain, 0.5 * ((times or 1.6) - 1))


def tf32_off(facts: Facts) -> Advice | None:
    """fp32 matmuls without the Tensor Cores."""
    if not _in_fp32(facts) or facts.windows[-1].precision != "fp32" or _launch_bound(facts):
        return None
    if not facts.can("tf32") or facts.settings.tf32 or facts.tried("tf32", True):
        return None
    times = _times(facts, "fp32", "tf32")
    gain = f"at most × {times:.1f}" if times and times > 1.05 else ""
    reason = "matmuls run in fp32; TF32 keeps its range, with 10 bits of mantissa"
    return Advice("t", "TF32", reason, gain, 0.4 * ((times or 1.3) - 1) + 0.01)


def off_by_8(facts: Facts) -> Advice | None:
    """Layers that the last look at the kernels found to be of a size that Tensor Cores take badly."""
    if facts.profiled is None or not facts.profiled.off_by_8:
        return None
    reason = f"not divisible by 8: {facts.profiled.off_by_8}"
    return Advice("", "pad to multiples of 8, mask padded logits", reason, "", 0.08)


def slower_than_before(facts: Facts) -> Advice | None:
    """Throughput is below this run's own median under the same settings."""
    paces = list(facts.paces)
    if len(paces) < 4 * SLOW_PACES:
        return None
    usual = statistics.median(pace.rate for pace in paces)
    recent = paces[-SLOW_PACES:]
    if usual <= 0 or max(pace.rate for pace in recent) >= SLOW * usual:
        return None
    share = statistics.median(pace.rate for pace in recent) / usual
    stalled = statistics.median(pace.stall for pace in recent) - statistics.median(pace.stall for pace in paces)
    key, what = ("6", "look at clock, heat and others") if facts.cuda else ("2", "see what else runs on this machine")
    if stalled > 0.05:
        key, what = "2", "the loader became slower"
    reason = f"throughput is {_percent(1 - share)} below this run's own median"
    return Advice(key, what, reason, _won(1 - share), 1 - share)


def held_back(facts: Facts) -> Advice | None:
    """Power or heat holds the clock back."""
    recent = list(facts.readings)[-20:]
    clock, most = facts.median("clock_mhz"), facts.median("clock_max_mhz")
    if len(recent) < 8 or not clock or not most or clock >= CLOCK * most:
        return None
    for cause in ("heat", "power"):
        if sum(cause in reading.held_back for reading in recent) >= 0.7 * len(recent):
            break
    else:
        return None
    loss = f"{cause} holds the clock back {_percent(1 - clock / most)}"
    hottest = max((reading.temperature_c or 0 for reading in recent), default=0)
    what = "more air: fans, dust, case" if cause == "heat" else "a higher power limit, if it has one: ask the admin"
    reason = f"{loss}, at {hottest:.0f} °C" if cause == "heat" else loss
    return Advice("", what, reason, f"at most +{_percent(most / clock - 1)}", 0.5 * (most / clock - 1))


def padding(facts: Facts) -> Advice | None:
    """Much of what runs is padding."""
    padded = sum(window.padding for window in facts.windows)
    tokens = sum(window.tokens for window in facts.windows)
    share = padded / (padded + tokens) if padded + tokens else 0.0
    if share < PADDED or not facts.steady:
        return None
    reason = f"{_percent(share)} of the tokens are padding"
    return Advice("", "sort by length or pack: next start", reason, _won(share, "at most "), share)


def others(facts: Facts) -> Advice | None:
    """Somebody else holds much of the card."""
    reading, memory = facts.reading, _memory(facts)
    if not facts.cuda or reading is None or (reading.others or 0) < OTHERS:
        return None
    full = memory is not None and memory.taken >= FULL * memory.total
    holders = f" ({reading.holders})" if reading.holders else ""
    reason = f"others hold {_gib(reading.others or 0)} GiB of this one{holders}"
    what = "ask who holds the card, or end it"
    if facts.started is not None and (facts.started.cards or 0) > 1:
        what, reason = "another card: --device, next start", f"{reason}; tui3090 doctor lists the cards"
    return Advice("", what, reason, "", 6 if full else 0.05)


RULES: tuple[Callable[[Facts], Advice | None], ...] = (
    unmoved,
    overflowing,
    memory_full,
    starved,
    launch_bound,
    fp32_matmuls,
    tf32_off,
    room,
    without_checkpointing,
    off_by_8,
    slower_than_before,
    held_back,
    padding,
    others,
)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes at the peak since the last change."""

    total: float
    """What there is for us: the card's, or torch's cap and what lies outside of it."""
    taken: float
    """By everybody."""
    outside: float
    """Not torch's: the CUDA context, other processes."""
    activations: float
    """0: not known."""


def _memory(facts: Facts) -> _Memory | None:
    """None on a CPU, and where the allocator's or the card's figures are missing."""
    reading, started = facts.reading, facts.started
    if not facts.cuda or started is None or reading is None or not facts.windows:
        return None
    if reading.peak_allocated is None or reading.reserved is None:
        return None
    outside = max(0, (reading.card_used or 0) - reading.reserved)
    total = started.memory
    if started.memory_cap is not None:
        total = min(total, started.memory_cap + outside)
    # under replay activations lie in the graphs' pools, which are reserved but no tensor's
    peak_of_steps = reading.peak_allocated if reading.peak_steady is None else reading.peak_steady
    highest = reading.reserved if facts.settings.graph else peak_of_steps
    held = (reading.weights, reading.gradients, reading.optimizer_state)
    known = sum(size or 0 for size in held) if None not in held else highest
    return _Memory(total, outside + highest, outside, max(0, highest - known))


def _busy(facts: Facts) -> float | None:
    """The share of the time in which a kernel ran: by the profiler where it has looked, else by NVML."""
    seen = busy_share(facts.profiled, facts.windows) if facts.profiled is not None else None
    return seen if seen is not None else facts.median("util")


def _launch_bound(facts: Facts) -> bool:
    if not facts.cuda or not facts.steady or facts.settings.graph:
        return False
    busy = _busy(facts)
    short = facts.step_s / max(1, facts.settings.accumulate) < SHORT_S
    return busy is not None and busy < IDLE and short and facts.share("stall_s") < STARVED


def _in_fp32(facts: Facts) -> bool:
    """Whether fp32 weights are multiplied in 32 bits on a card."""
    if not facts.cuda or not facts.steady or facts.started is None or facts.settings.amp != "off":
        return False
    return facts.started.weights_dtype == "float32" and facts.windows[-1].precision in ("fp32", "tf32")


def _bf16(facts: Facts) -> bool:
    """Whether the card has bf16: it came with TF32."""
    return facts.settings.tf32 or facts.can("tf32") or facts.settings.amp == "bf16"


def _amp(facts: Facts) -> tuple[str, str]:
    """Key and words that switch AMP on."""
    return ("a", "AMP bf16") if _bf16(facts) else ("A", "AMP fp16 (this card has no bf16)")


def _times(facts: Facts, now: str, then: str) -> float | None:
    """How much faster a step is at most: its matmuls by the ratio of the card's peaks, and only they where the profiler
    has seen their share of the time. None where the peaks are not known."""
    name = facts.started.device_name if facts.started is not None else ""
    before, after = peak(name, now), peak(name, then)
    if not before or not after:
        return None
    seen = facts.profiled.fp32_share if facts.profiled is not None else None
    share = seen if seen is not None and now == "fp32" else 1.0
    return 1 / (1 - share + share * before / after)


def _won(share: float, bound: str = "") -> str:
    """How much faster it is without a share of the time; empty where that was all of it."""
    return f"{bound}+{_percent(share / (1 - share))}" if share < 1 else ""


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 10 else f"{size / GIB:.2f}"
