"""What torch says when a card's memory is full, read and explained: was it full, or in pieces?"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

FRAGMENTED = 0.2
"""Share of the reserved memory that no tensor holds, from which on it is in pieces that the request did not fit in.
Below it the card is simply full: another way of cutting the memory up would not help."""

_CONFIGURATION = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch reads the allocator's settings: every version the first, newer ones the second too."""

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class Shortage:
    """The figures of one `torch.OutOfMemoryError`, bytes."""

    tried: int
    """What was asked for."""
    allocated: int
    """What tensors held, those in the pools of CUDA graphs included."""
    unallocated: int
    """What torch had reserved besides, and could not use for this request."""

    @property
    def fragmented(self) -> bool:
        """Whether much of what torch had reserved was of no use."""
        return self.unallocated >= FRAGMENTED * (self.allocated + self.unallocated)


def parse(text: str) -> Shortage | None:
    """The figures in the message of an OutOfMemoryError of torch; None: it is not one, or has none."""
    found = [
        re.search(pattern, text)
        for pattern in (
            r"Tried to allocate ([\d.]+) (\w+)",
            r"([\d.]+) (\w+) is allocated by PyTorch",
            r"([\d.]+) (\w+) is reserved by PyTorch but unallocated",
        )
    ]
    sizes = [round(float(match[1]) * _UNITS[match[2]]) for match in found if match and match[2] in _UNITS]
    return Shortage(*sizes) if len(sizes) == len(found) else None


def explained(text: str) -> str:
    """The message of an OutOfMemoryError in a sentence, with the remedy where memory was in pieces; empty: no figures.

    The remedy is an environment variable that torch reads once, when CUDA starts.
    """
    shortage = parse(text)
    if shortage is None:
        return ""
    tried, allocated, unallocated = map(_size, (shortage.tried, shortage.allocated, shortage.unallocated))
    if not shortage.fragmented:
        return f"The request was for {tried}; tensors held {allocated}, and {unallocated} were cached."
    sentence = f"{unallocated} cached but unusable for this request of {tried}"
    if any("expandable_segments:true" in os.environ.get(name, "").lower() for name in _CONFIGURATION):
        return f"{sentence}, in spite of expandable_segments."
    return (
        f"{sentence}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for the next start (it can't be changed in "
        "a running process)."
    )


def _size(size: int) -> str:
    if size >= 1 << 30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.2f} MiB"
