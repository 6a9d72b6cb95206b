"""CUDA graph replay: a step's kernels recorded once for each shape, then launched together.

`Replay` wraps `Step`: two captures for a key, *first* (begins a window's gradients) and *next* (adds to them), over one
set of gradients, and the update apart, so that accumulation, learning rate and pausing need no new capture. The first
key's backward makes that set, as eager's does; other keys' zero it and add, for they must write to the same addresses.
A key is captured when it is seen for the second time: the first time runs eagerly, which makes the optimizer's state,
warms the libraries up, keeps a second real batch to check the capture with, and never captures a shape that comes once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from tui3090 import garbage
from tui3090.settings import Settings
from tui3090.techniques.capture import cleared_up, copied, fill, own_workspaces, reason_of, restored, room, trained_in
from tui3090.techniques.masks import MaskAnswers

if TYPE_CHECKING:
    from tui3090.feed import MicroBatch
    from tui3090.step import InFlight, Step
    from tui3090.techniques import Machine

SHAPES = 8
"""Keys that are captured at the most; further ones run eagerly."""
TOLERANCE, AMP_TOLERANCE = 1e-5, 1e-2
"""How far replay's loss and gradient norm may be from eager's, relatively."""
EAGER_UPDATES = 5
"""In a row beside graphs, after which it is told that the optimizer's step runs outside of them."""
ATTEMPTS = 3
"""Failed captures after which the technique is given up for this model."""
UNEVEN = "it trains other parameters for one batch shape than for another"
"""Why it is given up at once: a graph zeroes the gradients that it knows; another shape's would be stepped again."""

Key = tuple[Any, ...]


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """CUDA graphs need CUDA."""
    if settings.graph and not machine.cuda:
        return "CUDA graph replay needs an NVIDIA card, and training runs on the CPU."
    return None


class NotFinite(Exception):
    """The batches of a check overflowed: nothing can be compared, the next window may try again."""


@dataclass(slots=True)
class _Capture:
    """The graphs of one key."""

    static: Any
    """The batch whose memory the graphs read."""
    first: torch.cuda.CUDAGraph
    next: torch.cuda.CUDAGraph


