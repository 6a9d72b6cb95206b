"""Which techniques go together: one table. What is not in it has nothing to do with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tui3090.settings import Settings

if TYPE_CHECKING:
    from tui3090.techniques import Machine


@dataclass(frozen=True, slots=True)
class Pair:
    """Two techniques that meet in a step."""

    one: str
    other: str
    """A technique, or the kind of optimizer."""
    how: str
    """What happens when both are on; of a pair that is refused why, and the way out. A sentence."""
    refused: bool = False
    """Whether they exclude each other."""
    torch: tuple[int, int] = (0, 0)
    """The torch from which on they go together."""

    def refusal(self, machine: Machine, settings: Settings) -> str | None:
        """Why `settings` can't be had as far as this pair goes; None: they can."""
        if not (getattr(settings, self.one, False) and getattr(settings, self.other, False)):
            return None
        return self.how if self.refused or machine.torch_version < self.torch else None


PAIRS = (
    Pair("graph", "compile", "The graph is captured of the compiled kernels, after a step that compiles them."),
    Pair(
        "graph",
        "checkpointing",
        "Checkpointing inside graph replay needs torch 2.10 or newer: its dropout would differ.",
        torch=(2, 10),
    ),
    Pair(
        "graph",
        "offload",
        "Offload and graph replay exclude each other, for a graph keeps its activations: switch o or g off first.",
        refused=True,
    ),
    Pair("graph", "optimizer other than fused Adam or AdamW", "Its step runs outside the graph, and waits once."),
    Pair("compile", "checkpointing", "The compiled block is what is computed again."),
    Pair("compile", "offload", "What the compiled block saves travels: less than the plain one saves."),
    Pair("compile", "optimizer", "It is not compiled: a fused one is a single kernel already."),
    Pair("checkpointing", "offload", "Of a checkpointed block its inputs travel."),
)
"""In no pair: amp, tf32, accumulate, workers, prefetch and lr, which go with everything."""
