"""What a capture needs around it: room, batches in memory of their own, random state put back, a failure's reason."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tui3090.sampling import host_states, restore_host


def room(device: torch.device) -> float:
    """Bytes that the allocator may still take: what the card has free, or what a cap on the allocator leaves."""
    free, total = torch.cuda.mem_get_info(device)
    cap = total * torch.cuda.get_per_process_memory_fraction(device)
    return min(free, cap - torch.cuda.memory_reserved(device))


@contextmanager
def cleared_up(device: torch.device, pool: Any) -> Iterator[None]:
    """Around a capture: a failed one leaves torch's random generator and allocator as if it were still going on."""
    generator = torch.cuda.default_generators[device.index]
    before = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(before)
        with suppress(AttributeError, RuntimeError):  # RuntimeError: it was ended properly
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)  # the graph only does it after a capture that ended
        raise


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Around a capture: what cuBLAS needs is in the graphs' memory.

    Else a graph would know the address of a workspace that anybody may free: libraries do to save memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def trained_in(parameters: Sequence[Tensor]) -> Iterator[set[Tensor]]:
    """Gives the parameters that get a gradient inside, which the set holds afterwards."""
    trained: set[Tensor] = set()
    learning = (parameter for parameter in parameters if parameter.requires_grad)
    hooks = [parameter.register_post_accumulate_grad_hook(trained.add) for parameter in learning]
    try:
        yield trained
    finally:
        for hook in hooks:
            hook.remove()


def reason_of(error: BaseException) -> str:
    """What failed first, in a line, and where: the end of a capture raises an error of its own on top."""
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f"{Path(f.filename).name}:{f.lineno}: " for f in reversed(frames) if "/torch/" not in f.filename), "")
    text = str(error).strip().split("\n")[0]
    return f"{place}{text[:200] or type(error).__name__}"


def fill(static: Any, batch: Any) -> None:
    """Copy a batch into the memory that the graphs read."""
    from tui3090.feed import leaves

    for (_, target), (_, source) in zip(leaves(static), leaves(batch)):
        if isinstance(target, Tensor):
            target.copy_(source, non_blocking=True)


def copied(batch: Any) -> Any:
    """A batch in memory of its own."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        return {key: copied(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copied(value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(copied(value) for value in batch)
    return batch


@contextmanager
def restored(model: torch.nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Whatever a check runs leaves no trace in random state and buffers. Gives a function that rewinds the card's.

    Python's and the CPU's generators are put back only at the end: what a capture bakes in of them must differ from
    what eager drew, or it would not be noticed.
    """
    card, host = torch.cuda.get_rng_state(device), host_states()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def rewind() -> None:
        torch.cuda.set_rng_state(card, device)
        for buffer, before in buffers:
            buffer.copy_(before)

    try:
        yield rewind
    finally:
        rewind()
        restore_host(host)
