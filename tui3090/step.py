"""One optimizer step, its phases in reading order.

A window of K micro-batches gives the gradient of the weighted mean over all it holds: each micro-batch runs
`accumulate` with its share of the window's weight, then `update` runs once. Nothing here waits for the device, but for
one place that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from tui3090.feed import MicroBatch
from tui3090.meters.phases import no_mark
from tui3090.optimizers import of_bitsandbytes, waits_for_nothing
from tui3090.recipe import Recipe, RecipeError
from tui3090.settings import Settings
from tui3090.techniques.amp import autocast, scaler
from tui3090.techniques.checkpointing import Checkpointing
from tui3090.techniques.compile import Compiled
from tui3090.techniques.offload import Offload
from tui3090.techniques.tf32 import matmuls


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a window."""

    loss: float
    """The weighted mean."""
    grad_norm: float
    """Of the whole gradient, unscaled, before clipping."""
    finite: bool
    """Whether the weights were updated."""
    loss_scale: float | None
    """GradScaler's afterwards; None without it."""


class InFlight:
    """A window's outcome on its way from the device to the host."""

    def __init__(self, report: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if report.is_cuda:
            self._host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
            self._host.copy_(report, non_blocking=True)
            self._event = torch.cuda.current_stream(report.device).record_event()
        else:
            self._host = report.clone()

    def wait(self) -> Outcome:
        """The outcome. The host waits here until the window's update is done: the plain loop's `loss.item()`."""
        if self._event is not None:
            self._event.synchronize()
        loss, norm, bad, scale = self._host.tolist()
        return Outcome(loss, norm, not bad, scale or None)


class Figure:
    """A number on the device, [], which a captured graph reads; filling in the one that is there launches nothing."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.zeros((), device=device)
        self._value = 0.0

    def set(self, value: float) -> None:
        """Fill it in."""
        if value != self._value:
            self._value = value
            self.on_device.fill_(value)


class Step:
    """The phases of an optimizer step, run eagerly. Graph replay (techniques/graph.py) wraps it."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        optimizer: Optimizer,
        blocks: Sequence[nn.Module],
        device: torch.device,
        place: Callable[[MicroBatch], Any],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.settings = Settings()
        self.scaler = scaler(device)
        self.compiled = Compiled(model, blocks, recipe.loss)
        self.checkpointing = Checkpointing(model, blocks)
        self.offload = Offload(model, blocks, device)
        self.place = place
        """Brings a micro-batch's tensors to the device."""
        self.waits_for_nothing = waits_for_nothing(optimizer)
        self.mark = no_mark
        """Told at the start of each phase; meters/phases.py listens now and then."""
        self.keep_gradients = False
        """Gradients are zeroed in place instead of freed: captured graphs know their addresses."""
        self.loss = torch.zeros((), device=device)
        """The window's weighted mean so far."""
        self._clip_norm = recipe.clip_norm
        self.blocks = blocks
        """The layers that checkpointing cuts at."""
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        """Those that are trained, in the optimizer's order."""
        self._report = torch.zeros(4, device=device)
        self._zero, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._share = Figure(device)
        self._lr = [Figure(device) for _ in optimizer.param_groups]
        self._own_stream = device.type == "cuda" and of_bitsandbytes(optimizer)

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled: fp16's gradients would underflow."""
        return self.settings.amp == "fp16"

    def gradients(self) -> list[Tensor]:
        """The gradients there are, in the optimizer's order."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def drop_gradients(self) -> None:
        """Free their memory: a window is given up."""
        self.keep_gradients = False
        self.zero()

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """A window is about to begin; eager steps need nothing."""

    def accumulate(self, micro: MicroBatch, share: float, first: bool) -> None:
        """Forward and backward of one micro-batch, which has `share` of the window's weight."""
        self.mark("copy")
        self.set_share(share)
        batch = self.place(micro)
        self.mark("other")
        self.forward_backward(batch, first)

    def update(self) -> None:
        """Clip, judge and apply what the window accumulated."""
        self.set_lr()
        self.apply()

    def report(self) -> InFlight:
        """The outcome of the window whose update was launched last."""
        return InFlight(self._report)

    # the phases; what varies from window to window is a scalar on the device, so that they can be captured

    def set_share(self, share: float) -> None:
        """Fill in the share of the window's weight."""
        self._share.set(share)

    def set_lr(self) -> None:
        """Fill in the learning rates that the schedule gives, scaled."""
        for group, lr in zip(self.optimizer.param_groups, self._lr):
            lr.set(group["lr"] * self.settings.lr)

    def zero(self) -> None:
        """No gradient yet."""
        if not self.keep_gradients:
            for parameter in self.parameters:
                parameter.grad = None
        elif gradients := self.gradients():
            torch._foreach_zero_(gradients)

    def forward_backward(self, batch: Any, first: bool) -> None:
        """Forward under autocast, backward of the scaled share of the loss; adds to gradients and loss."""
        if first:
            self.zero()
        with (
            matmuls(self.settings),
            self.compiled.in_force(self.settings) as loss_of,
            self.checkpointing.in_force(self.settings.checkpointing),
            self.offload.in_force(self.settings),
        ):
            self.mark("forward")
            with autocast(self.device, self.settings):
                loss = _scalar(loss_of(self.model, batch))
            self.mark("backward")
            share = loss * self._share.on_device
            (self.scaler.scale(share) if self.scales else share).backward()
        self.mark("other")
        if first:
            self.loss.copy_(share.detach())
        else:
            self.loss.add_(share.detach())

    def apply(self) -> None:
        """Unscale once, clip, judge, optimizer, scaler. A gradient that is not finite leaves weights alone."""
        gradients = self.gradients()
        if self.scales:
            self.scaler.unscale_(self.optimizer)
        norm = get_total_norm(gradients)
        if self._clip_norm is not None:
            torch._foreach_mul_(gradients, (self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        norm = norm.float()
        bad = (norm * 0).ne_(0)  # 1.0 for inf and nan: isfinite() would launch four kernels
        self._optimizer_step(bad)
        if self.scales:
            self.scaler.update()
        scale = self.scaler.scale(self._one) if self.scales else self._zero
        torch.stack([self.loss, norm, bad, scale], out=self._report)

    def _optimizer_step(self, bad: Tensor) -> None:
        """The optimizer's step unless the gradient is bad ([], 1.0 or 0.0)."""
        if self.waits_for_nothing:
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]
            try:
                with self._lr_in_force():
                    self.optimizer.step()
            finally:
                del self.optimizer.found_inf  # type: ignore[attr-defined]
        elif not bad.item():  # the one wait for the window in flight: this optimizer can't skip on the device
            with self._lr_in_force(), self._stream():
                self.optimizer.step()

    def _stream(self) -> AbstractContextManager[Any]:
        """The stream that an optimizer launches its kernels on: its new state must be filled there, too.

        The host has waited for all that came before, and bitsandbytes waits for the device at the step's end.
        """
        return torch.cuda.stream(torch.cuda.default_stream(self.device)) if self._own_stream else nullcontext()

    @contextmanager
    def _lr_in_force(self) -> Iterator[None]:
        """The scaled rate in the optimizer's groups, a device tensor where it takes one; the schedule never sees it."""
        groups = self.optimizer.param_groups
        before = [group["lr"] for group in groups]
        as_tensor = self.waits_for_nothing and self.device.type == "cuda"
        for group, lr in zip(groups, self._lr):
            group["lr"] = lr.on_device if as_tensor else group["lr"] * self.settings.lr
        try:
            yield
        finally:
            for group, lr in zip(groups, before):
                group["lr"] = lr


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise RecipeError(f"The loss returned {what}: it must return one number, the mean over the batch.")
    if not loss.requires_grad:
        raise RecipeError("The loss depends on no trainable parameter: nothing would be learned from it.")
    return loss if loss.dim() == 0 else loss.reshape(())
