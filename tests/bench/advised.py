"""What our engine advises a run that waits for its loader, followed as a person does, key by key."""

from __future__ import annotations

import time

import torch

from tests.bench.loops import run_engine
from tui3090.advice import starved
from tui3090.commands import Change, Command, Stop
from tui3090.facts import Facts
from tui3090.link import Commands
from tui3090.recipe import Recipe
from tui3090.settings import Settings

LONGEST_S = 60.0


class Following(Commands):
    """Changes what the advice says as soon as it does, and stops when it says nothing more."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts
        self._until = time.perf_counter() + LONGEST_S

    def take(self) -> list[Command]:
        """The change that is advised now."""
        if time.perf_counter() > self._until:
            return [Stop()]
        if not self._facts.steady:
            return []
        advice = starved(self._facts)
        if advice is None or not advice.key:
            return [Stop()]
        if advice.key == "p":
            return [Change("prefetch", 2)]
        return [Change("workers", int(advice.what.split()[0]))]  # '4 loader workers'


def advised(recipe: Recipe, device: torch.device, settings: Settings) -> Settings:
    """The settings with the workers and the prefetch that the run is advised, from no workers on."""
    facts = Facts()
    start = settings.having("workers", 0).having("prefetch", 0)
    run_engine(recipe, device, start, Following(facts), facts.absorb)
    return facts.settings
