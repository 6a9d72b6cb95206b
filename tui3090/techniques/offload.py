"""Activation offload: what blocks save for backward waits in pinned host memory instead of on the card.

The copies run on a stream of their own beside the computation: a block's activations leave when its forward has ended
and come back while the block behind it is in backward. The last two blocks' stay where they are, they would be back
before they had left. Nothing here waits on the host; where the bus is too slow, the card's computation waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tui3090.settings import Settings
from tui3090.techniques.blocks import forward_replaced

if TYPE_CHECKING:
    from tui3090.techniques import Machine

LEAST = 1 << 20
"""Bytes below which a storage stays: its copy would cost more than it saves."""
STAY = 2
"""Last blocks whose activations stay."""
HOST_SHARE = 0.5
"""Of the host's free memory that may be pinned; what is more stays on the card."""


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """It needs a card to take memory off, and blocks to follow."""
    if not settings.offload:
        return None
    if not machine.cuda:
        return "Offload needs an NVIDIA card to move activations off, and training runs on the CPU."
    if machine.blocks <= STAY:
        return f"Offload needs more than {STAY} blocks to follow: give Recipe(blocks=[...])."
    return None


@dataclass(slots=True, eq=False)
class _Parcel:
    """A storage that backward wants: on the card, in host memory, or both."""

    nbytes: int
    here: torch.UntypedStorage | None
    host: Tensor | None = None
    """[nbytes], uint8, pinned."""


@dataclass(slots=True, eq=False)
class _Block:
    """What one block has saved."""

    travels: bool
    parcels: dict[tuple[int, int], _Parcel] = field(default_factory=dict)
    """By the storage's address and version, while both ends of its life are ours to see: until they are sent."""
    sent: list[_Parcel] = field(default_factory=list)
    left: torch.cuda.Event | None = None
    """Their copies to the host have ended."""
    back: torch.cuda.Event | None = None
    """Their copies to the card have ended; None: not fetched, or waited for."""


@dataclass(slots=True, eq=False)
class _Saved:
    """What autograd keeps of a tensor instead of itself."""

    block: int
    parcel: _Parcel
    like: tuple[torch.dtype, torch.Size, tuple[int, ...], int]
    """dtype, size, stride and offset."""


