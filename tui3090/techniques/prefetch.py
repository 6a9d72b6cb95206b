"""Prefetch to the device: `feed` copies ahead on a side stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui3090.settings import Settings

if TYPE_CHECKING:
    from tui3090.techniques import Machine


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """There is nowhere to copy ahead to on the CPU."""
    if settings.prefetch and not machine.cuda:
        return "Prefetch needs an NVIDIA card to copy to, and training runs on the CPU."
    return None
