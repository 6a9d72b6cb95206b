"""Which cards there are, which of them CUDA will see, and which one to take. Needs no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from tui3090.meters.nvml import (
    CardMissing,
    Holder,
    ask,
    close_nvml,
    gib,
    handle_of,
    holders_of,
    memory_of,
    open_nvml,
    text,
)

WORTH_SAYING = 1 << 30
"""Bytes held by others from which a card that was passed over is named; a desktop's few MiB are not."""


@dataclass(frozen=True, slots=True)
class Card:
    """One card or MIG instance at one moment."""

    index: int
    """NVML's, by PCI address: not CUDA's."""
    uuid: str
    name: str
    total: int | None
    """Bytes."""
    free: int | None
    """Bytes."""
    holders: tuple[Holder, ...]


def cards() -> list[Card]:
    """Every card that answers, in NVML's order, whatever CUDA_VISIBLE_DEVICES says. Raises CardMissing without NVML."""
    open_nvml()
    try:
        found = []
        for index in range(ask(pynvml.nvmlDeviceGetCount) or 0):
            with suppress(CardMissing):  # lost: the others can still be used
                handle = ask(pynvml.nvmlDeviceGetHandleByIndex, index)
                if handle is not None:
                    found.append(_card(index, handle))
        return found
    finally:
        close_nvml()


def visible(found: list[Card]) -> tuple[list[Card], bool]:
    """The cards that CUDA will see, and whether they stand in its order, so that the N-th is cuda:N.

    CUDA_VISIBLE_DEVICES holds numbers, UUIDs or their beginnings; the first entry that names no card ends the list, a
    card named twice empties it. Raises CardMissing when no card is visible, and when a number
    can't be resolved without CUDA: it counts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    by_pci = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({card.name for card in found}) <= 1
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        taken, ordered = found, by_pci
    else:
        taken, ordered = _select(chosen, found, by_pci)
    if not taken:
        raise CardMissing(
            "There is no NVIDIA card here."
            if not found
            else f"CUDA_VISIBLE_DEVICES={chosen!r} hides every card: unset it to train on one."
        )
    return taken, ordered


def choose() -> tuple[Card | None, str]:
    """The visible card with most free memory, and a sentence about the cards that others hold, or why there is none.

    The UUID says which it is; its number is CUDA's to give. Without a card the sentence is never empty.
    """
    try:
        seen, ordered = visible(cards())
    except CardMissing as missing:
        return None, str(missing)
    best = max(seen, key=lambda card: card.free or 0)
    named = [f"cuda:{n}" if ordered else f"{card.name} ({card.uuid[:12]})" for n, card in enumerate(seen)]
    held = [
        f"{name}: {gib(memory)} held by {' and '.join(dict.fromkeys(h.user for h in card.holders))}"
        for name, card in zip(named, seen)
        if card is not best and (memory := sum(h.memory or 0 for h in card.holders)) >= WORTH_SAYING
    ]
    return best, f"{', '.join(held)}; taking {named[seen.index(best)]}" if held else ""


def find(device: str) -> str:
    """The UUID of `device` (cuda:N; empty: the one that `choose` takes) before torch is there. Raises CardMissing."""
    if not device:
        card, sentence = choose()
        if card is None:
            raise CardMissing(sentence)
        return card.uuid
    seen, ordered = visible(cards())
    number = int(device.partition(":")[2] or 0)
    if number >= len(seen):
        raise CardMissing(f"There is no {device}: CUDA sees {len(seen)} card{'s' if len(seen) > 1 else ''}.")
    if not ordered:
        raise CardMissing(f"Which card {device} is will be known once torch has loaded.")
    return seen[number].uuid


def _card(index: int, handle: Any) -> Card:
    memory = memory_of(handle)
    return Card(
        index=index,
        uuid=text(ask(pynvml.nvmlDeviceGetUUID, handle) or ""),
        name=text(ask(pynvml.nvmlDeviceGetName, handle) or "NVIDIA card"),
        total=memory.total if memory else None,
        free=memory.free if memory else None,
        holders=holders_of(handle) or (),
    )


def _select(chosen: str, found: list[Card], by_pci: bool) -> tuple[list[Card], bool]:
    """The cards that the value of CUDA_VISIBLE_DEVICES names, and whether in CUDA's order. Raises CardMissing."""
    entries = [entry.strip() for entry in chosen.split(",")]
    numbers = [int(entry) for entry in entries if entry.isdecimal()]
    if numbers and not by_pci:
        if len(numbers) == len(entries) and sorted(numbers) == list(range(len(found))):
            return found, False
        raise CardMissing(f"Which card CUDA_VISIBLE_DEVICES={chosen!r} means will be known once torch has loaded.")
    taken: list[Card] = []
    for entry in entries:
        card = _named(entry, found)
        if card is None:
            break
        if card in taken:
            return [], True
        taken.append(card)
    return taken, True


def _named(entry: str, found: list[Card]) -> Card | None:
    if entry.isdecimal():
        return found[int(entry)] if int(entry) < len(found) else None
    if entry.startswith("MIG-"):
        return _mig(entry)
    matching = [card for card in found if entry.startswith("GPU-") and card.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _mig(uuid: str) -> Card | None:
    """A MIG instance: it stands in no list of cards, but NVML finds it by its UUID."""
    open_nvml()
    try:
        handle = handle_of(uuid)
        parent = ask(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        index = ask(pynvml.nvmlDeviceGetIndex, parent) if parent is not None else None
        return _card(index or 0, handle)
    except CardMissing:
        return None
    finally:
        close_nvml()
