"""What torch's message says when the card's memory is full, in a sentence with what it means."""

from __future__ import annotations

import re

SCATTERED = 0.2
"""Share of what torch took that no tensor holds, from which on its being in pieces is the trouble."""

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"


def explain(message: str) -> str:
    """Why a request failed; empty: the message is not one of torch's allocator, or says no figures."""
    wanted = _size(rf"Tried to allocate {_SIZE}", message)
    free = _size(rf"of which {_SIZE} is free", message)
    allocated = _size(rf"{_SIZE} is allocated by PyTorch", message)
    cached = _size(rf"{_SIZE} is reserved by PyTorch but unallocated", message)
    if wanted is None or free is None or allocated is None or cached is None:
        return ""
    parts = [f"{_text(wanted)} were asked for and {_text(free)} free", f"tensors hold {_text(allocated)}"]
    if graphs := _size(rf"with {_SIZE} allocated in private pools", message):
        parts.append(f"{_text(graphs)} of it in captured graphs")
    if others := sum(_bytes(*found) for found in re.findall(rf"Process \d+ has {_SIZE} memory in use", message)):
        parts.append(f"other processes {_text(others)}")
    sentence = ", ".join(parts)
    if cached < SCATTERED * (allocated + cached):
        return f"Memory is full: {sentence}."
    return (
        f"Memory is in pieces: {sentence}, and {_text(cached)} are cached but unusable for this request. Start the "
        "next run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which joins such pieces (a running process "
        "can't change it), or give samples fewer different lengths."
    )


def _size(pattern: str, message: str) -> float | None:
    found = re.search(pattern, message)
    return _bytes(*found.groups()) if found else None


def _bytes(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit]


def _text(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
