"""AMP: forward under autocast, with loss scaling for fp16.

The weights stay as they are. Autocast's cache of cast weights is off, because a captured graph can't use it and the
numbers must be the same in eager and in replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tui3090.settings import Settings

if TYPE_CHECKING:
    from tui3090.techniques import Machine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """bf16 needs Ampere: older cards emulate it, slowly."""
    if settings.amp == "bf16" and machine.cuda and machine.capability < (8, 0):
        return "bf16 needs a card of the Ampere generation or newer (an RTX 30xx, say); fp16 works here (A)."
    return None


def autocast(device: torch.device, settings: Settings) -> torch.autocast:
    """The context of a forward pass; it does nothing when AMP is off. Per thread: enter it in the training thread."""
    return torch.autocast(
        device.type,
        dtype=DTYPES.get(settings.amp, torch.bfloat16),
        enabled=settings.amp != "off",
        cache_enabled=False,
    )


def scaler(device: torch.device) -> torch.amp.GradScaler:
    """The loss scaler of fp16; its state lasts over switching AMP off and on."""
    return torch.amp.GradScaler(device.type)
