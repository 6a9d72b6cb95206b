"""Which techniques there are, and which of them are on.

One table, `TECHNIQUES`, says what each technique is called, its keys, its values and its sentences. The keys of the
dashboard, the help, the command-line options and the README's table all come from it; the doing is in
`tui3090/techniques/`. `Settings` is the frozen choice under which one window runs.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

Value = str | int | float | bool
Effect = Literal["numbers", "cost"]
MOST = 1_000_000
"""The greatest value of a technique that counts something."""

try:
    CORES = len(os.sched_getaffinity(0))
except AttributeError:  # not Linux
    CORES = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Technique:
    """One row of the table."""

    name: str
    """The name in options, records and `Settings`."""
    title: str
    """The name on screen."""
    key: str
    """Goes to the next value."""
    back: str
    """Goes to the previous value."""
    values: tuple[Value, ...]
    """In the order in which the key goes through them; the first is the default unless `Settings` says otherwise."""
    effect: Effect
    """`numbers`: changes the mathematics of training; `cost`: changes only what a step costs."""
    sentence: str
    """What it does, for the help."""
    option: str
    """How the command line writes its values."""
    wraps: bool = True
    """Whether the key goes on from the last value to the first."""
    labels: tuple[tuple[Value, str], ...] = ()
    """Values whose text on screen is not the obvious one."""

    def label(self, value: Value) -> str:
        """`value` as the screen and the log write it."""
        for known, text in self.labels:
            if known == value and type(known) is type(value):
                return text
        if isinstance(value, bool):
            return "on" if value else "off"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def after(self, value: Value, backwards: bool = False) -> Value:
        """The value that a press of the key leads to; `value` itself at the end of a list that does not wrap."""
        values = self.values
        if value in values:
            place = values.index(value) + (-1 if backwards else 1)
            return values[place % len(values)] if self.wraps or 0 <= place < len(values) else value
        if self.wraps or isinstance(value, str):
            return values[-1 if backwards else 0]
        beyond = [v for v in values if not isinstance(v, str) and (v < value if backwards else v > value)]
        return (beyond[-1] if backwards else beyond[0]) if beyond else value

    def parse(self, text: str) -> Value:
        """The value that the command line's `text` means. Raises ValueError with a sentence."""
        text = text.strip()
        first = self.values[0]
        for value in self.values:
            if text in (self.label(value), str(value)) and not isinstance(value, bool):
                return value
        if isinstance(first, bool):
            if text in ("on", "off"):
                return text == "on"
        elif text == "off" and first == 0:
            return 0
        elif text == "all" and self.name == "checkpointing":
            return 1
        elif not isinstance(first, str):
            try:
                return float(text) if isinstance(first, float) else int(text)
            except ValueError:
                pass
        raise ValueError(f"{self.name} is {self.option}, not {text!r}")


def _worker_values() -> tuple[int, ...]:
    doubling = [0, *(2**i for i in range(20) if 2**i < CORES), CORES]
    return tuple(doubling)


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        "amp",
        "AMP",
        "a",
        "A",
        ("off", "bf16", "fp16"),
        "numbers",
        "Matmuls in 16 bits on the Tensor Cores, weights kept in 32; fp16 adds a GradScaler.",
        "off|bf16|fp16",
    ),
    Technique(
        "checkpointing",
        "checkpointing",
        "c",
        "C",
        (0, 2, 1),
        "cost",
        "Keeps only the inputs of blocks and computes their insides again in backward: less memory, more time.",
        "off|all|N",
        labels=((0, "off"), (1, "all"), (2, "every 2nd")),
    ),
    Technique(
        "accumulate",
        "accumulation",
        "+",
        "-",
        (1, 2, 4, 8, 16, 32, 64),
        "numbers",
        "Micro-batches whose gradients are added up for one optimizer step: a bigger batch in the same memory.",
        "K",
        wraps=False,
    ),
    Technique(
        "graph",
        "graph replay",
        "g",
        "G",
        (False, True),
        "cost",
        "Records a step's kernels once and launches them together: helps where launching is the limit.",
        "on|off",
    ),
    Technique(
        "compile",
        "torch.compile",
        "k",
        "K",
        (False, True),
        "cost",
        "Compiles the blocks: fewer kernels that move less memory. The first step with it takes a while.",
        "on|off",
    ),
    Technique(
        "tf32",
        "TF32",
        "t",
        "T",
        (False, True),
        "numbers",
        "fp32 matmuls on the Tensor Cores with 10 bits of mantissa.",
        "on|off",
    ),
    Technique(
        "offload",
        "offload",
        "o",
        "O",
        (False, True),
        "cost",
        "Keeps activations in pinned host memory between forward and backward.",
        "on|off",
    ),
    Technique(
        "workers",
        "loader workers",
        "w",
        "W",
        _worker_values(),
        "cost",
        "Processes that prepare batches beside the training loop.",
        "N",
    ),
    Technique(
        "prefetch",
        "prefetch",
        "p",
        "P",
        (0, 2),
        "cost",
        "Copies the next batches to the card on a side stream while it computes.",
        "off|N",
        labels=((0, "off"),),
    ),
    Technique(
        "lr",
        "learning rate",
        "]",
        "[",
        (0.5, 0.7, 1.0, 1.4, 2.0),
        "numbers",
        "Scales the learning rate that the schedule gives.",
        "FACTOR",
        wraps=False,
        labels=((0.5, "× 0.5"), (0.7, "× 0.7"), (1.0, "× 1"), (1.4, "× 1.4"), (2.0, "× 2")),
    ),
)

