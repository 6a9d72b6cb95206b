"""What a batch will take, from what small ones took.

A step's peak is not linear in the batch: while forward runs there are no gradients yet, at the end of backward there
are all gradients and hardly any activations, and which of the two is the peak depends on the batch. But what is
allocated while one operator runs is linear: something fixed and so much a sample. So the steps of two small batches are
measured operator by operator, each is extended by a straight line, and the highest is the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Point:
    """A batch that was measured."""

    elements: float
    """Numbers in its tensors."""
    peaks: tuple[int, ...]
    """Bytes, of each stretch of the step in order: each operator."""
    gradients: tuple[int, ...] = ()
    """Bytes of the gradients that there were in each stretch; empty: not known."""

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Point:
        """Of what `dataclasses.asdict` and JSON made of it."""
        return cls(told["elements"], tuple(told["peaks"]), tuple(told["gradients"]))


def predict(points: Sequence[Point], elements: float, gradients_kept: bool = False) -> int | None:
    """Bytes at the peak of a batch with so many elements; None: fewer than two different batches were measured.

    `gradients_kept`: all gradients are there all the time, as under graph replay, which knows their addresses.
    """
    ordered = sorted(points, key=lambda point: point.elements)
    if len(ordered) < 2 or ordered[-2].elements == ordered[-1].elements:
        return None
    small, big = ordered[-2:]
    if len(small.peaks) != len(big.peaks):  # the batches took different ways through the model
        small, big = (Point(point.elements, (max(point.peaks),)) for point in (small, big))
    further = (elements - big.elements) / (big.elements - small.elements)
    missing = [0] * len(big.peaks)
    if gradients_kept and big.gradients:
        missing = [max(big.gradients) - there for there in big.gradients]
    return round(max(b + (b - a) * further + more for a, b, more in zip(small.peaks, big.peaks, missing)))