class Offload:
    """Sends what a model's blocks save for backward to host memory, and fetches it. On the CPU a copy like any other,
    so that the policy can be tested there."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.say: Callable[[str, str], None] = lambda text, level: None
        """Takes a sentence for the log, and its level."""
        self.travelled = 0
        """Bytes that the last forward sent to the host."""
        self._model, self._pieces, self._device = model, list(blocks), device
        self._last = {id(piece) for piece in self._pieces[-STAY:]}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staying: set[int] = set()
        """Addresses of parameters and buffers."""
        self._blocks: list[_Block] = []
        self._arguments: set[int] = set()
        """Addresses of what the block before was called with."""
        self._shared: set[int] = set()
        """Of that, what this one was called with too: a mask, say. It is on the card for all of them."""
        self._pinned: dict[int, list[Tensor]] = defaultdict(list)
        """By their size: free buffers."""
        self._lent: list[Tensor] = []
        self._room = 0
        """Bytes that may still be pinned."""
        self._full = self._told = False

    @contextmanager
    def in_force(self, settings: Settings) -> Iterator[None]:
        """What the blocks save for backward travels, if `settings` say so. Must stay entered until backward is over,
        and be entered after other replacements of the blocks' forwards: of a checkpointed block the inputs travel."""
        if not settings.offload:
            self.release()
            yield
            return
        if not self._staying:
            self._room = int(psutil.virtual_memory().available * HOST_SHARE)
            held = (*self._model.parameters(), *self._model.buffers())
            self._staying = {tensor.untyped_storage().data_ptr() for tensor in held}
        try:
            with ExitStack() as undo:
                for piece in self._pieces:
                    undo.enter_context(forward_replaced(piece, partial(self._run, piece, piece.forward)))
                yield
            self._tell()
        finally:
            self._forget()

    def release(self) -> None:
        """Give the host memory back."""
        if not self._pinned:
            return
        if self._stream is not None:
            self._stream.synchronize()  # no hot path: it was switched off
        self._pinned.clear()
        self._staying.clear()
        self._full = self._told = False
        if self._device.type == "cuda":
            with suppress(AttributeError):  # torch's own cache of pinned memory
                torch._C._host_emptyCache()

    # forward

    def _run(self, piece: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's forward, its saved tensors in a group of their own."""
        number = len(self._blocks)
        self._let_go(number - 2)
        self._blocks.append(_Block(travels=id(piece) not in self._last))
        arguments = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._shared, self._arguments = arguments & self._arguments, arguments
        with saved_tensors_hooks(partial(self._pack, number), self._unpack):
            result = forward(*args, **kwargs)
        self._send(self._blocks[number])
        return result

    def _pack(self, number: int, tensor: Tensor) -> Tensor | _Saved:
        storage, block = tensor.untyped_storage(), self._blocks[number]
        address = storage.data_ptr()
        stays = address in self._staying or address in self._shared or storage.nbytes() < LEAST
        if stays or type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != self._device:
            return tensor
        key = (address, tensor._version)
        parcel = block.parcels.get(key)
        if parcel is None:
            parcel = block.parcels[key] = _Parcel(storage.nbytes(), storage)
        like = (tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return _Saved(number, parcel, like)

    def _send(self, block: _Block) -> None:
        """The block's forward is enqueued: copy what it saved to the host, behind it and beside what comes."""
        parcels = list(block.parcels.values())
        block.parcels.clear()
        if not block.travels:
            return
        for parcel in parcels:
            parcel.host = self._buffer(parcel.nbytes)
        block.sent = [parcel for parcel in parcels if parcel.host is not None]
        self.travelled += sum(parcel.nbytes for parcel in block.sent)
        with self._beside():
            for parcel in block.sent:
                assert parcel.here is not None
                assert parcel.host is not None
                parcel.host.copy_(self._bytes(parcel.here), non_blocking=True)
        block.left = self._mark()

    def _let_go(self, number: int) -> None:
        """The card's memory of a block whose copies had the time of the block after it."""
        if number < 0:
            return
        block = self._blocks[number]
        self._wait(block.left)
        for parcel in block.sent:
            parcel.here = None

    # backward

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        block = self._blocks[saved.block]
        self._fetch(saved.block)
        self._fetch(saved.block - 1)  # comes while this one computes
        self._wait(block.back)
        block.back = None
        assert saved.parcel.here is not None
        dtype, size, stride, offset = saved.like
        empty = torch.empty(0, dtype=dtype, device=self._device)
        return empty.set_(saved.parcel.here, offset, size, stride)

    def _fetch(self, number: int) -> None:
        """Begin to copy back what a block sent. From now on only autograd holds it: it is freed when it was used."""
        if number < 0 or not self._blocks[number].sent:
            return
        block = self._blocks[number]
        gone = [parcel for parcel in block.sent if parcel.here is None]
        block.sent = []
        for parcel in gone:  # in the computation's own memory: it is that stream which frees it
            parcel.here = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        with self._beside():
            for parcel in gone:
                assert parcel.here is not None
                assert parcel.host is not None
                self._bytes(parcel.here).copy_(parcel.host, non_blocking=True)
        block.back = self._mark()

    # memory and streams

    def _buffer(self, nbytes: int) -> Tensor | None:
        """Host memory for a parcel until the next forward; None: there is no more. The copies out of it and the next
        ones into it are on one stream, so it can be lent again without a wait."""
        free = self._pinned[nbytes]
        if not free:
            try:
                if nbytes > self._room:
                    raise RuntimeError
                free.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None))
            except RuntimeError:  # the system's may be that it pins no more
                self._room, self._full = 0, True
                return None
            self._room -= nbytes
        buffer = free.pop()
        self._lent.append(buffer)
        return buffer

    def _forget(self) -> None:
        """Nothing of this forward is wanted any more."""
        if self._stream is not None and self._blocks:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._blocks, self._arguments, self._shared, self.travelled = [], set(), set(), 0
        for buffer in self._lent:
            self._pinned[buffer.numel()].append(buffer)
        self._lent.clear()

    def _tell(self) -> None:
        """The price, once."""
        if self._told or not self._blocks:
            return
        self._told = True
        if self.travelled:
            text = f"offload: {self.travelled / 2**30:.2f} GiB of activations go to pinned host memory and back with "
            self.say(text + "each micro-batch", "info")
        elif not self._full:
            self.say(f"offload has nothing to move: no block saves {LEAST >> 20} MiB or more at once", "info")
        if self._full:
            self.say("offload: the host has no memory to pin for more: the rest stays on the card", "warning")

    def _bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the copies' stream, behind what is enqueued on the computation's."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _mark(self) -> torch.cuda.Event | None:
        return self._stream.record_event() if self._stream is not None else None

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
