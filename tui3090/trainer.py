"""The training loop: windows in, records out, commands taken at a window's start.

`Trainer.run` reads from top to bottom: assemble, then epoch by epoch window by window. The settings are frozen for a
window; what a key asked for comes into force at the next one.
"""

from __future__ import annotations

import gc
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tui3090.assemble import Job, assemble
from tui3090.evaluation import evaluate
from tui3090.feed import Window
from tui3090.ledger import FlopTally, Ledger, Running
from tui3090.link import Commands
from tui3090.looks import Looks
from tui3090.meters.allocator import Allocator, held_by
from tui3090.meters.poller import Poller
from tui3090.meters.unmoved import Unmoved
from tui3090.oom import explained
from tui3090.recipe import RecipeError
from tui3090.records import (
    Available,
    Change,
    Changed,
    Evaluate,
    Event,
    GoBack,
    MakeSave,
    MeasureActivations,
    Pause,
    Profile,
    Record,
    Refused,
    Resumed,
    Stage,
    State,
    Stop,
)
from tui3090.resume import restore
from tui3090.rewind import Rewind
from tui3090.savefolder import Save, saves
from tui3090.saves import Saver
from tui3090.schedule import Schedule
from tui3090.settings import TECHNIQUES, RunPlan, Value
from tui3090.shortage import way_out
from tui3090.source import describe
from tui3090.step import Step
from tui3090.techniques import reason_unavailable, refusal
from tui3090.techniques.compile import why_failed
from tui3090.techniques.graph import Replay
from tui3090.watchdog import Gradients, Watchdog

KERNELS = ("amp", "checkpointing", "tf32", "graph", "compile")
"""Techniques that change which kernels a step runs: graphs captured before are of no use afterwards."""
SAVES_MEMORY = ("amp", "checkpointing", "compile", "offload")
"""Techniques after whose change the allocator should give back what it holds for the step as it was."""


class Stopped(Exception):
    """The user asked to stop."""


class Diverged(Exception):
    """Training has diverged, and nobody is there to press a key."""


