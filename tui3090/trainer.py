"""The training loop: windows in, records out, commands taken at a window's start.

`Trainer.run` reads from top to bottom: assemble, then epoch by epoch window by window. The settings are frozen for a
window; what a key asked for comes into force at the next one.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial

import torch

from tui3090 import garbage
from tui3090.assemble import Job, assemble
from tui3090.commands import Change, Evaluate, GoBack, MakeSave, MeasureActivations, Pause, Profile, Stop
from tui3090.evaluation import evaluate_in
from tui3090.feed import Window
from tui3090.keeping import Keeper, export_result
from tui3090.ledger import FlopTally, Ledger, Running
from tui3090.link import Commands
from tui3090.looks import Looks
from tui3090.meters.allocator import Allocator, held_by
from tui3090.meters.poller import Poller
from tui3090.meters.unmoved import Unmoved
from tui3090.oom import explained
from tui3090.recipe import RecipeError
from tui3090.records import Record, Stage
from tui3090.rewind import Rewind
from tui3090.schedule import Schedule
from tui3090.settings import RunPlan
from tui3090.source import describe
from tui3090.step import Step
from tui3090.switching import Switches
from tui3090.techniques.compile import why_failed
from tui3090.techniques.graph import Replay
from tui3090.telling import Teller
from tui3090.watchdog import Gradients, Watchdog
from tui3090.workers import WorkerDied

HEARD_S = 1.0
"""How long after a signal training has been asked to stop at the latest."""


class Stopped(Exception):
    """The user asked to stop."""


class Diverged(Exception):
    """Training has diverged, and nobody is there to press a key."""


class Trainer:
    """Trains in the thread that calls `run`."""

    job: Job
    schedule: Schedule
    runner: Step | Replay
    keeper: Keeper

    def __init__(self, plan: RunPlan, commands: Commands, emit: Callable[[Record], None], poller: Poller) -> None:
        self.plan = plan
        self.commands = commands
        self.tell = Teller(emit)
        self._poller = poller
        self._flops = FlopTally()
        self._running: Running | None = None
        self.switches = Switches(self)
        self.unfinished: int | None = None
        """Samples of the epoch before the window that is running; None: none is."""
        self.updating = False
        """Whether an optimizer's step is being launched, which may have changed weights."""
        self.evaluated = False
        """Whether the epoch is over and was evaluated."""
        self._last_end: torch.cuda.Event | None = None
        self._settled_in = False
        """Whether what a run makes at its start and keeps was set aside."""
        self.shortage = ""
        """What torch said when memory was full the last time, explained."""
        self.step = 0
        """Optimizer steps taken."""
        self.planned: int | None = None
        """Optimizer steps in the whole run, as planned now; None: unknown."""

    def run(self) -> int:
        """Train to the end; returns the exit status. What goes wrong is a State record, its traceback in the output."""
        try:
            self.job = assemble(self.plan, self.tell.emit)
            self._begin()
            try:
                self._train()
                ended = "finished", f"after {self.step} steps"
            except (Stopped, WorkerDied) as error:
                # a SIGTERM to all processes of the run ends its workers before training hears of it
                if isinstance(error, WorkerDied) and not self.commands.stop.wait(HEARD_S):
                    raise
                ended = "stopped", f"by you, after {self.step} steps"
            self._keep("the end" if ended[0] == "finished" else "stopped")
            export_result(self)
            self.tell.state(*ended)
            return 0
        except Diverged as error:
            self._keep("diverged")
            self.tell.state("failed", str(error))
            return 1
        except SystemExit as error:
            self._keep("failed")
            self.tell.state("failed", f"{self.plan.recipe.name} called sys.exit({error.code!r})")
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        except torch.OutOfMemoryError as error:
            traceback.print_exc()
            self._keep("failed")
            sentence = (
                f"The card's memory was full in the optimizer's step {self.step + 1}, which may have changed weights, "
                "so it can't be run again: start with --checkpointing all, --amp bf16 or a smaller batch size."
                if self.updating
                else "The card's memory was full outside of a step (output.log says where): other processes hold "
                "it, or the model with its optimizer's state is too large for it."
            )
            offer = self.keeper.offer() if hasattr(self, "keeper") else ""
            self.tell.state("failed", " ".join(filter(None, (sentence, explained(str(error)), offer))))
            return 1 if self.step else 2
        except BaseException as error:  # KeyboardInterrupt raised by a train.py, too, must not end the thread unseen
            if not isinstance(error, RecipeError):
                traceback.print_exc()
            self._keep("failed")
            self.tell.state("failed", describe(error, self.plan.recipe))
            return 1 if self.step else 2
        finally:
            garbage.restore()
            if hasattr(self, "job"):
                self.job.feed.close()

    def _keep(self, reason: str) -> None:
        """A last save, where there is something to save."""
        if hasattr(self, "keeper"):
            self.keeper.last(reason)

    # the loop

    def _begin(self) -> None:
        job = self.job
        self.replay = Replay(job.step, self._poller.quiet, lambda text: self.tell.say("graph", text, "warning"))
        self.allocator = (
            Allocator(job.machine.device.index or 0, lambda: self.replay.pool_bytes) if job.machine.cuda else None
        )
        self._poller.watch(job.device_uuid, self.allocator)
        self._ledger = Ledger(job.device_name, job.weights_dtype)
        self.looks = Looks(job, self.replay, self.tell.emit, self.interrupt)
        self.runner = self.replay if job.settings.graph else job.step
        job.step.compiled.say = partial(self.tell.say, "compile")
        job.step.compiled.progress = partial(self.tell.state, "training")
        job.step.offload.say = partial(self.tell.say, "memory")
        self.rewind = Rewind(job.step.model, job.machine.device)
        trained = {name: p for name, p in job.step.model.named_parameters() if p.requires_grad}
        self.watchdog = Watchdog(self.tell.say)
        self.gradients = Gradients(trained)
        self._unmoved = Unmoved(trained.values())
        self.planned = job.steps_left(0)
        self.schedule = Schedule(job.step.optimizer, job.recipe.scheduler, self.planned)
        self.keeper = Keeper(self)
        self.tell.available(self.job.machine, self.job.settings, self.replay.given_up)
        self._first_began = time.perf_counter()
        self.tell.emit(Stage(time=time.time(), name="first step"))

    def _train(self) -> None:
        job = self.job
        self.tell.state("training")
        while True:
            while True:
                self._boundary()
                if self._enough():
                    return evaluate_in(self, ends_epoch=job.feed.batches_left() == 0)
                began, taken = time.perf_counter(), job.feed.taken
                window = job.feed.next_window(job.settings.accumulate)
                if window is None:
                    break
                self.tell_of_data()
                self.unfinished = taken
                self.rewind.mark()
                with self.looks.at(window) as alone:
                    self._run_window(window, time.perf_counter() - window.wait_s if alone else began)
            if not job.feed.taken:
                number = job.feed.epoch + 1
                raise RecipeError(f"train_data gave nothing in epoch {number}: it must be iterable again and again.")
            if not self.evaluated:  # a save that was made after it goes on here
                evaluate_in(self, ends_epoch=True)
            if job.max_steps is None and job.feed.epoch + 1 >= job.recipe.epochs:
                return
            job.feed.start_epoch(job.feed.epoch + 1)
            self.evaluated = False

    def _run_window(self, window: Window, began: float) -> None:
        """Everything that one optimizer step launches; the outcome of the window before is looked at in the middle."""
        job = self.job
        if self._running is not None:
            self._running.ended = began
        begin, before = self._mark(), self._last_end
        sample = self.looks.sample(window, before)
        while (replayed := self._accumulate(window)) is None:
            window = self._made_smaller(window)
        micro_batches = window.weighed
        self._settle()  # the window before: here the host waits, as the plain loop does for its loss
        lr = float(job.step.optimizer.param_groups[0]["lr"]) * job.settings.lr
        if micro_batches:
            job.step.mark("optimizer")
            self.updating = True
            with garbage.later():
                self.runner.update()
            self.updating = False
            job.step.mark("end")
        self.unfinished = None  # whatever fails from here on, its samples are in the weights
        self._last_end = self._mark()
        self._running = Running(
            window=window,
            in_flight=job.step.report() if micro_batches else None,
            settings=job.settings,
            lr=lr,
            epoch=job.feed.epochs_done(),
            began=began,
            begin=begin,
            before=before,
            flops=self._flops.of(micro_batches, job.settings),
            replayed=replayed,
            compiled=job.step.compiled.lately(),
            sample=sample,
        )
        self.switches.look_ahead()
        if not job.machine.cuda:
            self._settle()  # the CPU has nothing in flight

    def _accumulate(self, window: Window) -> bool | None:
        """Forward and backward of every micro-batch; whether all of them ran by replay. None: memory was full."""
        not_compiled, self._flops.ran_out = "", False
        try:
            return self._accumulated(window)
        except torch.OutOfMemoryError as error:
            traceback.print_exc()
            self.shortage = explained(str(error))
        except Exception as error:
            if not self.job.settings.compile or not self.job.step.compiled.failed(error):
                raise
            traceback.print_exc()
            not_compiled = why_failed(error)
        # out of the except block: the traceback holds the failed window's tensors
        self.rewind.back()
        self.switches.give_memory_back()
        if not_compiled:
            self.switches.without_compiler(not_compiled)
        elif self._flops.ran_out and self.job.settings.compile:
            self.tell.say("memory", "out of memory while FLOPs were counted, uncompiled: no FLOPs for this batch shape")
        else:
            return None
        return self._accumulate(window)

    def _accumulated(self, window: Window) -> bool:
        micro_batches, weight, replayed = window.weighed, window.weight, 0
        with garbage.later():
            self.runner.prepare(micro_batches)
        for number, micro in enumerate(micro_batches):
            if self.commands.stop_now.is_set():
                raise Stopped
            share, first = micro.weight / weight, number == 0
            if isinstance(self.runner, Replay) and self.runner.replays(micro):
                self.runner.accumulate(micro, share, first)
                replayed += 1
            else:
                with self._flops.counting(micro, self.job.settings), garbage.later():
                    self.runner.accumulate(micro, share, first)
        return 0 < replayed == len(micro_batches)

    def _made_smaller(self, window: Window) -> Window:
        return self.switches.made_smaller(window)

    def _settle(self) -> None:
        """Learn what became of the window in flight: only now is it a step, and the schedule moves."""
        running, self._running = self._running, None
        if running is None:
            return
        outcome = running.in_flight.wait() if running.in_flight is not None else None
        if not self._ledger.why_skipped(outcome, running.settings):
            self.step += 1
            if self._poller.held is None:  # not all optimizers have their state after a step that was skipped
                self._poller.held = held_by(self.job.step.model, self.job.step.optimizer)
            self._move_schedule()
            if (share := self._unmoved.stepped()) is not None:
                self.watchdog.unmoved(share)
        record = self._ledger.record(running, outcome, self.step, self.planned)
        self.tell.emit(record)
        if self.allocator is not None:
            self.allocator.window(record)
        if running.sample is not None:
            self.looks.sampled(running.sample, record)
        self.watchdog.look(record, len(running.window.micro_batches) - record.micro_batches)
        self.tell.say("train", self.gradients.lost(), "error")
        if self._first_began:
            seconds = time.perf_counter() - self._first_began
            self.tell.emit(Stage(time=time.time(), name="first step", seconds=seconds))
            self._first_began = 0.0

    def _move_schedule(self) -> None:
        """A step was taken."""
        self.schedule.step()
        if self.schedule.beyond == 2:  # the first time it is the run's last step, as planned
            lr = float(self.job.step.optimizer.param_groups[0]["lr"])
            text = f"the recipe's own learning-rate schedule is over after {self.step - 1} steps: the rate stays at"
            self.tell.say("train", f"{text} {lr:.3g}", "warning")

    def _mark(self) -> torch.cuda.Event | None:
        """An event on the device's time line; None on the CPU."""
        if not self.job.machine.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.job.machine.device))
        return event

    def interrupt(self) -> int:
        """Something other than a window comes next: the window in flight ends first, and no gap is counted as stall.

        Gives the optimizer steps taken.
        """
        self._settle()  # its time goes on to its end
        self._last_end = None
        if self.allocator is not None:
            self.allocator.interrupted()
        return self.step

    def _enough(self) -> bool:
        """Whether the steps asked for are done; the one in flight counts once it is known to be one."""
        if self.job.max_steps is None:
            return False
        if self._running is not None and self.step + 1 >= self.job.max_steps:
            self.interrupt()
        return self.step >= self.job.max_steps

    # commands

    def _boundary(self) -> None:
        """Take what was asked for since the last window began; while paused, by key or alarm, wait here for more."""
        if self.step and not self._settled_in:
            self._settled_in = True
            self.interrupt()  # the pause is no window's time
            garbage.freeze()
        self.keeper.if_due()
        alarm = self.watchdog.alarm
        paused, why = alarm is not None, alarm.paused(self.keeper.good()) if alarm is not None else ""
        self.tell.say("train", why, "warning")
        while True:
            if alarm is not None and self.commands.unattended.is_set():
                raise Diverged(alarm.ended)
            for command in self.commands.take():
                match command:
                    case Change(technique, value):
                        self.switches.change(technique, value)
                    case Pause(on):
                        paused = on
                    case Evaluate():
                        evaluate_in(self, asked=True)
                    case Profile():
                        self.looks.ask_kernels()
                    case MeasureActivations():
                        self.looks.ask_activations()
                    case MakeSave():
                        self.keeper.save("key s")
                    case GoBack():
                        paused = not self.keeper.go_back() and paused
                    case Stop():
                        self.tell.state("stopping")
                        self.interrupt()
                        raise Stopped
            if not paused:
                break
            self.interrupt()
            self.tell.state("paused", why)
            self.commands.arrived.wait()
        if alarm is not None:
            self.watchdog.reset()
        self.tell.state("training")

    def tell_of_data(self) -> None:
        """What loading found out; the length of the run may be one of these things."""
        if not self.job.feed.notes:
            return
        for note in self.job.feed.notes:
            self.tell.say("data", note, "warning")
        self.job.feed.notes.clear()
        if self.job.steps_left(self.step) is None:
            self.planned = None
