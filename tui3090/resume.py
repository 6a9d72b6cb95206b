"""Going on from a save: checked first, in the user's terms, then loaded whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch.optim import Optimizer

from tui3090.assemble import Job
from tui3090.optimizers import load_state
from tui3090.recipe import RecipeError
from tui3090.savefolder import MODEL, TRAINING, Notes, Save
from tui3090.saves import beside, described, restore_random_state, state_of, trained_names
from tui3090.schedule import Schedule

IN_FORCE = ("fused", "foreach", "capturable", "differentiable")
"""Flags of an optimizer's groups that say how it computes, not what: they are this run's, whatever the save's were."""


def restore(job: Job, schedule: Schedule, save: Save, optimizer_state: str = "keep") -> list[str]:
    """Bring the job to where the save was made. Raises RecipeError, before anything is changed, where it does not fit.

    `optimizer_state`: keep; matching (that of the parameters which both have, by name); new. Gives sentences on what
    of the recipe is not as it was and does not hinder going on.
    """
    notes, step = save.notes, job.step
    state = state_of(step.model)
    groups = trained_names(step.model, step.optimizer)
    _check_model(notes, state)
    _check_data(notes, job)
    if optimizer_state != "new":
        _check_optimizer(notes, step.optimizer)
    if optimizer_state == "keep":
        _check_groups(notes, groups)
    try:
        tensors: dict[str, Any] = safetensors.torch.load_file(save.path / MODEL, device="cpu")
        training = torch.load(save.path / TRAINING, map_location="cpu", weights_only=True)
        tensors |= {name: tensors[other] for name, other in notes.ties.items()}
        tensors |= training["extra"] or {}
        optimizer = _optimizer_state(step.optimizer, training["optimizer"], notes.trained, groups, optimizer_state)
        names = "scaler", "schedule", "scheduler", "data", "random", "beside"
        scaler, schedule_state, kind, data, random, others = (training[name] for name in names)
        if described(tensors) != notes.tensors:
            raise ValueError("its save.json describes another model")
        told = []
        if optimizer_state == "keep":
            told = _differences(schedule, kind, training["rates"], step.optimizer, optimizer)
        follows = optimizer_state != "new" and len(groups) == len(notes.trained) and kind == schedule.kind
        step.model.load_state_dict(tensors, strict=False)  # all that a save holds is there: its names were compared
        load_state(step.optimizer, optimizer)
        step.scaler.load_state_dict(scaler)
        schedule.load_state_dict(schedule_state if follows else None, notes.step)
        with torch.no_grad():
            for name, tensor in beside(step.model, step.optimizer).items():
                if name in others and others[name].shape == tensor.shape:
                    tensor.copy_(others[name])
        restore_random_state(random, step.device)
    except Exception as error:  # its checksums are right, so it was written like that, and not by us
        raise RecipeError(
            f"The save {save.name} can't be read ({type(error).__name__}: {error}): delete it to go on "
            "from the one before."
        ) from error
    job.feed.resume(notes.epoch, notes.taken, notes.batch_size, notes.whole_batch, data)
    return told


def _check_model(notes: Notes, state: Mapping[str, Any]) -> None:
    now = described(state)
    again = "Give the options of the run that is resumed, or start a new run."
    missing, added = sorted(notes.tensors.keys() - now.keys()), sorted(now.keys() - notes.tensors.keys())
    if missing or added:
        parts = [f"the save's {_some(missing)} {_is(missing)} not in it"] if missing else []
        parts += [f"its {_some(added)} {_is(added)} not in the save"] if added else []
        raise RecipeError(f"The model is not the {notes.model} that was saved: {', and '.join(parts)}. {again}")
    changed = [name for name in now if now[name] != notes.tensors[name]]
    if changed:
        name, others = changed[0], f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise RecipeError(
            f"The model is not the one that was saved: {name} is {_shape(now[name])} and was "
            f"{_shape(notes.tensors[name])}{others}. {again}"
        )


