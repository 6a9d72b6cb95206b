"""torch.compile: listed, and not in this version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui3090.settings import Settings

if TYPE_CHECKING:
    from tui3090.techniques import Machine


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """It can't be switched on yet."""
    return "torch.compile is not in this version." if settings.compile else None
