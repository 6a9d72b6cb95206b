"""A plain training loop, written apart from the product's step, that makes the same changes at the same windows.

It is what a person would write by hand: no index plan, no frozen settings, host floats, `loss.item()` every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """A small model with everything that toggles can disturb: equal blocks, dropout, BatchNorm, an unused parameter."""

    def __init__(self, width: int = 16, depth: int = 4, dropout: float = 0.1, batch_norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width),
                nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width),
                nn.GELU(),
                nn.Dropout(dropout),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width] -> [batch, 4]."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def samples(count: int, width: int = 16, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """A classification set; every fifth sample has no label."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    labels = torch.randint(0, 4, (count,), generator=generator)
    labels[::5] = -100
    return [{"x": x[i], "labels": labels[i]} for i in range(count)]


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy, the mean over the labels that count."""
    return nn.functional.cross_entropy(model(batch["x"]).float(), batch["labels"])


def linear(step: int, total: int) -> float:
    """Warm-up over 3 % and decay to zero, in closed form."""
    warm_up = max(1, round(total * 0.03))
    if step < warm_up:
        return (step + 1) / warm_up
    return (total - step) / (total - warm_up + 1)


def plain_loop(
    model: nn.Module,
    batches: list[dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int,
    changes: Mapping[int, Mapping[str, Any]] | None = None,
    seed: int = 0,
    clip: float = 1.0,
    device: str = "cpu",
    loss_of: Callable[[nn.Module, Any], torch.Tensor] = loss_of,
    base_lr: float = 1e-2,
    factor: Callable[[int, int], float] = linear,
) -> list[float]:
    """Train over `batches` once; `changes` sets amp, checkpointing, accumulate, tf32 or lr before a window.

    Returns each window's loss. The learning rate is the schedule's in closed form, so accumulation must not change it.
    """
    now: dict[str, Any] = {"amp": "off", "checkpointing": 0, "accumulate": 1, "lr": 1.0, "tf32": False}
    scaler = torch.amp.GradScaler(device)
    torch.manual_seed(seed)
    model.train()
    losses, position, window, steps = [], 0, 0, 0
    while position < len(batches):
        now.update((changes or {}).get(window, {}))
        torch.backends.cuda.matmul.allow_tf32 = now["tf32"]
        group = batches[position : position + now["accumulate"]]
        position += now["accumulate"]
        window += 1
        counts = [int((b["labels"] != -100).sum()) for b in group]
        if not sum(counts):
            losses.append(math.nan)
            continue
        optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for batch, count in zip(group, counts):
            if not count:
                continue
            batch = {key: value.to(device) for key, value in batch.items()}
            with checkpointing(model, now["checkpointing"]):
                dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(now["amp"], torch.bfloat16)
                with torch.autocast(device, dtype=dtype, enabled=now["amp"] != "off"):
                    loss = loss_of(model, batch)
                share = loss * (count / sum(counts))
                (scaler.scale(share) if now["amp"] == "fp16" else share).backward()
            loss_sum += share.item()
        if now["amp"] == "fp16":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        for parameters in optimizer.param_groups:
            lr = base_lr * factor(steps, total_steps) * now["lr"]
            if isinstance(parameters["lr"], torch.Tensor):
                parameters["lr"].fill_(lr)
            else:
                parameters["lr"] = lr
        if now["amp"] == "fp16":
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            steps += scaler.get_scale() >= before
        else:
            optimizer.step()
            steps += 1
        losses.append(loss_sum)
    torch.backends.cuda.matmul.allow_tf32 = False
    return losses


class checkpointing:  # noqa: N801
    """Every N-th block of `model.blocks` under torch's checkpoint."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self.blocks = list(model.blocks)[::every] if every else []  # type: ignore[arg-type]

    def __enter__(self) -> None:
        for block in self.blocks:
            forward = block.forward
            block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)

    def __exit__(self, *exception: object) -> None:
        for block in self.blocks:
            del block.forward
