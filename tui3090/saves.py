"""Save and resume: everything that training needs to go on as if it had never stopped.

Training waits only for the copy of its tensors to host memory; a thread writes them. What a save looks like on disk,
and which ones are kept, is in savefolder.py.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tui3090.assemble import Job
from tui3090.host_copies import HostCopies
from tui3090.records import Event, Record, Saved
from tui3090.rewind import SMALL
from tui3090.sampling import from_plain, host_states, plain, restore_host
from tui3090.savefolder import (
    MODEL,
    TRAINING,
    Notes,
    Save,
    clear_up,
    crc32,
    new_path,
    prune,
    saves,
    sync,
    write_notes,
)
from tui3090.schedule import Schedule
from tui3090.settings import RunPlan


class Saver:
    """Makes the saves of a run. Its methods are called by the training thread."""

    def __init__(
        self,
        plan: RunPlan,
        job: Job,
        schedule: Schedule,
        emit: Callable[[Record], None],
        writing: threading.Event,
    ) -> None:
        """`writing` is set while the thread writes."""
        assert plan.folder is not None
        self._plan = plan
        self._job = job
        self._schedule = schedule
        self._emit = emit
        self._folder = plan.folder / "saves"
        self._copies = HostCopies()
        self._ready = False
        """Whether their memory is being made, or was."""
        self._thread: threading.Thread | None = None
        self._last_time, self._last_step = time.monotonic(), 0
        self._last_position: tuple[int, int, int] | None = None
        self.best_eval: float | None = None
        """The least eval loss of the run so far."""
        self._writing = writing
        clear_up(self._folder)

    def make_ready(self) -> None:
        """Have a thread make the memory that saves copy to, once; the optimizer must have its state."""
        if not self._ready:
            self._ready = True
            self._copies.make_ready(self._tensors(state_of(self._job.step.model)))

    def due(self, step: int) -> str:
        """Why a save is due after `step` optimizer steps; empty: none is."""
        if step == self._last_step:
            return ""
        minutes, steps = self._plan.save_minutes, self._plan.save_steps
        if steps and step - self._last_step >= steps:
            return f"every {steps} steps"
        if minutes and time.monotonic() - self._last_time >= minutes * 60:
            return f"every {minutes:g} min"
        return ""

    def is_best(self, eval_loss: float | None) -> bool:
        """Whether it is below every one of the run so far."""
        return (
            eval_loss is not None
            and math.isfinite(eval_loss)
            and (self.best_eval is None or eval_loss < self.best_eval)
        )

    def resumed(self, notes: Notes) -> None:
        """Training goes on from a save."""
        self.best_eval = notes.best_eval
        self._last_time, self._last_step = time.monotonic(), notes.step
        self._last_position = None

    def save(
        self,
        step: int,
        planned: int | None,
        reason: str,
        healthy: bool = True,
        eval_loss: float | None = None,
        evaluated: bool = False,
    ) -> None:
        """Copy everything to host memory, which training waits for, and write it in a thread.

        Nothing is written twice: a second save without a window in between does nothing. Where a save can't be made, an
        event says so and training goes on.
        """
        feed = self._job.feed
        position = (step, feed.epoch, feed.taken)
        if position == self._last_position and eval_loss is None:
            return
        began = time.perf_counter()
        self.wait()  # its copies are used again
        self._last_time, self._last_step, self._last_position = time.monotonic(), step, position
        try:
            model, training = self._state()
            notes = self._notes(step, planned, reason, healthy, eval_loss, evaluated)
        except (
            Exception
        ) as error:  # no host memory, a card that has failed: training decides itself whether it can go on
            traceback.print_exc()
            self._say(f"step {step} can't be saved: {type(error).__name__}: {str(error).splitlines()[0]}", "error")
            return
        waited = time.perf_counter() - began
        self._writing.set()
        self._thread = threading.Thread(target=self._write, args=(notes, model, training, waited), name="save")
        self._thread.start()

    def wait(self) -> None:
        """Until the save that is being written is on the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def last_good(self) -> Save | None:
        """The newest save that was made while training was not diverging."""
        self.wait()
        found, _ = saves(self._folder)
        return next((save for save in reversed(found) if save.notes.healthy and not save.damage()), None)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of the model's and the training's state in host memory."""
        step = self._job.step
        state = state_of(step.model)
        tree = self._tensors(state)
        tree["training"] |= {
            "extra": loadable({name: value for name, value in state.items() if not isinstance(value, Tensor)}),
            "scheduler": self._schedule.kind,
            "schedule": loadable(self._schedule.state_dict()),
            "rates": self._schedule.base,
            "random": random_state(step.device),
            "data": self._job.feed.state_dict(),
        }
        copies = self._copies.of(tree)
        if step.device.type == "cuda":
            torch.cuda.current_stream(step.device).synchronize()  # the one wait of a save
        return copies["model"], copies["training"]

    def _tensors(self, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """What a save holds in tensors. `state` is the model's."""
        step = self._job.step
        ties = ties_of(state)
        return {
            "model": {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in ties},
            "training": {
                "beside": beside(step.model, step.optimizer),
                "optimizer": step.optimizer.state_dict(),
                "scaler": step.scaler.state_dict(),
            },
        }

    def _notes(
        self, step: int, planned: int | None, reason: str, healthy: bool, eval_loss: float | None, evaluated: bool
    ) -> Notes:
        job = self._job
        state = state_of(job.step.model)
        if eval_loss is not None and (self.best_eval is None or eval_loss < self.best_eval):
            self.best_eval = eval_loss
        found, _ = saves(self._folder)
        return Notes(
            number=found[-1].notes.number + 1 if found else 1,
            step=step,
            time=time.time(),
            reason=reason,
            healthy=healthy,
            eval_loss=eval_loss,
            best_eval=self.best_eval,
            epoch=job.feed.epoch,
            taken=job.feed.taken,
            batch_size=job.feed.batch_size,
            whole_batch=job.feed.whole_batch,
            rows=job.feed.rows,
            seed=job.feed.seed,
            planned=planned,
            left=job.steps_left(step),
            evaluated=evaluated,
            settings=job.settings.short(),
            model=type(job.step.model).__name__,
            optimizer=type(job.step.optimizer).__name__,
            tensors=described(state),
            ties=ties_of(state),
            trained=trained_names(job.step.model, job.step.optimizer),
            torch=torch.__version__,
            files={},
        )

    def _write(self, notes: Notes, model: dict[str, Tensor], training: dict[str, Any], waited: float) -> None:
        began = time.perf_counter()
        aside = self._folder / f".{os.getpid()}-{notes.number}"
        try:
            aside.mkdir(parents=True)
            safetensors.torch.save_file(model, aside / MODEL)
            torch.save(training, aside / TRAINING)
            files = {}
            for name in (MODEL, TRAINING):
                sync(aside / name)
                files[name] = [(aside / name).stat().st_size, crc32(aside / name)]
            write_notes(aside, replace(notes, files=files))
            sync(aside / "save.json")
            sync(aside)
            path = new_path(self._folder, notes.step)
            os.rename(aside, path)
            sync(self._folder)
            prune(self._folder, self._plan.keep)
        except Exception as error:  # a full disk, a folder that is gone: the saves before are whole
            traceback.print_exc()
            shutil.rmtree(aside, ignore_errors=True)
            why = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
            )
            self._last_position = None
            self._say(f"step {notes.step} can't be saved: {why}. Training goes on; earlier saves are whole", "error")
        else:
            self._emit(
                Saved(
                    time=time.time(),
                    step=notes.step,
                    name=path.name,
                    reason=notes.reason,
                    seconds=time.perf_counter() - began,
                    waited_s=waited,
                    bytes=sum(size for size, _ in files.values()),
                    eval_loss=notes.eval_loss,
                )
            )
        finally:
            self._writing.clear()

    def _say(self, text: str, level: str) -> None:
        self._emit(Event(time=time.time(), level=level, source="save", text=text))


