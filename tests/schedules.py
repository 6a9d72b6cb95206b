"""Learning-rate schedules and optimizers that recipes bring, for the tests of both devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

LR = 1e-2


class SignDescent(Optimizer):
    """A third party's: descends by the sign of a momentum, with a state and defaults of its own."""

    def __init__(self, parameters: Any, lr: float = 1e-3, decay: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As torch's; a closure is not needed."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(group["decay"]).add_(parameter.grad, alpha=1 - group["decay"])
                parameter.add_(torch.tanh(1e3 * momentum), alpha=-group["lr"])


def groups(model: nn.Module, small: float = LR / 10) -> list[dict[str, Any]]:
    """Matrices with weight decay; biases and norms without, and at a rate of their own."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": small}]


def grouped(kind: Any, **options: Any) -> Callable[[nn.Module], Optimizer]:
    """An optimizer with those groups."""
    return lambda model: kind(groups(model), lr=LR, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": grouped(torch.optim.AdamW),
    "Adam": grouped(torch.optim.Adam, betas=(0.8, 0.99), amsgrad=True),
    "SGD with momentum": grouped(torch.optim.SGD, momentum=0.9, nesterov=True),
    "RMSprop": grouped(torch.optim.RMSprop, momentum=0.5),
    "Adagrad": grouped(torch.optim.Adagrad),
    "third party": lambda model: SignDescent([{"params": g["params"]} for g in groups(model)], lr=1e-3),
}
SCHEDULES: dict[str, Callable[[Optimizer, int], Any]] = {
    "LambdaLR": lambda o, n: schedules.LambdaLR(o, [lambda s: 1 / (1 + s), lambda s: 0.9**s]),
    "OneCycleLR": lambda o, n: schedules.OneCycleLR(
        o, [LR, LR / 2], total_steps=n, cycle_momentum="betas" in o.defaults or "momentum" in o.defaults
    ),
    "CosineAnnealingLR": lambda o, n: schedules.CosineAnnealingLR(o, n, eta_min=1e-5),
    "ReduceLROnPlateau": lambda o, n: schedules.ReduceLROnPlateau(o, factor=0.3, patience=0, threshold=10.0),
}
