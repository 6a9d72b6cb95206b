"""Loader workers: `feed` runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui3090.settings import CORES, Settings

if TYPE_CHECKING:
    from tui3090.techniques import Machine


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """More workers than twice the cores would only get in each other's way."""
    if settings.workers > 2 * CORES:
        return f"{settings.workers} loader workers are more than twice this machine's {CORES} cores."
    return None
