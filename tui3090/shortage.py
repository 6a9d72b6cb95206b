"""What is done when the card's memory is full: the mildest way to run the window again."""

from __future__ import annotations

from dataclasses import dataclass

from tui3090.assemble import Job
from tui3090.feed import Window
from tui3090.recipe import RecipeError
from tui3090.settings import Value
from tui3090.techniques import refusal


@dataclass(frozen=True, slots=True)
class WayOut:
    """The window as it is to be run again, and the change that goes with it from here on."""

    window: Window
    technique: str
    value: Value
    sentence: str


def way_out(job: Job, window: Window, shortage: str) -> WayOut:
    """Without graph replay, then micro-batches of half the size and twice as many, then checkpointing for all blocks.

    Raises RecipeError when none is left, with the sentence on the shortage.
    """
    if job.settings.graph:
        sentence = "out of memory: graph replay is switched off, for its graphs keep the memory of their activations"
        return WayOut(window, "graph", False, sentence)
    parts, size = job.feed.parts, job.feed.batch_size
    smaller = job.feed.halve(window)
    if smaller is not None:
        return WayOut(
            smaller,
            "accumulate",
            max(1, job.settings.accumulate * job.feed.parts // parts),
            f"out of memory: micro-batches of {job.feed.batch_size} instead of {size} from here on, and more of them: "
            "the same samples a step. Only what sees its own micro-batch differs: BatchNorm, losses within the batch, "
            "dropout's draw",
        )
    if job.settings.checkpointing != 1 and refusal(job.machine, job.settings.having("checkpointing", 1)) is None:
        return WayOut(window, "checkpointing", 1, "out of memory even so: checkpointing is switched on for all blocks")
    raise RecipeError(
        f"The memory of {job.device_name} is too small for this model even with micro-batches of {size} and what "
        f"checkpointing saves: try --amp bf16, shorter samples or a smaller model. {shortage}"
    )
