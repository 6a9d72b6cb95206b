"""Starts training in a thread of its own. Importing this module does not import torch: the thread does."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

from tui3090 import garbage
from tui3090.link import Commands
from tui3090.meters.poller import Poller
from tui3090.preload import libraries_first
from tui3090.records import Record, Stage, State
from tui3090.settings import RunPlan


class TrainerThread(threading.Thread):
    """The thread that imports torch, trains, and ends with an exit status."""

    def __init__(self, plan: RunPlan, commands: Commands, emit: Callable[[Record], None], poller: Poller) -> None:
        super().__init__(name="trainer", daemon=True)
        self._plan = plan
        self._commands = commands
        self._emit = emit
        self._poller = poller
        self.exit_status: int | None = None
        """None while it runs."""

    def run(self) -> None:
        """Train; whatever happens ends in a State record that is over, and in an exit status."""
        status = 1
        try:
            began = time.perf_counter()
            if self._plan.resume:  # the folder's log may say that the run is over
                self._emit(State(time=time.time(), state="loading", detail="to go on from a save"))
            self._emit(Stage(time=time.time(), name="torch"))
            with garbage.later(), libraries_first():  # looking through modules, which stay, would hold up keys too
                import torch

                from tui3090.trainer import Trainer

                garbage.set_aside()

            seconds = time.perf_counter() - began
            self._emit(Stage(time=time.time(), name="torch", seconds=seconds, detail=torch.__version__))
            status = Trainer(self._plan, self._commands, self._emit, self._poller).run()
        except BaseException as error:  # a thread's exception must not vanish
            traceback.print_exc()
            self._emit(State(time=time.time(), state="failed", detail=f"{type(error).__name__}: {error}"))
        finally:
            self._poller.stop()
            self.exit_status = status


def start_trainer(plan: RunPlan, commands: Commands, emit: Callable[[Record], None]) -> TrainerThread:
    """Start the poller, which needs no torch, and the training thread."""
    poller = Poller(emit, device=plan.device, counters=plan.counters)
    poller.start()
    thread = TrainerThread(plan, commands, emit, poller)
    thread.start()
    return thread
