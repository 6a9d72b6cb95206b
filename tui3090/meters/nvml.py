"""NVML, NVIDIA's monitoring library: asking it, and what it can't answer.

A card is always addressed by its UUID: NVML lists cards by PCI address and ignores CUDA_VISIBLE_DEVICES, while CUDA
puts the fastest first, so an index of one means another card to the other. Any figure may be missing on a given card,
driver or virtual machine; each is asked for alone and becomes None then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

_UPDATED = "NVML: the driver was updated without a restart: reboot to read the card again."
_GONE = (
    (pynvml.NVMLError_GpuIsLost, "NVML: the card is lost: dmesg says why, a reboot brings it back."),
    (pynvml.NVMLError_Uninitialized, "NVML: the card is lost: dmesg says why, a reboot brings it back."),
    (pynvml.NVMLError_DriverNotLoaded, "NVML: the driver is gone: nvidia-smi says more."),
    (pynvml.NVMLError_LibRmVersionMismatch, _UPDATED),
)
"""Errors after which no question will be answered; any other one is about the figure that was asked for."""


class CardMissing(Exception):
    """A card can't be read; its text is a sentence for the screen."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory on a card."""

    pid: int
    user: str
    """'someone' where the process can't be looked at."""
    memory: int | None
    """Bytes; None: the driver does not say."""


def open_nvml() -> None:
    """Start NVML; every call needs its `close_nvml`. Raises CardMissing."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        raise CardMissing("No NVIDIA driver here: libnvidia-ml was not found.") from None
    except pynvml.NVMLError_DriverNotLoaded:
        raise CardMissing("The NVIDIA driver is installed but not loaded: nvidia-smi says more.") from None
    except pynvml.NVMLError_LibRmVersionMismatch:
        raise CardMissing(_UPDATED) from None
    except pynvml.NVMLError as error:
        raise CardMissing(f"NVML: {error}.") from None


def close_nvml() -> None:
    """Undo one `open_nvml`."""
    with suppress(pynvml.NVMLError):  # the driver may have gone away first
        pynvml.nvmlShutdown()


def ask(function: Callable[..., Any], *args: Any) -> Any:
    """What NVML answers; None where this card or driver does not have it. Raises CardMissing once the card is lost."""
    try:
        return function(*args)
    except pynvml.NVMLError as error:
        for gone, sentence in _GONE:
            if isinstance(error, gone):
                raise CardMissing(sentence) from None
        return None


def text(value: str | bytes) -> str:
    """A string of NVML's; some of its versions give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def handle_of(uuid: str) -> Any:
    """NVML's handle of the card or MIG instance `uuid`, with or without its prefix. Raises CardMissing."""
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        handle = ask(pynvml.nvmlDeviceGetHandleByUUID, name)
        if handle is not None:
            return handle
    raise CardMissing(f"NVML: device not identified ({uuid}).")


def memory_of(handle: Any) -> Any:
    """Total, used and free bytes. The second version leaves the driver's reserve out of `used`; old drivers lack it."""
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return memory if memory is not None else ask(pynvml.nvmlDeviceGetMemoryInfo, handle)


def holders_of(handle: Any) -> tuple[Holder, ...] | None:
    """The processes that hold memory on a card, the largest first; None: the driver does not say."""
    lists = [
        ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle),
        ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle),
    ]
    if lists == [None, None]:
        return None
    held: dict[int, int | None] = {}
    for process in (p for processes in lists for p in processes or ()):
        # a process that computes and draws is in both lists, with the same figure
        held[process.pid] = process.usedGpuMemory if process.usedGpuMemory is not None else held.get(process.pid)
    found = [Holder(pid, _user(pid), memory) for pid, memory in held.items()]
    return tuple(sorted(found, key=lambda holder: -(holder.memory or 0)))


def _user(pid: int) -> str:
    """Who runs `pid`: processes of other containers and, on some machines, of other users can't be seen."""
    try:
        name: str = psutil.Process(pid).username()
    except (psutil.Error, OSError):
        return "someone"
    return "".join(c for c in name if c.isprintable()) or "someone"


def gib(count: int) -> str:
    """Bytes as GiB, for sentences: 1.1 GiB, 21 GiB."""
    amount = count / 2**30
    return f"{amount:.1f} GiB" if amount < 9.95 else f"{amount:.0f} GiB"


def by_user(holders: tuple[Holder, ...]) -> str:
    """'user1 1.1 GiB, someone 0.4 GiB', the largest first; a user whose memory is not known stands without a figure."""
    sums: dict[str, int] = {}
    for holder in holders:
        sums[holder.user] = sums.get(holder.user, 0) + (holder.memory or 0)
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return ", ".join(f"{user} {gib(memory)}" if memory else user for user, memory in ordered)