class Replay:
    """Runs a `Step` by graph replay where it can, eagerly where it can't; has the step's own methods."""

    def __init__(
        self, step: Step, quiet: Callable[[], AbstractContextManager[None]], say: Callable[[str], None]
    ) -> None:
        self.step = step
        self._quiet = quiet
        """Entered during a capture: other threads of ours make no CUDA call meanwhile."""
        self._say = say
        self._pool: Any = None
        self._captures: dict[Key, _Capture] = {}
        self._seen: dict[Key, MicroBatch] = {}
        self._refused: set[Key] = set()
        self._update: torch.cuda.CUDAGraph | None = None
        self._update_key: Key = ()
        self._update_captures = 0
        self._eager_updates, self._outside_told = 0, False
        self._trained: set[Tensor] = set()
        """The parameters that every captured batch gives a gradient."""
        self._touched: set[Tensor] = set()
        """Those that the window has given one so far."""
        self.pool_bytes = 0
        """What the graphs keep for their activations and no tensor holds: reserved by the allocator, not allocated."""
        self.given_up = ""
        """Why no capture is tried any more, a sentence; empty: they are."""

    @property
    def live(self) -> bool:
        """Whether there are graphs, which keep their activations' memory."""
        return bool(self._captures) or self._update is not None

    def release(self, within_window: bool = False) -> None:
        """Drop every graph and give its memory back; what is still wanted is captured again when it comes.

        `within_window`: the gradients so far are still wanted, and leave the graphs' memory for their own.
        """
        had = self.live
        self._captures.clear()
        self._seen.clear()
        self._update, self._update_key, self._update_captures = None, (), 0
        self._pool, self.pool_bytes = None, 0
        self.step.keep_gradients = False
        if had:
            torch.cuda.synchronize(self.step.device)  # nothing may still be replaying; this is no step's hot path
            for parameter in self.step.parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone() if within_window else None
            garbage.collect()
            torch.cuda.empty_cache()

    def make_room(self, within_window: bool = False) -> None:
        """Before an eager pass: release the graphs if what they hold may be missed."""
        if not self.live:
            return
        if room(self.step.device) < self.pool_bytes:
            self.release(within_window)
            self._say("graphs released to make room for an eager pass; they are captured again after it")

    # what the trainer calls, as on Step

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Capture the keys of this window that were seen in an earlier one."""
        self._touched = set()
        for micro in micro_batches:
            key = self._key(micro)
            if key in self._captures or key in self._refused or self.given_up:
                continue
            if key in self._seen and len(self._captures) < SHAPES:
                self._try_capture(key, micro, self._seen.pop(key))
        for micro in micro_batches:
            key = self._key(micro)
            if key not in self._captures and key not in self._refused and len(self._seen) < SHAPES:
                self._seen[key] = micro

    def accumulate(self, micro: MicroBatch, share: float, first: bool) -> None:
        """As `Step.accumulate`."""
        capture = self._captures.get(self._key(micro))
        if capture is None:
            self.make_room(within_window=not first)
            self._accumulate_eagerly(micro, share, first)
            return
        self.step.mark("copy")
        self.step.set_share(share)
        fill(capture.static, micro.batch if micro.ready is None else self.step.place(micro))
        self.step.mark("graph")
        (capture.first if first else capture.next).replay()
        self._touched |= self._trained
        self.step.mark("other")

    def _accumulate_eagerly(self, micro: MicroBatch, share: float, first: bool) -> None:
        """Beside graphs, which zero the gradients that they know, and no others: all batches must train the same."""
        if not self.step.keep_gradients:
            self.step.accumulate(micro, share, first)
            return
        with trained_in(self.step.parameters) as trained:
            self.step.accumulate(micro, share, first)
        self._touched |= trained
        if trained != self._trained:
            for parameter in self.step.parameters:
                if parameter not in self._touched:
                    parameter.grad = None  # as if no graph had ever kept it
            self.release(within_window=True)
            self.given_up = f"Graph replay is given up for this model: {UNEVEN}"
            self._say(self.given_up)

    def update(self) -> None:
        """As `Step.update`."""
        self.step.set_lr()
        key = self._key_of_update()
        if key and key == self._update_key:
            if self._update is None:
                self._update = self._capture_update()
            if self._update is not None:
                self._update.replay()
                self._eager_updates = 0
                return
        elif self._update is not None:
            self._update = None
            self._update_captures += 1
        self._update_key = key
        self.step.apply()
        self._tell_outside()

    def _tell_outside(self) -> None:
        """Say why the update keeps running eagerly, once."""
        self._eager_updates = self._eager_updates + 1 if self._captures else 0
        if self._eager_updates < EAGER_UPDATES or self._outside_told:
            return
        self._outside_told = True
        reason = "more than its rate changes from step to step, as betas do under OneCycleLR"
        if not self.step.waits_for_nothing:
            name = type(self.step.optimizer).__name__
            reason = f"{name} waits on the host to learn whether the gradient is finite"
        elif self._hooked():
            reason = "the recipe hooked functions of its own to it"
        self._say(f"the optimizer's step runs outside the graph: {reason}")

    def _hooked(self) -> bool:
        optimizer: Any = self.step.optimizer
        return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)

    def report(self) -> InFlight:
        """As `Step.report`."""
        return self.step.report()

    def replays(self, micro: MicroBatch) -> bool:
        """Whether this micro-batch would run by replay."""
        return self._key(micro) in self._captures

    def captures(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Whether running these would capture something first."""
        keys = {self._key(micro) for micro in micro_batches}
        new = keys - self._captures.keys() - self._refused
        if not self.given_up and len(self._captures) < SHAPES and new & self._seen.keys():
            return True
        update = self._key_of_update()
        return bool(update) and update == self._update_key and self._update is None

    # keys: everything that a kernel could see

    def _key(self, micro: MicroBatch) -> Key:
        from tui3090.feed import leaves

        settings = self.step.settings
        shapes = tuple(
            (path, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (path, repr(leaf))
            for path, leaf in leaves(micro.batch)
        )
        kernels = (settings.amp, settings.checkpointing, settings.tf32, settings.compile)
        return (*kernels, self.step.model.training, shapes)

    def _key_of_update(self) -> Key:
        """Empty: the update can't be captured, for its optimizer decides on the host or runs hooks of the recipe's."""
        optimizer: Any = self.step.optimizer
        if not self.step.waits_for_nothing or self._hooked() or self.given_up or self._update_captures >= ATTEMPTS:
            return ()
        if not self.step.keep_gradients:
            return ()  # nothing is replayed, so the gradients have no fixed address
        with_gradient = tuple(gradient.data_ptr() for gradient in self.step.gradients())
        constants = tuple(
            tuple((name, value) for name, value in group.items() if name not in ("lr", "params", "initial_lr"))
            for group in optimizer.param_groups
        )
        return (self.step.scales, with_gradient, constants)

    # capturing

    def _try_capture(self, key: Key, micro: MicroBatch, earlier: MicroBatch) -> None:
        try:
            self._captures[key] = self._capture(micro, earlier)
        except NotFinite:
            return
        except Exception as error:
            self._refused.add(key)
            reason = reason_of(error)
        else:
            return
        # out of the except block: its traceback held the failed capture's tensors
        self.release()
        self._say(f"graph replay is not used for this batch shape: {reason}")
        if len(self._refused) >= ATTEMPTS:
            self.given_up = f"Graph replay is given up for this model: {reason}"

    def _capture(self, micro: MicroBatch, earlier: MicroBatch) -> _Capture:
        """Both graphs of a key, checked: replay must give the loss and gradient norm that eager gave on two batches."""
        step, device = self.step, self.step.device
        batches = [step.place(micro), step.place(earlier)]
        static = copied(batches[0])
        step.set_share(1.0)
        masks = MaskAnswers(batches[0])
        with restored(step.model, device) as rewind:
            with trained_in(step.parameters) as trained:
                expected = [self._eager(batch, rewind, masks) for batch in batches]
            if self._captures and trained != self._trained:
                raise RuntimeError(UNEVEN)
            if not torch.stack(expected).isfinite().all():
                raise NotFinite
            if not self._captures:
                step.drop_gradients()  # this graph's backward makes them, in the graphs' memory
            with masks.given():
                first = self._record(lambda: step.forward_backward(static, first=True))
            step.keep_gradients = True
            with masks.given():
                following = self._record(lambda: step.forward_backward(static, first=False))
            capture = _Capture(static, first, following)
            for batch, wanted in zip(batches, expected):
                rewind()
                fill(static, batch)
                capture.first.replay()
                self._compare(wanted)
        self._measure_pool()
        self._trained = trained
        return capture

    def _measure_pool(self) -> None:
        """By the allocator's list of segments, which is too long to be read often."""
        self.pool_bytes = sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )

    def _eager(self, batch: Any, rewind: Callable[[], None], masks: MaskAnswers) -> Tensor:
        rewind()
        with masks.noted():
            self.step.forward_backward(batch, first=True)
        return self._figures()

    def _figures(self) -> Tensor:
        return torch.stack([self.step.loss, get_total_norm(self.step.gradients()).float()])

    def _compare(self, wanted: Tensor) -> None:
        got = self._figures()
        tolerance = TOLERANCE if self.step.settings.amp == "off" else AMP_TOLERANCE
        if not torch.allclose(got, wanted, rtol=tolerance, atol=1e-12):
            raise RuntimeError(
                f"replay gave loss {got[0].item():.7g} and gradient norm {got[1].item():.7g} where eager gave "
                f"{wanted[0].item():.7g} and {wanted[1].item():.7g}; something in the model or the loss changes from "
                "call to call on the host (Python's random, a counter)"
            )

    def _record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        # The graphs share one pool: of what one leaves there, a later one reads only the gradients, which are held.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.step.device)
        with (
            self._quiet(),
            cleared_up(self.step.device, self._pool),
            own_workspaces(),
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            run()
        return graph

    def _capture_update(self) -> torch.cuda.CUDAGraph | None:
        try:
            update = self._record(self.step.apply)
        except Exception as error:
            self._update_captures, self._outside_told = ATTEMPTS, True
            self._say(f"the optimizer's step runs outside the graph: {reason_of(error)}")
            return None
        self._measure_pool()
        return update
