"""Dataset -> windows of micro-batches on the device, and the clock of waiting for them.

Loader workers fetch by the index plan of sampling.py: a change of workers, or of the size of micro-batches, goes on
with what the plan has left, so that each sample comes exactly once in an epoch. Workers go on into the next epoch by
themselves, so that they are ahead at the turn too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate

from tui3090.loading import Batches, Loader, batch_size_of, own_sampler_of
from tui3090.recipe import Recipe, RecipeError, default_loss, padding_in, samples_in, tokens_in, weigh
from tui3090.sampling import DATA, ORDER, IndexPlan, SeededCollate, SeededDataset, mix
from tui3090.techniques.channels_last import has_channels


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
    epoch_start: bool = False
    """The first of its epoch: nothing was in flight while it was fetched."""

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

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        seed: int,
        workers: int = 0,
        prefetch: int = 0,
        epochs: int | None = None,
    ) -> None:
        self._recipe = recipe
        self._epochs = epochs
        """After so many nothing is fetched ahead any more; None: their number is not known."""
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
        self.batch_size = batch_size_of(given) if given is not None else recipe.batch_size
        """Samples in a micro-batch at the most; halved when the card's memory is full."""
        self._collate = recipe.collate_fn or (given.collate_fn if given is not None else default_collate)
        self._own_sampler = own_sampler_of(given)
        self._loader = Loader(self.dataset, self._collate, self.indexed, device.type == "cuda", self.notes, given)
        self._plan: IndexPlan | None = None
        self._whole_plan: IndexPlan | None = None
        """Before its batches were made smaller."""
        self._following: dict[int, IndexPlan] = {}
        """Of the epochs that the loader has gone on into by itself: as `_whole_plan` will be."""
        self._indices: Iterator[torch.Tensor] = iter(())
        self._ahead: deque[MicroBatch] = deque()
        self._side: torch.cuda.Stream | None = None
        self._fetched = 0
        """Samples of this epoch that came from the loader, those that wait included."""
        self._waited = 0.0
        self._starting = False
        self.whole_batch = self.batch_size
        """The recipe's `batch_size`."""
        self._halved = False
        self._longer = False
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
        made = self._following.pop(epoch, None) if not taken and self._goes_on() else None
        self.epoch, self.taken = epoch, taken
        if self.indexed:
            self._whole_plan = made if made is not None else self._make_plan(epoch)
            self._plan = self._cut(self._whole_plan)
            if not len(self._plan.ends):
                raise RecipeError("The training data gives no batch: its batch sampler ended at once.")
        if made is not None and self._plan is not None:
            self._indices, self._fetched = self._plan.after(0), 0
        else:
            self._restart()

    def _goes_on(self) -> bool:
        """Whether the loader has given all of this epoch, and what it has of the next one is still right."""
        return not self._ahead and next(self._indices, None) is None and self._loader.goes_on(self.workers)

    def state_dict(self) -> dict[str, Any] | None:
        """What an iterable dataset of this process tells of where it is; None: it is found again by counting.

        It tells nothing of use while it is ahead of the windows: batches wait, or a window was broken off.
        """
        tell = getattr(self.dataset, "state_dict", None)
        ahead = self._fetched != self.taken
        if self.indexed or ahead or tell is None or self._loader.own_stream is None:
            return None
        return {"dataset": tell(), "drawn": self._loader.own_stream.state_dict()}

    def resume(self, epoch: int, taken: int, batch_size: int, whole_batch: int, state: dict[str, Any] | None) -> None:
        """Go on in an epoch after `taken` samples, of which `state` tells where the dataset is.

        `batch_size` is that of a run whose batches were `whole_batch`: in the same run they stay as small as memory
        made them.
        """
        if batch_size < whole_batch == self.whole_batch:
            self.batch_size, self._halved = batch_size, True
        self._drop()
        if self.indexed:
            self.start_epoch(epoch, taken)
            return
        load = getattr(self.dataset, "load_state_dict", None)
        told = state if load is not None and not self.workers else None
        if told is not None and load is not None:
            load(told["dataset"])
        self.start_epoch(epoch)
        if told is not None and self._loader.own_stream is not None:
            self._loader.own_stream.load_state_dict(told["drawn"])
            self.taken = self._fetched = taken
            return
        if taken:
            self.notes.append(f"the first {taken} samples of this epoch are gone through to find where the run was")
        while self.taken < taken and (micro := self._fetch()) is not None:
            self.taken += micro.samples

    def _make_plan(self, epoch: int) -> IndexPlan:
        seed = mix(self.seed, ORDER, epoch)
        shuffle, drop_last = self._recipe.shuffle, False
        if self._own_sampler is not None:
            return IndexPlan.sampled(self._own_sampler, epoch, seed)
        if self._loader_given is not None:
            sampler: Any = self._loader_given.batch_sampler
            shuffle, drop_last = type(sampler.sampler) is RandomSampler, sampler.drop_last
        return IndexPlan.regular(len(self.dataset), self.whole_batch, drop_last, shuffle, seed)

    def _cut(self, plan: IndexPlan) -> IndexPlan:
        """As memory allows it."""
        return plan.at_most(self.batch_size) if self._halved else plan

    def _batches(self, plan: IndexPlan, epoch: int, taken: int) -> Batches:
        """What the loader fetches after the first `taken` samples of an epoch; by workers, epoch after epoch.

        A batch sampler of the recipe's own is asked only when its epoch begins.
        """
        while True:
            seed = mix(self.seed, DATA, epoch)
            for indices in plan.after(taken):
                yield seed, indices.tolist()
            epoch, taken = epoch + 1, 0
            if not self.workers or self._own_sampler is not None or epoch == self._epochs:
                return
            self._following[epoch] = whole = self._make_plan(epoch)
            plan = self._cut(whole)
            if not len(plan.ends):
                return

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
        begins = not self.taken
        self.taken += sum(micro.samples for micro in micro_batches)
        if self._plan is None and self.rows is not None and self.taken > self.rows:
            self._longer = True
            copies = f": each of {self.workers} workers goes through all of it" if self.workers > 1 else ""
            self.notes.append(
                f"train_data gives more samples than the {len(self.dataset)} of its length{copies}. How long the run "
                "is can't be told. Share its samples out by torch.utils.data.get_worker_info(), or use --workers 0."
            )
        return Window(micro_batches, waited, starting, begins)

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
        self._plan = self._cut(self._whole_plan)  # as the epochs to come are
        self._restart()
        return replace(window, micro_batches=micro_batches)

    def _collated_again(self, indices: torch.Tensor) -> MicroBatch:
        samples = SeededDataset(self.dataset).__getitems__((mix(self.seed, DATA, self.epoch), indices.tolist()))
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
        self._loader.close()
        self._drop()

    def _drop(self) -> None:
        """What was prepared ahead."""
        self._indices = iter(())
        self._following.clear()
        self._ahead.clear()

    def _fetch(self) -> MicroBatch | None:
        indices = next(self._indices, None)
        if indices is None and self._plan is not None:
            return None  # the loader's next batch is the next epoch's
        began = time.perf_counter()
        batch = self._loader.next(indices.tolist() if indices is not None else [])
        self._waited += time.perf_counter() - began
        if batch is None:
            return None
        self._loader.gave(sum(leaf.nbytes for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)))
        micro = self._micro_batch(batch, indices)
        self._fetched += micro.samples
        return micro

    def _micro_batch(self, batch: Any, indices: torch.Tensor | None) -> MicroBatch:
        weight, tokens, padding = weigh(self._recipe, batch), tokens_in(batch), padding_in(batch)
        samples = len(indices) if indices is not None else samples_in(batch)  # the plan knows, whatever collate did
        if self._recipe.loss is default_loss:
            batch = _without_full_mask(batch)
        return MicroBatch(batch, weight, samples, tokens, padding, indices)

    def _restart(self) -> None:
        """The loader goes on with what the windows have not taken; what was prepared ahead is fetched again."""
        self._drop()
        self._fetched = self.taken
        seed = mix(self.seed, DATA, self.epoch)
        anew = True
        if self._plan is not None:
            self._indices = self._plan.after(self.taken)
            anew = self._loader.load(self._batches(self._plan, self.epoch, self.taken), self.workers, seed)
        elif self._loader_given is not None:
            self._loader.stream(self._loader_given.batch_size, self._loader_given.drop_last, self.workers, seed)
        else:
            self._loader.stream(self.batch_size, False, self.workers, seed)
        if anew:
            # the run's first batch is fetched before there is a window whose time its wait could be a share of
            self._starting = bool(self.workers) or not (self.epoch or self.taken)


def _without_full_mask(batch: Any) -> Any:
    """A mask of ones says nothing, and transformers takes another attention kernel for it under capture."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor) and bool(mask.all()):
        return {key: value for key, value in batch.items() if key != "attention_mask"}
    return batch
