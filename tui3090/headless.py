"""A run without a screen: plain lines, for nohup, a pipe or CI."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Iterator

from tui3090.dashboard import text
from tui3090.dashboard.view import View
from tui3090.output import plain
from tui3090.records import Changed, Evaluated, Event, Gain, Record, Refused, Resumed, Saved, Stage, Started, State
from tui3090.settings import BY_NAME, named
from tui3090.summary import progress, step_time, throughput

EVERY_S = 5.0
"""Between two lines of progress."""
WRITTEN = 120
"""Characters of what a model wrote."""


class PlainOutput:
    """Writes lines to a descriptor for as long as somebody takes them, and never waits for long."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ready = select.poll()
        self._ready.register(descriptor, select.POLLOUT)
        self._open = True

    def say(self, line: str, patience_s: float = 0.0) -> None:
        """Write `line`; it is dropped when the reader takes nothing for `patience_s`, or is gone."""
        if not self._open or not self._ready.poll(patience_s * 1000):
            return
        try:
            os.write(self._descriptor, (line + "\n").encode("utf-8", "replace"))
        except OSError:  # a closed pipe, a terminal that was hung up, a full disk: training goes on
            self._open = False


class Reporter:
    """Says in plain lines what the records of a run tell."""

    def __init__(self, view: View, every_s: float = EVERY_S) -> None:
        self._view = view
        self._every_s = every_s
        self._due = 0.0
        self._said_step = 0

    def lines(self, records: Iterable[Record]) -> Iterator[str]:
        """Take records into the view; the lines they are worth, and one of progress when it is due."""
        for record in records:
            self._view.absorb((record,))
            line = _line(record)
            if line:
                yield plain(line)
        now = time.monotonic()
        step = self._view.step
        if step is not None and step.step != self._said_step and now >= self._due:
            self._due = now + self._every_s
            self._said_step = step.step
            yield plain(_progress(self._view))


def _line(record: Record) -> str:
    """What is said of a record at once; empty: nothing."""
    match record:
        case Stage(seconds=float(seconds)):
            return f"{record.name} ready in {text.duration(seconds)}" + (f": {record.detail}" if record.detail else "")
        case Started():
            settings = f", {record.settings}" if record.settings else ""
            size = text.number(record.parameters)
            return f"training {record.model} ({size} parameters) on {record.device_name}{settings}"
        case Changed():
            title, old, new = named(record.technique, record.old, record.new)
            origin = f" ({record.origin})" if record.origin != "key" else ""
            return f"{title} {old} → {new} from step {text.number(record.step)} on{origin}"
        case Gain():
            return _brought(record)
        case Refused():
            title, value = named(record.technique, record.value)
            return f"{title} {value} can't be had: {record.reason}"
        case Evaluated():
            loss = "n/a" if record.loss is None else f"{record.loss:.4g}"
            wrote = f"  wrote {text.cut(' '.join(record.text.split()), WRITTEN)!r}" if record.text.strip() else ""
            return f"eval at step {text.number(record.step)}: loss {loss} {record.metrics}".rstrip() + wrote
        case Saved():
            return f"saved step {text.number(record.step)}: saves/{record.name} ({record.reason})"
        case Resumed():
            return f"goes on from saves/{record.name}, step {text.number(record.step)}"
        case State(state="training", detail=str(detail)) if detail:
            return detail
        case Event(source="compile", level="info"):
            return record.text
        case Event(level="warning" | "error"):
            return f"{record.level}: {record.text}"
    return ""


def _brought(gain: Gain) -> str:
    """What a change did, measured."""
    technique = BY_NAME.get(gain.technique)
    what = f"{technique.title} {technique.label(gain.new)}" if technique else f"{gain.technique} {gain.new}"
    rate = f"{text.rounded(gain.rate_before)} → {text.rounded(gain.rate_after)} {gain.unit}/s"
    throughput = f"too noisy to tell (±{text.percent(gain.noise)})" if gain.verdict == "noisy" else rate
    parts = [throughput, "" if gain.verdict == "noisy" else gain.verdict]
    if gain.peak_before is not None and gain.peak_after is not None:
        parts.append(f"peak {text.gib(gain.peak_before)} → {text.gib(gain.peak_after)} GiB")
    parts.append({"same": "loss on course", "": ""}.get(gain.loss, f"loss {gain.loss}"))
    return f"{what} from step {text.number(gain.step)}: {', '.join(part for part in parts if part)}"


def _progress(view: View) -> str:
    step, reading = view.step, view.reading
    assert step is not None
    parts = [progress(view), f"loss {step.loss:.4g} (smooth {view.loss.smooth:.4g})", step_time(view), throughput(view)]
    if step.skipped:
        parts.append(f"skipped: {step.skipped}")
    if reading is not None and reading.allocated is not None:
        parts.append(f"allocated {text.gib(reading.allocated)} GiB, peak {text.gib(reading.peak_allocated)}")
    elif reading is not None and reading.rss is not None:
        parts.append(f"memory {text.gib(reading.rss)} GiB")
    return "  ".join(part for part in parts if part)
