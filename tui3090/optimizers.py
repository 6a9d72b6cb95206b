"""The recipe's optimizer, made ready for a step that waits for nothing.

torch's fused Adam and AdamW take the verdict 'not finite' as a tensor and skip the update on the device; with
`capturable` they run inside a CUDA graph. Every other optimizer waits for the verdict on the host, once a step.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
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
    if of_bitsandbytes(optimizer):  # before graphs know where the weights are, as its first step would
        for weight in (p for group in optimizer.param_groups for p in group["params"]):
            weight.data = weight.data.contiguous()
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


def of_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether it is one of bitsandbytes', whose kernels run on the device's default stream, whichever is current, and
    which lays out every weight it updates contiguously."""
    return any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in type(optimizer).__mro__)


def load_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict whose tensors are contiguous, on the CPU or the device; each comes to lie as it did.

    A fused kernel goes through a weight and its state side by side, so both need the same strides. bitsandbytes' paged
    optimizers keep theirs in memory that the card pages in, and would load it into the card's own.
    """
    paged = getattr(optimizer, "is_paged", False)
    buffers = {parameter: dict(held) for parameter, held in optimizer.state.items()} if paged else {}
    optimizer.load_state_dict(state, **({"move_to_device": False} if paged else {}))
    of_weights = [(key, held) for key, held in optimizer.state.items() if isinstance(key, Tensor)]  # others have more
    for parameter, held in of_weights:
        for name, value in held.items():
            if not isinstance(value, Tensor):
                continue
            if value.shape != parameter.shape:
                held[name] = value.to(parameter.device) if paged else value
            elif paged:
                buffer = buffers.get(parameter, {}).get(name)
                if buffer is None or buffer.dtype != value.dtype:
                    buffer = optimizer.get_state_buffer(parameter, value.dtype)  # type: ignore[attr-defined]
                held[name] = buffer.copy_(value)
            elif value.stride() != parameter.stride():
                held[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def waits_for_nothing(optimizer: Optimizer) -> bool:
    """Whether `step()` takes the verdict as a tensor, `optimizer.found_inf`, and a tensor for the learning rate."""
    return type(optimizer) in (Adam, AdamW) and all(group["fused"] for group in optimizer.param_groups)