BY_NAME = {technique.name: technique for technique in TECHNIQUES}


def named(name: str, *values: Value) -> list[str]:
    """A technique's title and the labels of `values`; of one that this version does not know as they stand."""
    technique = BY_NAME.get(name)
    if technique is None:
        return [name, *map(str, values)]
    return [technique.title, *map(technique.label, values)]


@dataclass(frozen=True, slots=True)
class Settings:
    """The techniques in force for one window; the field names are those of `TECHNIQUES`."""

    amp: str = "off"
    """Autocast dtype: off, bf16 or fp16 (with loss scaling)."""
    checkpointing: int = 0
    """0 off; N: every N-th block is recomputed in backward."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    graph: bool = False
    """CUDA graph replay."""
    compile: bool = False
    """torch.compile."""
    tf32: bool = False
    """TF32 in fp32 matmuls."""
    offload: bool = False
    """Activations in pinned host memory."""
    workers: int = 0
    """Loader processes."""
    prefetch: int = 0
    """Micro-batches copied to the device ahead."""
    lr: float = 1.0
    """Factor on the learning rate of the schedule."""

    def __post_init__(self) -> None:
        if self.amp not in BY_NAME["amp"].values:
            raise ValueError(f"amp is off, bf16 or fp16, not {self.amp!r}")
        for name, least in (("checkpointing", 0), ("accumulate", 1), ("workers", 0), ("prefetch", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
                raise ValueError(f"{name} is a whole number from {least} to {MOST}, not {value!r}")
        if not 0 < self.lr <= 100:
            raise ValueError(f"lr scales the learning rate by a factor above 0, at most 100, not {self.lr!r}")

    def having(self, name: str, value: Value) -> Settings:
        """These settings with one technique changed. Raises ValueError for a value it can't have."""
        if name not in BY_NAME:
            raise ValueError(f"there is no technique {name!r}; there are {', '.join(BY_NAME)}")
        changes: dict[str, Any] = {name: value}
        return replace(self, **changes)

    def short(self) -> str:
        """What differs from the defaults, as `amp=bf16 accumulate=2`; empty when nothing does."""
        return " ".join(
            f"{f.name}={BY_NAME[f.name].label(getattr(self, f.name)).replace(' ', '')}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )

    @classmethod
    def from_short(cls, text: str) -> Settings:
        """The settings that `short()` wrote as `text`; a word that this version does not know is passed over."""
        settings = cls()
        for word in text.split():
            name, _, label = word.partition("=")
            technique = BY_NAME.get(name)
            if technique is None:
                continue
            labels = {technique.label(value).replace(" ", ""): value for value in technique.values}
            try:
                value = labels[label] if label in labels else technique.parse(label.removeprefix("×"))
                settings = settings.having(name, value)
            except ValueError:
                continue
        return settings


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the command line asked for: all that the trainer needs to begin."""

    recipe: Path
    """The train.py."""
    name: str
    """Of the run on screen and in its folder: the train.py's stem, or the bundled recipe's name."""
    options: dict[str, Any] = field(default_factory=dict)
    """The recipe's options, by parameter name, with the types its signature gives."""
    settings: Settings = field(default_factory=Settings)
    asked: frozenset[str] = frozenset()
    """The techniques that the command line named."""
    device: str = ""
    """cpu or cuda:N; empty: the card with most free memory, or the CPU where there is none."""
    vram_gib: float | None = None
    """Cap on torch's allocator, GiB."""
    channels_last: bool = False
    """Whether 4-d weights and images are kept in torch.channels_last."""
    steps: int | None = None
    """Optimizer steps after which the run ends; None: as the recipe says."""
    seed: int | None = None
    """None: the recipe's."""
    counters: bool = False
    """Whether CUPTI may sample the card's counters, which may hold its clocks."""
    folder: Path | None = None
    """The run's; None: nothing is saved."""
    resume: bool = False
    """Go on from the newest whole save in the folder."""
    optimizer_state: str = "keep"
    """What becomes of the optimizer's state at a resume: keep, matching (parameters of the same name) or new."""
    save_minutes: float = 10.0
    """A save after so many minutes; 0: none."""
    save_steps: int = 0
    """A save after so many optimizer steps; 0: none."""
    keep: int = 2
    """Saves that are kept, besides the best one by eval loss and the last one before a divergence."""
