"""The recipe's optimizer, made ready for a step that waits for nothing.

torch's fused Adam and AdamW take the verdict 'not finite' as a tensor and skip the update on the device; with
`capturable` they run inside a CUDA graph. Every other optimizer waits for the verdict on the host, once a step.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from tui3090.recipe import Recipe, RecipeError


def make_optimizer(recipe: Recipe, model: nn.Module, device: torch.device) -> tuple[Optimizer, str]:
    """The optimizer, and a sentence where it is not the one that the recipe made. Raises RecipeError."""
    if recipe.optimizer is None:
        trained = [p for p in model.parameters() if p.requires_grad]
        return _fused(AdamW(trained, lr=5e-5, weight_decay=0.01), device), ""
    optimizer = recipe.optimizer(model)
    if not isinstance(optimizer, Optimizer):
        raise RecipeError(
            f"optimizer returned a {type(optimizer).__name__}: it must return a torch.optim.Optimizer, "
            "for example torch.optim.AdamW(model.parameters(), lr=5e-5)."
        )
    _check(optimizer)
    if type(optimizer) not in (Adam, AdamW) or not all(
        group["fused"] is None and group["foreach"] is None and isinstance(group["lr"], float)
        for group in optimizer.param_groups
    ):
        return optimizer, ""
    return _fused(optimizer, device), f"{type(optimizer).__name__} was rebuilt with fused=True: one kernel for all."


def _check(optimizer: Optimizer) -> None:
    """Raise RecipeError for an optimizer that the loop can't drive."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RecipeError(
            f"{name} evaluates the loss itself, in a closure, which can't be done here: take an optimizer whose step() "
            "needs none, for example torch.optim.AdamW."
        )
    if not all("lr" in group for group in optimizer.param_groups):
        raise RecipeError(f"{name} has no learning rate in its parameter groups (lr), which the schedule needs.")


def _fused(optimizer: Optimizer, device: torch.device) -> Optimizer:
    """The same Adam or AdamW, fused, and capturable on CUDA."""
    faster = {"fused": True, "capturable": device.type == "cuda", "foreach": None}
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in {**optimizer.defaults, **faster}.items() if key in accepted}
    groups = [{**group, **faster} for group in optimizer.param_groups]
    return type(optimizer)(groups, **defaults)


def waits_for_nothing(optimizer: Optimizer) -> bool:
    """Whether `step()` takes the verdict as a tensor, `optimizer.found_inf`, and a tensor for the learning rate."""
    return type(optimizer) in (Adam, AdamW) and all(group["fused"] for group in optimizer.param_groups)
