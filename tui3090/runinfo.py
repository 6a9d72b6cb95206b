"""What run.json says of a run at its start: what was asked for, and under which versions."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from importlib import metadata
from typing import Any

import psutil

from tui3090.settings import RunPlan


def run_info(plan: RunPlan) -> dict[str, Any]:
    """The keys of run.json that are known when training starts. Times are seconds since the epoch."""
    return {
        "command": shlex.join(["tui3090", *sys.argv[1:]]),
        "name": plan.name,
        "recipe": str(plan.recipe.resolve()),
        "options": {
            name: value if isinstance(value, int | float | str | None) else str(value)
            for name, value in plan.options.items()
        },
        "settings": plan.settings.short(),
        "device": plan.device,
        "vram_gib": plan.vram_gib,
        "channels_last": plan.channels_last,
        "steps_asked": plan.steps,
        "seed": plan.seed,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("tui3090", "torch", "textual")},
        },
        "pid": os.getpid(),
        "pid_started": psutil.Process().create_time(),
        "started": time.time(),
    }


def version(distribution: str) -> str:
    """Of an installed distribution, by its metadata, as importing it may be slow; 'unknown' where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
