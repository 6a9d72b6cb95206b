"""Keeping what was learned: saves as training goes on and at its end, going on from one, the recipe's own result."""

from __future__ import annotations

import shutil
import time
import traceback
from typing import TYPE_CHECKING

from tui3090.recipe import RecipeError
from tui3090.records import Changed, Resumed
from tui3090.resume import restore
from tui3090.savefolder import Save, saves
from tui3090.saves import Saver
from tui3090.settings import BY_NAME, Settings

if TYPE_CHECKING:
    from tui3090.trainer import Trainer

KEPT = "going back"
"""Origin of a change that was made after the save which training went back to, and stays."""


class Keeper:
    """Makes the saves of a trainer, and takes it back to them. Without a run folder nothing is kept."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._saver: Saver | None = None
        if trainer.plan.folder is not None:
            self._saver = Saver(trainer.plan, trainer.job, trainer.schedule, trainer.tell.emit, trainer.commands.saving)
        if trainer.plan.resume:
            self._go_on(self._newest_whole())

    def if_due(self) -> None:
        """Save when the clock or the number of steps says so, unless training looks as if it diverged."""
        trainer = self._trainer
        if self._saver is None or not trainer.step:
            return
        self._saver.make_ready()
        if trainer.watchdog.calm and (due := self._saver.due(trainer.step)):
            self.save(due)

    def if_best(self, eval_loss: float | None) -> None:
        """Save after an evaluation that was the best so far."""
        if self._saver is not None and self._saver.is_best(eval_loss):
            self.save("best eval loss", eval_loss)

    def save(self, reason: str, eval_loss: float | None = None) -> None:
        """Save as training stands after the last window."""
        if self._saver is None:
            self._trainer.tell.say("save", "this run has no folder to save into", "warning")
            return
        self._trainer.interrupt()
        self._save(self._saver, reason, eval_loss)

    def _save(self, saver: Saver, reason: str, eval_loss: float | None = None) -> None:
        trainer = self._trainer
        saver.save(trainer.step, trainer.planned, reason, trainer.watchdog.calm, eval_loss, trainer.evaluated)

    def last(self, reason: str) -> None:
        """Keep what can be kept: the steps taken; a window that was broken off is none, unless it changed weights."""
        if (
            self._saver is None
            or not self._trainer.step
            or self._trainer.updating
            or self._trainer.commands.stop_now.is_set()
        ):
            return
        try:
            self._trainer.interrupt()
            if self._trainer.unfinished is not None:
                self._trainer.rewind.back()
                self._trainer.job.feed.taken = self._trainer.unfinished
            self._save(self._saver, reason)
        except Exception:  # a card that has failed gives nothing back: what went wrong first is what is told
            traceback.print_exc()
        self._saver.wait()

    def good(self) -> int | None:
        """The step of the last good save; None: there is none."""
        save = self._saver.last_good() if self._saver is not None else None
        return save.notes.step if save is not None else None

    def offer(self) -> str:
        """A sentence on the save to go on from; empty: there is none."""
        step = self.good()
        return f"The last good save is of step {step}: --resume goes on from it." if step is not None else ""

    def _newest_whole(self) -> Save:
        assert self._trainer.plan.folder is not None
        found, passed_over = saves(self._trainer.plan.folder / "saves")
        for sentence in passed_over:
            self._trainer.tell.say("save", sentence, "warning")
        for save in reversed(found):
            if not (damage := save.damage()):
                return save
            self._trainer.tell.say("save", f"The save {save.name} is passed over: {damage}.", "warning")
        raise RecipeError(f"{self._trainer.plan.folder} holds no whole save to go on from: start without --resume.")

    def _go_on(self, save: Save) -> None:
        """Go on from a save."""
        notes = save.notes
        if not notes.healthy:
            text = "was made while training looked as if it diverged: b goes back to the last good save"
            self._trainer.tell.say("save", f"The save {save.name} {text}", "warning")
        self._trainer.updating = True  # until all is loaded: what is half loaded is never saved
        self._trainer.replay.release()  # graphs know the addresses of the optimizer's state
        self._trainer.job.step.drop_gradients()
        told = restore(self._trainer.job, self._trainer.schedule, save, self._trainer.plan.optimizer_state)
        self._trainer.updating = False
        for sentence in told:
            self._trainer.tell.say("save", sentence, "warning")
        self._trainer.step, self._trainer.planned, self._trainer.evaluated = notes.step, notes.planned, notes.evaluated
        self._trainer.watchdog.reset()
        if self._saver is not None:
            self._saver.resumed(notes)
        self._trainer.tell.emit(Resumed(time=time.time(), step=notes.step, name=save.name))
        if self._trainer.job.steps_left(notes.step) != notes.left:
            self._trainer.switches.replan()

    def go_back(self) -> bool:
        """Back to the last good save; whether there was one."""
        self._trainer.interrupt()
        save = self._saver.last_good() if self._saver is not None else None
        if save is None:
            self._trainer.tell.say("save", "there is no good save to go back to", "warning")
            return False
        self._go_on(save)
        self._tell_what_stays(Settings.from_short(save.notes.settings))
        return True

    def _tell_what_stays(self, then: Settings) -> None:
        """Only what was learned goes back: the techniques that stay, which may be the remedy, are changes after it."""
        trainer, now = self._trainer, self._trainer.job.settings
        if now != then:
            was = then.short() or "all off"
            text = f"techniques stay as they are ({now.short() or 'all off'}); the save was made with {was}"
            trainer.tell.say("save", text)
        for name in BY_NAME:
            old, new = getattr(then, name), getattr(now, name)
            if old != new:
                at = trainer.step + 1
                trainer.tell.emit(Changed(time=time.time(), step=at, technique=name, old=old, new=new, origin=KEPT))


def export_result(trainer: Trainer) -> None:
    """What was learned, by the recipe's own `export`, into `result` of the run's folder: whole or not at all."""
    export, folder = trainer.job.recipe.export, trainer.plan.folder
    if export is None or folder is None or not trainer.step or trainer.commands.stop_now.is_set():
        return
    unfinished, result = folder / "result.unfinished", folder / "result"
    for earlier in (unfinished, result):
        shutil.rmtree(earlier, ignore_errors=True)
    unfinished.mkdir()
    export(unfinished)
    unfinished.rename(result)
    trainer.tell.say("run", f"what was learned is in {result}")