class Trainer:
    """Trains in the thread that calls `run`."""

    job: Job
    schedule: Schedule
    runner: Step | Replay

    def __init__(self, plan: RunPlan, commands: Commands, emit: Callable[[Record], None], poller: Poller) -> None:
        self._plan = plan
        self._commands = commands
        self._emit = emit
        self._poller = poller
        self._flops = FlopTally()
        self._running: Running | None = None
        self._saver: Saver | None = None
        self._unfinished: int | None = None
        """Samples of the epoch before the window that is running; None: none is."""
        self._updating = False
        self._last_end: torch.cuda.Event | None = None
        self._shortage = ""
        """What torch said when memory was full the last time, explained."""
        self.step = 0
        """Optimizer steps taken."""
        self.planned: int | None = None
        """Optimizer steps in the whole run, as planned now; None: unknown."""

    def run(self) -> int:
        """Train to the end; returns the exit status. What goes wrong is a State record, its traceback in the output."""
        try:
            self.job = assemble(self._plan, self._emit)
            self._begin()
            try:
                self._train()
                ended = "finished", f"after {self.step} steps"
            except Stopped:
                ended = "stopped", f"by you, after {self.step} steps"
            self._last_save("the end" if ended[0] == "finished" else "stopped")
            self._export()
            self._state(*ended)
            return 0
        except Diverged as error:
            self._last_save("diverged")
            self._state("failed", str(error))
            return 1
        except SystemExit as error:
            self._last_save("failed")
            self._state("failed", f"{self._plan.recipe.name} called sys.exit({error.code!r})")
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        except torch.OutOfMemoryError as error:
            traceback.print_exc()
            sentence = (
                f"The card's memory was full in the optimizer's step {self.step + 1}, which may have changed weights, "
                "so it can't be run again: start with --checkpointing all, --amp bf16 or a smaller batch size."
            )
            self._state("failed", f"{sentence} {explained(str(error))}".rstrip())
            return 1 if self.step else 2
        except BaseException as error:  # KeyboardInterrupt raised by a train.py, too, must not end the thread unseen
            if not isinstance(error, RecipeError):
                traceback.print_exc()
            self._last_save("failed")
            self._state("failed", describe(error, self._plan.recipe))
            return 1 if self.step else 2
        finally:
            if hasattr(self, "job"):
                self.job.feed.close()

    def _export(self) -> None:
        """What was learned, by the recipe's own `export`, into `result` of the run's folder: whole or not at all."""
        export, folder = self.job.recipe.export, self._plan.folder
        if export is None or folder is None or not self.step or self._commands.stop_now.is_set():
            return
        unfinished, result = folder / "result.unfinished", folder / "result"
        for earlier in (unfinished, result):
            shutil.rmtree(earlier, ignore_errors=True)
        unfinished.mkdir()
        export(unfinished)
        unfinished.rename(result)
        self._say("run", f"what was learned is in {result}")

    # the loop

    def _begin(self) -> None:
        job = self.job
        self._replay = Replay(job.step, self._poller.quiet, lambda text: self._say("graph", text, "warning"))
        self._allocator = (
            Allocator(job.machine.device.index or 0, lambda: self._replay.pool_bytes) if job.machine.cuda else None
        )
        self._poller.watch(job.device_uuid, self._allocator)
        self._ledger = Ledger(job.device_name, job.weights_dtype)
        self._looks = Looks(job, self._replay, self._emit, self._interrupt)
        self.runner = self._replay if job.settings.graph else job.step
        job.step.compiled.say = partial(self._say, "compile")
        job.step.compiled.progress = partial(self._state, "training")
        job.step.offload.say = partial(self._say, "memory")
        self._rewind = Rewind(job.step.model, job.machine.device)
        trained = {name: p for name, p in job.step.model.named_parameters() if p.requires_grad}
        self._watchdog = Watchdog(self._say)
        self._gradients = Gradients(trained)
        self._unmoved = Unmoved(trained.values())
        self.planned = job.steps_left(0)
        self.schedule = Schedule(job.step.optimizer, job.recipe.scheduler, self.planned)
        if self._plan.folder is not None:
            self._saver = Saver(self._plan, job, self.schedule, self._emit, self._commands.saving)
        if self._plan.resume:
            self._resume(self._save_to_resume())
        self._tell_available()
        self._first_began = time.perf_counter()
        self._emit(Stage(time=time.time(), name="first step"))

    def _train(self) -> None:
        job = self.job
        self._state("training")
        while True:
            while True:
                self._boundary()
                if self._enough():
                    return self._evaluate()
                began, taken = time.perf_counter(), job.feed.taken
                window = job.feed.next_window(job.settings.accumulate)
                if window is None:
                    break
                self._tell_of_data()
                self._unfinished = taken
                with self._looks.at(window) as alone:
                    self._run_window(window, time.perf_counter() - window.wait_s if alone else began)
                self._unfinished = None
            if not job.feed.taken:
                number = job.feed.epoch + 1
                raise RecipeError(f"train_data gave nothing in epoch {number}: it must be iterable again and again.")
            self._evaluate()
            if job.max_steps is None and job.feed.epoch + 1 >= job.recipe.epochs:
                return
            job.feed.start_epoch(job.feed.epoch + 1)

    def _run_window(self, window: Window, began: float) -> None:
        """Everything that one optimizer step launches; the outcome of the window before is looked at in the middle."""
        job = self.job
        if self._running is not None:
            self._running.ended = began
        begin, before = self._mark(), self._last_end
        sample = self._looks.sample(window, before)
        while (replayed := self._accumulate(window)) is None:
            window = self._made_smaller(window)
        micro_batches = window.weighed
        self._settle()  # the window before: here the host waits, as the plain loop does for its loss
        lr = float(job.step.optimizer.param_groups[0]["lr"]) * job.settings.lr
        if micro_batches:
            job.step.mark("optimizer")
            self._updating = True
            self.runner.update()
            self._updating = False
            job.step.mark("end")
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
        self._look_ahead()
        if not job.machine.cuda:
            self._settle()  # the CPU has nothing in flight

    def _accumulate(self, window: Window) -> bool | None:
        """Forward and backward of every micro-batch; whether all of them ran by replay. None: memory was full."""
        self._rewind.mark()
        not_compiled, self._flops.ran_out = "", False
        try:
            return self._accumulated(window)
        except torch.OutOfMemoryError as error:
            traceback.print_exc()
            self._shortage = explained(str(error))
        except Exception as error:
            if not self.job.settings.compile or not self.job.step.compiled.failed(error):
                raise
            traceback.print_exc()
            not_compiled = why_failed(error)
        # out of the except block: the traceback holds the failed window's tensors
        self._rewind.back()
        self._give_memory_back()
        if not_compiled:
            self._without_compiler(not_compiled)
        elif self._flops.ran_out and self.job.settings.compile:
            self._say("memory", "out of memory while FLOPs were counted, uncompiled: no FLOPs for this batch shape")
        else:
            return None
        return self._accumulate(window)

    def _accumulated(self, window: Window) -> bool:
        micro_batches, replayed = window.weighed, 0
        self.runner.prepare(micro_batches)
        for number, micro in enumerate(micro_batches):
            if self._commands.stop_now.is_set():
                raise Stopped
            share, first = micro.weight / window.weight, number == 0
            if isinstance(self.runner, Replay) and self.runner.replays(micro):
                self.runner.accumulate(micro, share, first)
                replayed += 1
            else:
                with self._flops.counting(micro, self.job.settings):
                    self.runner.accumulate(micro, share, first)
        return 0 < replayed == len(micro_batches)

    def _without_compiler(self, why: str) -> None:
        """The compiler could not do it, or something went wrong while it was at work: from here on eagerly."""
        job = self.job
        if job.step.compiled.leave_loss():
            self._say("compile", f"the loss is not compiled, only the model's blocks: {why}", "warning")
            return
        sentence = f"torch.compile failed in this run: {why} (output.log has the rest)."
        self._say("compile", f"{sentence} Training goes on without it", "warning")
        job.machine = replace(job.machine, no_compiler=sentence)
        self._change("compile", False, origin="compile")

    def _give_memory_back(self) -> None:
        """Drop what can be made again: graphs, gradients, the allocator's cache."""
        self._replay.release()
        self.job.step.drop_gradients()
        gc.collect()
        if self.job.machine.cuda:
            torch.cuda.empty_cache()

    def _made_smaller(self, window: Window) -> Window:
        """A window for which memory was full, as it is to be run again. Raises RecipeError when no way is left."""
        job = self.job
        self._interrupt()
        self._say("memory", self._shortage, "warning")
        way = way_out(job, window, self._shortage)
        self._say("memory", way.sentence, "warning")
        self._change(way.technique, way.value, origin="out of memory")
        job.started = replace(job.started, batch_size=job.feed.batch_size, settings=job.settings.short())
        self._emit(job.started)
        return way.window

    def _look_ahead(self) -> None:
        """Prefetch; without it where memory is too full for batches that wait."""
        try:
            return self.job.feed.look_ahead()
        except torch.OutOfMemoryError as error:
            traceback.print_exc()
            self._say("memory", explained(str(error)), "warning")
        self._say("memory", "out of memory while prefetching: prefetch is switched off", "warning")
        self._change("prefetch", 0, origin="out of memory")
        self.job.feed.set_workers(self.job.settings.workers)  # what was fetched for it is fetched again

    def _settle(self) -> None:
        """Learn what became of the window in flight: only now is it a step, and the schedule moves."""
        running, self._running = self._running, None
        if running is None:
            return
        outcome = running.in_flight.wait() if running.in_flight is not None else None
        if not self._ledger.why_skipped(outcome, running.settings):
            self.step += 1
            self._move_schedule()
            if (share := self._unmoved.stepped()) is not None:
                self._watchdog.unmoved(share)
        record = self._ledger.record(running, outcome, self.step, self.planned)
        self._emit(record)
        if running.sample is not None:
            self._looks.sampled(running.sample, record)
        self._watchdog.look(record, len(running.window.micro_batches) - record.micro_batches)
        self._say("train", self._gradients.lost(), "error")
        if self._first_began:
            seconds = time.perf_counter() - self._first_began
            self._emit(Stage(time=time.time(), name="first step", seconds=seconds))
            self._first_began = 0.0
            self._poller.held = held_by(self.job.step.model, self.job.step.optimizer)

    def _move_schedule(self) -> None:
        """A step was taken."""
        self.schedule.step()
        if self.schedule.beyond == 2:  # the first time it is the run's last step, as planned
            lr = float(self.job.step.optimizer.param_groups[0]["lr"])
            text = f"the recipe's own learning-rate schedule is over after {self.step - 1} steps: the rate stays at"
            self._say("train", f"{text} {lr:.3g}", "warning")

    def _mark(self) -> torch.cuda.Event | None:
        """An event on the device's time line; None on the CPU."""
        if not self.job.machine.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.job.machine.device))
        return event

    def _interrupt(self) -> int:
        """Something other than a window comes next: the window in flight ends first, and no gap is counted as stall.

        Gives the optimizer steps taken.
        """
        self._settle()  # its time goes on to its end
        self._last_end = None
        return self.step

    def _enough(self) -> bool:
        """Whether the steps asked for are done; the one in flight counts once it is known to be one."""
        if self.job.max_steps is None:
            return False
        if self._running is not None and self.step + 1 >= self.job.max_steps:
            self._interrupt()
        return self.step >= self.job.max_steps

    # commands

    def _boundary(self) -> None:
        """Take what was asked for since the last window began; while paused, by key or alarm, wait here for more."""
        if self._saver is not None and self._watchdog.calm and (due := self._saver.due(self.step)):
            self._save(due)
        alarm = self._watchdog.alarm
        paused, why = alarm is not None, alarm.paused if alarm is not None else ""
        self._say("train", why, "warning")
        while True:
            if alarm is not None and self._commands.unattended.is_set():
                raise Diverged(alarm.ended)
            for command in self._commands.take():
                match command:
                    case Change(technique, value):
                        self._change(technique, value)
                    case Pause(on):
                        paused = on
                    case Evaluate():
                        self._evaluate(asked=True)
                    case Profile():
                        self._looks.ask_kernels()
                    case MeasureActivations():
                        self._looks.ask_activations()
                    case MakeSave():
                        self._save("key s")
                    case GoBack():
                        paused = not self._go_back() and paused
                    case Stop():
                        self._state("stopping")
                        self._interrupt()
                        raise Stopped
            if not paused:
                break
            self._interrupt()
            self._state("paused", why)
            self._commands.arrived.wait()
        if alarm is not None:
            self._watchdog.reset()
        self._state("training")

    def _change(self, name: str, value: Value, origin: str = "key") -> None:
        """Put a technique's new value in force from the next window on, or say why not."""
        job = self.job
        old = getattr(job.settings, name, None)
        try:
            settings = job.settings.having(name, value)
            reason = refusal(job.machine, settings)
        except ValueError as error:
            reason = str(error)
        if name == "graph" and value and self._replay.given_up:
            reason = self._replay.given_up
        if reason or old == value or old is None:
            if reason:
                self._emit(Refused(time=time.time(), technique=name, value=value, reason=reason))
            return
        self._interrupt()
        if name == "checkpointing" and value:
            self._gradients.remember()
        job.settings = job.step.settings = settings
        if name == "amp" and value != "off" and not job.machine.cuda:
            self._say("train", "16-bit matmuls are emulated on most CPUs: expect them to be slower than fp32")
        if name in KERNELS:
            self._replay.release()
            self.runner = self._replay if settings.graph else job.step
        elif name == "workers":
            job.feed.set_workers(settings.workers)
            self._tell_of_data()
        elif name == "prefetch":
            job.feed.prefetch = settings.prefetch
        elif name == "accumulate" and origin == "key":  # else the steps hold the same samples as before
            self._replan()
        self._emit(Changed(time=time.time(), step=self.step + 1, technique=name, old=old, new=value, origin=origin))
        self._looks.changed()
        if self._allocator is not None:
            if name in SAVES_MEMORY:
                self._empty_cache()
            self._allocator.reset_peak()
        self._tell_available()

    def _replan(self) -> None:
        """Accumulation decides how many optimizer steps are left."""
        left = self.job.steps_left(self.step)
        planned = self.step + left if left is not None else None
        if planned == self.planned:
            return
        self.planned = planned
        self.schedule.replan(self.step, left)
        if self.schedule.fixed:
            self._say("train", "the recipe's own learning-rate schedule is not planned again for the new step count")

    def _empty_cache(self) -> None:
        before = torch.cuda.memory_reserved(self.job.machine.device)
        torch.cuda.empty_cache()
        freed = before - torch.cuda.memory_reserved(self.job.machine.device)
        if freed > 0:
            self._say("memory", f"gave {freed / 2**30:.2f} GiB of the allocator's cache back")

    def _evaluate(self, asked: bool = False) -> None:
        """Measure the loss on the eval data; without any, say so if it was asked for."""
        self._interrupt()
        if self.job.recipe.eval_data is None:
            if asked:
                self._say("eval", "the recipe has no eval_data: give it some to see the loss on unseen samples")
            return
        self._state("evaluating")
        self._replay.make_room()
        evaluated, out_of_memory = None, False
        try:
            evaluated = evaluate(self.job, self.step, self._commands.stop.is_set)
        except Exception as error:  # what training has learned is not lost to a mistake in the metrics
            traceback.print_exc()
            self._say("eval", f"evaluation failed, training goes on: {describe(error, self._plan.recipe)}", "error")
            if out_of_memory := isinstance(error, torch.OutOfMemoryError):
                self._say("memory", explained(str(error)), "warning")
        if out_of_memory:
            self._give_memory_back()
        if evaluated is not None:
            self._emit(evaluated)
            if evaluated.loss is not None and not asked:  # looking at it changes nothing
                self.schedule.evaluated(evaluated.loss)
            if self._saver is not None and self._saver.is_best(evaluated.loss):
                self._save("best eval loss", evaluated.loss)
        self._state("training")

    # saves

    def _save(self, reason: str, eval_loss: float | None = None) -> None:
        """Save as training stands after the last window."""
        if self._saver is None:
            self._say("save", "this run has no folder to save into", "warning")
            return
        self._interrupt()
        self._saver.save(self.step, self.planned, reason, self._watchdog.calm, eval_loss)

    def _last_save(self, reason: str) -> None:
        """Keep what can be kept: the steps taken; a window that was broken off is none, unless it changed weights."""
        if self._saver is None or not self.step or self._updating or self._commands.stop_now.is_set():
            return
        try:
            self._interrupt()
            if self._unfinished is not None:
                self._rewind.back()
                self.job.feed.taken = self._unfinished
            self._saver.save(self.step, self.planned, reason, self._watchdog.calm)
        except Exception:  # a card that has failed gives nothing back: what went wrong first is what is told
            traceback.print_exc()
        self._saver.wait()

    def _save_to_resume(self) -> Save:
        assert self._plan.folder is not None
        found, passed_over = saves(self._plan.folder / "saves")
        for sentence in passed_over:
            self._say("save", sentence, "warning")
        for save in reversed(found):
            if not (damage := save.damage()):
                return save
            self._say("save", f"The save {save.name} is passed over: {damage}.", "warning")
        raise RecipeError(f"{self._plan.folder} holds no whole save to go on from: start without --resume.")

    def _resume(self, save: Save) -> None:
        """Go on from a save."""
        notes = save.notes
        restore(self.job, self.schedule, save, self._plan.optimizer_state)
        self._replay.release()  # graphs know the addresses of the optimizer's state
        self.job.step.drop_gradients()
        self.step, self.planned = notes.step, notes.planned
        self._watchdog.reset()
        if self._saver is not None:
            self._saver.resumed(notes)
        self._emit(Resumed(time=time.time(), step=notes.step, name=save.name))
        self._replan()

    def _go_back(self) -> bool:
        """Back to the last good save; whether there was one."""
        self._interrupt()
        save = self._saver.last_good() if self._saver is not None else None
        if save is None:
            self._say("save", "there is no good save to go back to", "warning")
            return False
        self._resume(save)
        return True

    # telling

    def _state(self, state: str, detail: str = "") -> None:
        """Tell what the run is doing now, if that is new."""
        if (state, detail) != self._told:
            self._told = (state, detail)
            self._emit(State(time=time.time(), state=state, detail=detail))

    _told = ("", "")

    def _say(self, source: str, text: str, level: str = "info") -> None:
        if text:
            self._emit(Event(time=time.time(), level=level, source=source, text=text))

    def _tell_of_data(self) -> None:
        """What loading found out; the length of the run may be one of these things."""
        if not self.job.feed.notes:
            return
        for note in self.job.feed.notes:
            self._say("data", note, "warning")
        self.job.feed.notes.clear()
        if self.job.steps_left(self.step) is None:
            self.planned = None

    def _tell_available(self) -> None:
        for technique in TECHNIQUES:
            reason = reason_unavailable(technique.name, self.job.machine, self.job.settings)
            if technique.name == "graph" and self._replay.given_up:
                reason = self._replay.given_up
            self._emit(Available(time=time.time(), technique=technique.name, reason=reason))