def random_state(device: torch.device) -> dict[str, Any]:
    """Dropout's and the host's generators: torch's (CPU and `device`), Python's, numpy's if it is loaded."""
    card = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"host": plain(host_states()), "card": card}


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on with every stream of `random_state`."""
    restore_host(from_plain(state["host"]))
    if state["card"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["card"], device)


def loadable(state: Any) -> Any:
    """A state if it can be read back without running code; else None."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:
        return None
    return state


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a save holds of a model: all of it, and of one with PEFT's adapters what is trained, and buffers.

    The base under adapters comes from the recipe; it may be many times their size, and a quantized one can't be loaded.
    """
    state: dict[str, Any] = model.state_dict()
    if not hasattr(model, "peft_config"):
        return state
    kept = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept |= {name for name, _ in model.named_buffers()}
    return {name: value for name, value in state.items() if name in kept}


def beside(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """What training may change and no state dict of the model holds: buffers that are not persistent, and parameters
    that only the optimizer knows (a loss's own, say).
    """
    known = model.state_dict().keys()
    buffers = {n: b for n, b in model.named_buffers() if n not in known and b.numel() <= SMALL}
    own = {id(p) for p in model.parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    return buffers | {f"?{number}": parameter for number, parameter in enumerate(parameters)}


def described(model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in model.items() if isinstance(t, Tensor)
    }


def trained_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The optimizer's parameters by name, group by group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]


def ties_of(model: Mapping[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is another one's as well -> that one's name."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in model.items():
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place in first:
            ties[name] = first[place]
        else:
            first[place] = name
    return ties
