"""What the techniques do, one file each; what they are called and how they are shown is in settings.py.

A technique's module has `unavailable(machine, settings)`: a sentence why `settings` can't be had here as far as this
technique goes, or None. One that holds something in force during a step has besides a context manager, so that
switching it off really restores what was. What goes together is a table, `together.PAIRS`. To add a technique: a row in
`settings.TECHNIQUES`, a file here, its name in `MODULES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from tui3090.settings import BY_NAME, Settings
from tui3090.techniques import (
    accumulate,
    amp,
    checkpointing,
    compile,
    graph,
    lr,
    offload,
    prefetch,
    tf32,
    workers,
)
from tui3090.techniques.together import PAIRS

MODULES: dict[str, ModuleType] = {
    "amp": amp,
    "checkpointing": checkpointing,
    "accumulate": accumulate,
    "graph": graph,
    "compile": compile,
    "tf32": tf32,
    "offload": offload,
    "workers": workers,
    "prefetch": prefetch,
    "lr": lr,
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides whether a technique can be used: the device, torch, and what the recipe brought."""

    device: torch.device
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability, (8, 6) for an RTX 3090; (0, 0) on the CPU."""
    torch_version: tuple[int, int] = (0, 0)
    blocks: int = 0
    """Layers that checkpointing can cut at."""
    no_compiler: str = ""
    """Why torch.compile can compile nothing here, a sentence; empty: it can."""
    indexed: bool = True
    """Whether samples are fetched by index; an iterable dataset's are not."""

    @property
    def cuda(self) -> bool:
        """Whether training runs on a CUDA device."""
        return self.device.type == "cuda"


def refusal(machine: Machine, settings: Settings) -> str | None:
    """Why these settings can't be had on this machine, the first sentence that applies; None: they can."""
    alone = (module.unavailable for module in MODULES.values())
    for unavailable in (*alone, *(pair.refusal for pair in PAIRS)):
        reason: str | None = unavailable(machine, settings)
        if reason:
            return reason
    return None


def reason_unavailable(name: str, machine: Machine, settings: Settings) -> str:
    """Why a technique can be switched to none of its values from `settings`; empty: to some it can."""
    technique = BY_NAME[name]
    now = getattr(settings, name)
    reasons = [refusal(machine, settings.having(name, value)) for value in technique.values if value != now]
    return "" if None in reasons else next((reason for reason in reasons if reason), "")
