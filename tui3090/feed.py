"""Dataset -> windows of micro-batches on the device, and the clock of waiting for them.

Loader workers fetch by the index plan of sampling.py: a change of workers, or of the size of micro-batches, goes on
with what the plan has left, so that each sample comes exactly once in an epoch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from tui3090 import shm
from tui3090.handover import Handover
from tui3090.recipe import Recipe, RecipeError, default_loss, padding_in, samples_in, tokens_in, weigh
from tui3090.sampling import DATA, ORDER, IndexPlan, OwnStream, SeededCollate, SeededDataset, mix
from tui3090.techniques.channels_last import has_channels
from tui3090.workers import WorkerDied, is_workers_death, ready


@dataclass(slots=True)
class MicroBatch:
    """What one forward and backward works on."""

    batch: Any
    """As collated, on the CPU (pinned for CUDA); on the device once prefetched."""
    weight: float
    """What it weighs in the window's mean: labels that count, or samples."""
    samples: int
    tokens: int
    """Without padding; 0 where the data has none."""
    padding: int = 0
    """Tokens of padding beside them."""
    indices: torch.Tensor | None = None
    """[samples], int64: which ones of the dataset; None: an iterable dataset's."""
    ready: torch.cuda.Event | None = None
    """Of a prefetched one: its copy has ended."""


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer step."""

    micro_batches: list[MicroBatch]
    wait_s: float
    """The host's wait for the loader, seconds."""
    loader_start: bool = False
    """The first of a loader whose workers had to start."""

    @property
    def weighed(self) -> list[MicroBatch]:
        """Those that teach something: one without any label is not run."""
        return [micro for micro in self.micro_batches if micro.weight]

    @property
    def weight(self) -> float:
        """What the whole window weighs."""
        return sum(micro.weight for micro in self.micro_batches)


def move(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """The batch on the device, copied without waiting where its tensors are pinned; what is no tensor stays.

    With `channels_last` its images are laid out like that, by the device.
    """
    if channels_last and has_channels(batch):
        return batch.to(device, non_blocking=True, memory_format=torch.channels_last)
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move(value, device, channels_last) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device, channels_last) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device, channels_last) for value in batch)
    return batch


def leaves(batch: Any) -> list[tuple[str, Any]]:
    """Every value in a batch with its path, in a fixed order."""
    if isinstance(batch, Mapping):
        return [(f".{key}{path}", leaf) for key in batch for path, leaf in leaves(batch[key])]
    if isinstance(batch, (list, tuple)):
        return [(f"[{i}]{path}", leaf) for i, value in enumerate(batch) for path, leaf in leaves(value)]
    return [("", batch)]


