"""Gradient accumulation: `feed` gathers K micro-batches into a window, `step` weighs them; available everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui3090.settings import Settings

if TYPE_CHECKING:
    from tui3090.techniques import Machine


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """Nothing stands in its way."""
    return None