def _check_data(notes: Notes, job: Job) -> None:
    if None not in (notes.rows, job.feed.rows) and notes.rows != job.feed.rows:  # None: a stream's length is not known
        raise RecipeError(
            f"The training data has {job.feed.rows} samples and had {notes.rows}: the epoch can't go on where it was. "
            "Give the same data, or start a new run."
        )


def _check_optimizer(notes: Notes, optimizer: Optimizer) -> None:
    if notes.optimizer != type(optimizer).__name__:
        raise RecipeError(
            f"The optimizer was {notes.optimizer} and is now {type(optimizer).__name__}, whose state is another: "
            "resume with --optimizer-state new to begin it anew."
        )


def _check_groups(notes: Notes, groups: list[list[str]]) -> None:
    choice = (
        "Resume with --optimizer-state matching to keep its state where both have the parameter, or with "
        "--optimizer-state new to begin it anew."
    )
    before, after = {n for group in notes.trained for n in group}, {n for group in groups for n in group}
    frozen, thawed = sorted(before - after), sorted(after - before)
    if frozen or thawed:
        parts = [f"{_some(frozen)} {_is(frozen)} no longer trained"] if frozen else []
        parts += [f"{_some(thawed)} {_is(thawed)} trained now and {_was(thawed)} not"] if thawed else []
        raise RecipeError(f"The recipe trains other parameters than the save: {', and '.join(parts)}. {choice}")
    if notes.trained != groups:
        raise RecipeError(f"The optimizer's parameter groups are not those of the save. {choice}")


def _optimizer_state(
    optimizer: Optimizer, saved: dict[str, Any], before: list[list[str]], now: list[list[str]], choice: str
) -> dict[str, Any]:
    """The state dict to load; how the optimizer computes (fused, capturable) stays as it is in this run."""
    current = optimizer.state_dict()
    if choice == "keep":
        groups = [
            {**group, **{flag: ours[flag] for flag in IN_FORCE if flag in ours}}
            for ours, group in zip(current["param_groups"], saved["param_groups"], strict=True)
        ]
        return {"state": saved["state"], "param_groups": groups}
    if choice == "new":
        return {"state": {}, "param_groups": current["param_groups"]}
    numbers = {
        name: number
        for names, group in zip(before, saved["param_groups"])
        for name, number in zip(names, group["params"])
    }
    state = {
        number: saved["state"][numbers[name]]
        for names, group in zip(now, current["param_groups"])
        for name, number in zip(names, group["params"])
        if numbers.get(name) in saved["state"]
    }
    return {"state": state, "param_groups": current["param_groups"]}


def _differences(
    schedule: Schedule, kind: str, rates: list[float], optimizer: Optimizer, saved: dict[str, Any]
) -> list[str]:
    """What of the optimizer and its schedule the recipe gives otherwise than the save, and what comes of it."""
    told = []
    if kind != schedule.kind:
        told.append(
            f"the learning-rate schedule was {kind} and is now {schedule.kind}: it stands where the steps taken lead it"
        )
    elif schedule.scheduler is not None and rates != schedule.base:
        told.append(
            f"the recipe's learning rate was {_plain(rates)} and is now {_plain(schedule.base)}: the schedule goes on "
            "from where it was. Keys [ and ] scale it; --optimizer-state new takes the recipe's"
        )
    for name in ("weight_decay", "momentum", "eps"):
        pairs = zip(optimizer.param_groups, saved["param_groups"])
        changed = [(group[name], ours[name]) for ours, group in pairs if ours.get(name) != group.get(name)]
        if changed:
            before, now = changed[0]
            told.append(
                f"the recipe's {name} was {before} and is now {now}: what was goes on. --optimizer-state new takes the "
                "recipe's"
            )
    return told


def _plain(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _was(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _shape(description: Any) -> str:
    match description:
        case [list(shape), str(dtype)]:
            return f"{' x '.join(str(n) for n in shape) or 'a number'} in {dtype}"
    return "something else"
