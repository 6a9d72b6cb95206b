"""What the dashboard asks of the trainer. Neutral: it imports neither torch nor textual."""

from __future__ import annotations

from dataclasses import dataclass

from tui3090.settings import Value


@dataclass(frozen=True, slots=True)
class Change:
    """Set a technique at the next window's start; a later one for the same technique takes its place."""

    technique: str
    value: Value


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Forget a change of this technique that has not come into force."""

    technique: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause at the window's end, or go on."""

    on: bool


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate at the window's end."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Read by the profiler, with one window, which kernels run and whether they use the Tensor Cores."""


@dataclass(frozen=True, slots=True)
class MeasureActivations:
    """Measure, with one window, what each layer keeps for backward."""


@dataclass(frozen=True, slots=True)
class MakeSave:
    """Save at the window's end."""


@dataclass(frozen=True, slots=True)
class GoBack:
    """Go back to the last good save."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop at the window's end; `now`: between two micro-batches, the window is abandoned."""

    now: bool = False


Command = Change | Withdraw | Pause | Evaluate | Profile | MeasureActivations | MakeSave | GoBack | Stop