class Feed:
    """Gives the training thread its windows, an epoch at a time, and knows how many samples it has given."""

    def __init__(self, recipe: Recipe, device: torch.device, seed: int, workers: int = 0, prefetch: int = 0) -> None:
        self._recipe = recipe
        self._device = device
        self.seed = seed
        self.workers = workers
        self.prefetch = prefetch
        """Micro-batches copied to the device ahead of time."""
        self.channels_last = False
        """Whether images come to the device in torch.channels_last."""
        self.notes: list[str] = []
        """What the user should know about how data is loaded; whoever tells it empties the list."""
        source = recipe.train_data
        self._loader_given = source if isinstance(source, DataLoader) else None
        self.dataset: Any = source.dataset if isinstance(source, DataLoader) else source
        self.indexed = not isinstance(self.dataset, IterableDataset)
        given = self._loader_given
        self.batch_size = _batch_size(given) if given is not None else recipe.batch_size
        """Samples in a micro-batch at the most; halved when the card's memory is full."""
        self._collate = recipe.collate_fn or (given.collate_fn if given is not None else default_collate)
        self._plan: IndexPlan | None = None
        self._whole_plan: IndexPlan | None = None
        """Before its batches were made smaller."""
        self._iterator: Iterator[Any] = iter(())
        self._indices: Iterator[torch.Tensor] = iter(())
        self._ahead: deque[MicroBatch] = deque()
        self._own_stream: OwnStream | None = None
        self._side: torch.cuda.Stream | None = None
        self._fetched = 0
        """Samples of this epoch that came from the loader, those that wait included."""
        self._waited = 0.0
        self._starting = False
        self.whole_batch = self.batch_size
        """The recipe's `batch_size`."""
        self._halved = False
        self._longer = False
        self._handover: Handover | None = None
        self._largest = 0
        """Bytes of the largest batch so far."""
        self._shm_free: int | None = None
        """Of shared memory, before the workers came."""
        self._shm_told = 0
        """The number of workers for which there was too little of it."""
        self.epoch = 0
        self.taken = 0
        """Samples of this epoch that windows were given."""

    @property
    def rows(self) -> int | None:
        """Training samples; None: an iterable dataset without a length, or with one that was wrong."""
        try:
            return None if self._longer else len(self.dataset)
        except TypeError:
            return None

    def start_epoch(self, epoch: int, taken: int = 0) -> None:
        """Begin an epoch, or go on in it after `taken` samples. Raises RecipeError when it holds no batch."""
        self.epoch, self.taken = epoch, taken
        self._plan = self._whole_plan = self._make_plan(epoch) if self.indexed else None
        if self._plan is not None and self._halved:
            self._plan = self._plan.at_most(self.batch_size)
        if self._plan is not None and not len(self._plan.ends):
            raise RecipeError("The training data gives no batch: its batch sampler ended at once.")
        self._restart()

    def state_dict(self) -> dict[str, Any] | None:
        """What an iterable dataset of this process tells of where it is; None: it is found again by counting.

        It tells nothing of use while it is ahead of the windows: batches wait, or a window was broken off.
        """
        tell = getattr(self.dataset, "state_dict", None)
        ahead = self._fetched != self.taken
        if self.indexed or self.workers or ahead or tell is None or self._own_stream is None:
            return None
        return {"dataset": tell(), "drawn": self._own_stream.state_dict()}

    def resume(self, epoch: int, taken: int, batch_size: int, whole_batch: int, state: dict[str, Any] | None) -> None:
        """Go on in an epoch after `taken` samples, of which `state` tells where the dataset is.

        `batch_size` is that of a run whose batches were `whole_batch`: in the same run they stay as small as memory
        made them.
        """
        if batch_size < whole_batch == self.whole_batch:
            self.batch_size, self._halved = batch_size, True
        self._ahead.clear()
        if self.indexed:
            self.start_epoch(epoch, taken)
            return
        load = getattr(self.dataset, "load_state_dict", None)
        told = state if load is not None and not self.workers else None
        if told is not None and load is not None:
            load(told["dataset"])
        self.start_epoch(epoch)
        if told is not None and self._own_stream is not None:
            self._own_stream.load_state_dict(told["drawn"])
            self.taken = self._fetched = taken
            return
        if taken:
            self.notes.append(f"the first {taken} samples of this epoch are gone through to find where the run was")
        while self.taken < taken and (micro := self._fetch()) is not None:
            self.taken += micro.samples

    def _make_plan(self, epoch: int) -> IndexPlan:
        seed = mix(self.seed, ORDER, epoch)
        shuffle, drop_last = self._recipe.shuffle, False
        if self._loader_given is not None:
            sampler: Any = self._loader_given.batch_sampler
            if type(sampler) is not BatchSampler or type(sampler.sampler) not in (RandomSampler, SequentialSampler):
                return IndexPlan.sampled(sampler, epoch, seed)
            shuffle, drop_last = type(sampler.sampler) is RandomSampler, sampler.drop_last
        return IndexPlan.regular(len(self.dataset), self.whole_batch, drop_last, shuffle, seed)

    def peek(self) -> MicroBatch | None:
        """The next micro-batch, which the next window will begin with; None: the epoch is over."""
        if not self._ahead and (micro := self._fetch()) is not None:
            self._ahead.append(micro)
        return self._ahead[0] if self._ahead else None

    def set_workers(self, workers: int) -> None:
        """Load with so many processes from the next window on; an iterable dataset from the next epoch on."""
        self.workers = workers
        if self.indexed:
            self._restart()

    def batches_left(self) -> int | None:
        """Micro-batches that this epoch has left; None: unknown."""
        if self._plan is not None:
            return self._plan.batches_left(self.taken)
        return None if self.rows is None else max(0, -(-(self.rows - self.taken) // self.batch_size))

    def batches_per_epoch(self) -> int | None:
        """Micro-batches of a whole epoch; None: unknown."""
        if self._plan is not None:
            return len(self._plan.ends)
        return None if self.rows is None else -(-self.rows // self.batch_size)

    def epochs_done(self) -> float:
        """Epochs gone through, with the part of this one that was taken; whole ones where the length is unknown."""
        total = len(self._plan.order) if self._plan is not None else self.rows
        return self.epoch + (min(1.0, self.taken / total) if total else 0.0)

    def next_window(self, size: int) -> Window | None:
        """Up to `size` micro-batches, fewer at the epoch's end; None: the epoch is over."""
        micro_batches: list[MicroBatch] = []
        while len(micro_batches) < size:
            micro = self._ahead.popleft() if self._ahead else self._fetch()
            if micro is None:
                break
            micro_batches.append(micro)
        waited, self._waited = self._waited, 0.0
        starting, self._starting = self._starting, False
        if not micro_batches:
            return None
        self.taken += sum(micro.samples for micro in micro_batches)
        if self._plan is None and self.rows is not None and self.taken > self.rows:
            self._longer = True
            copies = f": each of {self.workers} workers goes through all of it" if self.workers > 1 else ""
            self.notes.append(
                f"train_data gives more samples than the {len(self.dataset)} of its length{copies}. How long the run "
                "is can't be told. Share its samples out by torch.utils.data.get_worker_info(), or use --workers 0."
            )
        return Window(micro_batches, waited, starting)

    @property
    def parts(self) -> int:
        """Micro-batches that a batch of the recipe's is run in: 1 unless memory was short."""
        return -(-self.whole_batch // self.batch_size)

    def halve(self, window: Window) -> Window | None:
        """The window's samples in micro-batches of half the size, collated again, and all that come later in such ones.

        None: they hold one sample each, or can't be fetched again because the dataset is iterable.
        """
        if self._plan is None or self._whole_plan is None or self.batch_size == 1:
            return None
        self.batch_size, self._halved = -(-self.batch_size // 2), True
        micro_batches = [
            self._collated_again(indices)
            for micro in window.micro_batches
            if micro.indices is not None
            for indices in micro.indices.tensor_split(-(-len(micro.indices) // self.batch_size))
        ]
        self._plan = self._whole_plan.at_most(self.batch_size)  # as the epochs to come are cut
        self._restart()
        return Window(micro_batches, window.wait_s, window.loader_start)

    def _collated_again(self, indices: torch.Tensor) -> MicroBatch:
        samples = self._seeded_dataset().__getitems__(indices.tolist())
        return self._micro_batch(SeededCollate(self._collate)(samples), indices)

    def look_ahead(self) -> None:
        """Fetch the next micro-batches and start their copies on a side stream, while the device computes."""
        while len(self._ahead) < self.prefetch:
            micro = self._fetch()
            if micro is None:
                return
            self._side = self._side or torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._side):
                micro.batch = self.moved(micro.batch)
                micro.ready = self._side.record_event()
            self._ahead.append(micro)

    def moved(self, batch: Any) -> Any:
        """A batch's tensors on the device, laid out as the model's are."""
        return move(batch, self._device, self.channels_last)

    def to_device(self, micro: MicroBatch) -> Any:
        """The micro-batch's tensors where the current stream can use them."""
        if micro.ready is None:
            return self.moved(micro.batch)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(micro.ready)
        for _, leaf in leaves(micro.batch):
            if isinstance(leaf, torch.Tensor):
                leaf.record_stream(stream)  # its memory must not be reused before this stream has read it
        return micro.batch

    def close(self) -> None:
        """End the workers."""
        self._iterator, self._indices = iter(()), iter(())
        self._ahead.clear()

    def _fetch(self) -> MicroBatch | None:
        began = time.perf_counter()
        try:
            with self._own_stream.drawn() if self._own_stream is not None else nullcontext():
                batch = next(self._iterator, None)
        except (RuntimeError, OSError, EOFError) as error:
            if not self.workers or not is_workers_death(error):
                raise
            awaited = next(self._indices, torch.empty(0)).tolist()
            raise WorkerDied(shm.worker_died(error, awaited)) from error
        self._waited += time.perf_counter() - began
        if batch is None:
            return None
        size = sum(leaf.nbytes for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
        if size > self._largest:
            self._largest = size
            self._look_at_shm()
        micro = self._micro_batch(batch, next(self._indices, None))
        self._fetched += micro.samples
        return micro

    def _look_at_shm(self) -> None:
        """Warn, once for a number of workers, if what they prepare has no room in shared memory."""
        if self.workers in (0, self._shm_told):
            return
        if sentence := shm.too_small(self.workers, self._largest, self._shm_free):
            self.notes.append(sentence)
            self._shm_told = self.workers

    def _micro_batch(self, batch: Any, indices: torch.Tensor | None) -> MicroBatch:
        weight, tokens, padding = weigh(self._recipe, batch), tokens_in(batch), padding_in(batch)
        samples = len(indices) if indices is not None else samples_in(batch)  # the plan knows, whatever collate did
        if self._recipe.loss is default_loss:
            batch = _without_full_mask(batch)
        return MicroBatch(batch, weight, samples, tokens, padding, indices)

    def _seeded_dataset(self) -> SeededDataset:
        return SeededDataset(self.dataset, mix(self.seed, DATA, self.epoch))

    def _restart(self) -> None:
        """A new loader for what the windows have not taken; what was prepared ahead is fetched again."""
        self.close()
        self._fetched = self.taken
        # the run's first batch is fetched before there is a window whose time its wait could be a share of
        self._starting = bool(self.workers) or not (self.epoch or self.taken)
        common: dict[str, Any] = {
            "num_workers": self.workers,
            "pin_memory": self._device.type == "cuda",
            # else every new loader draws from dropout's
            "generator": torch.Generator().manual_seed(mix(self.seed, DATA, self.epoch)),
        }
        self._own_stream = None
        if self.workers:
            self._shm_free = shm.free()
            self._look_at_shm()
            self._handover = self._handover or Handover(self.dataset, self._collate, self.indexed, self.notes)
            common |= {"multiprocessing_context": self._handover.context, "worker_init_fn": partial(ready, os.getpid())}
            common |= {"prefetch_factor": shm.BATCHES_A_WORKER}
        if self._plan is None:
            if self._loader_given is None:
                common |= {"batch_size": self.batch_size}
            else:
                common |= {"batch_size": self._loader_given.batch_size, "drop_last": self._loader_given.drop_last}
            if not self.workers:
                self._own_stream = OwnStream(mix(self.seed, DATA, self.epoch))
            self._iterator = iter(DataLoader(self.dataset, collate_fn=self._collate, **common))
            return
        plan, taken = self._plan, self.taken
        self._indices = plan.after(taken)
        dataset = self._seeded_dataset()
        if self.workers and self._handover is not None:
            dataset.dataset = self._handover.wrapped(self.dataset)
        self._iterator = iter(
            DataLoader(
                dataset,
                batch_sampler=(batch.tolist() for batch in plan.after(taken)),
                collate_fn=SeededCollate(self._collate),
                **common,
            )
        )


def _batch_size(loader: DataLoader[Any]) -> int:
    """A loader's own, or what its batch sampler says of itself; 1: it says nothing."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def _without_full_mask(batch: Any) -> Any:
    """A mask of ones says nothing, and transformers takes another attention kernel for it under capture."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor) and bool(mask.all()):
        return {key: value for key, value in batch.items() if key != "attention_mask"}
    return batch
