"""What the table consists of: its columns, its cells, and what a first look at the recipe found out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tui3090.fit.prediction import Point
from tui3090.settings import Settings

Status = Literal["ok", "oom", "not run", "failed", "died"]
"""failed: it said why; died: its process ended without a word."""


@dataclass(frozen=True, slots=True)
class Column:
    """A combination of techniques."""

    amp: str = "off"
    """off, bf16 or fp16."""
    technique: Literal["", "checkpointing", "graph"] = ""
    """What is on besides."""

    @property
    def name(self) -> str:
        """In JSON, like `bf16+checkpointing`."""
        return "+".join(part for part in ("fp32" if self.amp == "off" else self.amp, self.technique) if part)

    @property
    def precision(self) -> str:
        """On screen."""
        return "FP32" if self.amp == "off" else f"AMP {self.amp}"

    @property
    def title(self) -> str:
        """On screen, in one line."""
        with_it = {"": "", "checkpointing": " + checkpointing", "graph": " + replay"}
        return self.precision + with_it[self.technique]

    @property
    def settings(self) -> Settings:
        """What a run in this column has in force."""
        return Settings(
            amp=self.amp, checkpointing=int(self.technique == "checkpointing"), graph=self.technique == "graph"
        )

    @property
    def flags(self) -> list[str]:
        """The options of `tui3090 run` that put it in force."""
        amp = [] if self.amp == "off" else ["--amp", self.amp]
        return amp + {"": [], "checkpointing": ["--checkpointing", "all"], "graph": ["--graph"]}[self.technique]

    @property
    def eager(self) -> Column:
        """The column whose steps replay records."""
        return Column(self.amp) if self.technique == "graph" else self


def all_columns(amp: str) -> list[Column]:
    """The table's columns, AMP in the dtype that the device has."""
    return [Column(precision, technique) for precision in ("off", amp) for technique in ("", "checkpointing", "graph")]


@dataclass(frozen=True, slots=True)
class Look:
    """What the recipe and the machine are, found out before the first cell, in a process of its own."""

    device: str
    """cpu or cuda:0."""
    device_name: str
    torch: str
    """torch's version."""
    room: int
    """Bytes that training may take: what is free on the card, or --vram; on the CPU what the machine has available."""
    amp: str
    """AMP's dtype here: bf16 or fp16."""
    rows: int | None
    """Training samples; None: unknown."""
    batch_size: int
    """Samples in the batch that was looked at."""
    fixed: bool
    """Whether the batch size can't be varied: a DataLoader whose own sampler makes the batches, whatever the option."""
    by_option: bool
    """Whether the recipe's option --batch-size sets it."""
    weights_dtype: str
    tf32: bool
    """Whether the train.py switches TF32 on."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a column can't be had, by its name."""
    points: dict[str, list[Point]] = field(default_factory=dict)
    """What small batches took, by the column's name; only on a card."""
    elements: float = 0.0
    """Numbers in a sample's tensors, of the longest batch that was looked at."""
    imports: list[str] = field(default_factory=list)
    """Modules of large libraries that the recipe uses."""

    @property
    def on_card(self) -> bool:
        """Whether it is a card's memory that is measured."""
        return self.device != "cpu"

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Look:
        """Of what the process told."""
        points = {name: [Point.from_json(point) for point in points] for name, points in told["points"].items()}
        return cls(**{**told, "points": points})


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch size in one column."""

    batch: int
    column: Column
    status: Status
    predicted: int | None = None
    """Bytes that it was predicted to take, before it ran."""
    peak_allocated: int | None = None
    """Bytes; on the CPU None."""
    peak_reserved: int | None = None
    """Bytes that the allocator held for it; on the CPU None."""
    peak_rss: int | None = None
    """Bytes of the process's memory."""
    step_s: float | None = None
    """The median step."""
    steps: int = 0
    """How many were measured."""
    sentence: str = ""
    """Why there is nothing measured; a note where there is."""

    @property
    def memory(self) -> int | None:
        """What is compared with the prediction: allocated on a card, else the process's memory."""
        return self.peak_allocated if self.peak_allocated is not None else self.peak_rss

    @property
    def needs(self) -> int | None:
        """What must fit: graphs keep their activations in memory that is reserved and not allocated."""
        return self.peak_reserved if self.column.technique == "graph" else self.memory

    @property
    def samples_s(self) -> float | None:
        """Samples a second."""
        return self.batch / self.step_s if self.step_s else None
