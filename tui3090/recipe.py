"""What a train.py gives: `Recipe`, and how much a batch of it weighs.

Importing this module does not import torch, so that a train.py's own imports decide when that happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader, Dataset

IGNORED = -100
"""The label that the loss leaves out (`ignore_index` of torch's cross entropy)."""
LONGEST_SENTENCE = 400
"""Characters of an error's text; exceptions of some libraries are pages."""


def harmless(text: str) -> str:
    """A user's text for the screen: one line of at most `LONGEST_SENTENCE` characters, control characters escaped."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in line)
    return line if len(line) <= LONGEST_SENTENCE else line[: LONGEST_SENTENCE - 1] + "…"


class RecipeError(Exception):
    """A train.py that can't be used; its text is one harmless line: what is wrong, where, and the way out."""

    def __init__(self, sentence: str) -> None:
        super().__init__(harmless(sentence))


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model computes itself: `loss` of what `model(**batch)` returns, or its first item.

    Raises RecipeError where there is none.
    """
    if not isinstance(batch, Mapping):
        raise RecipeError(
            f"The default loss calls model(**batch), but a batch is a {type(batch).__name__}: give Recipe a "
            "loss=lambda model, batch: ... of your own."
        )
    output = model(**batch)
    loss: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if loss is None:
        raise RecipeError(
            f"{type(model).__name__} returned no loss: put labels into the batch, or give Recipe a "
            "loss=lambda model, batch: ... of your own."
        )
    return loss  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """What is trained on what. `recipe()` of a train.py returns one; raises RecipeError where a field can't be used."""

    model: nn.Module
    """On the CPU, or where its weights already are (a quantized base)."""
    train_data: Dataset[Any] | DataLoader[Any]
    """A dataset, or a DataLoader whose dataset, batch sampler, collate function, start method of workers and
    `worker_init_fn` are taken over.

    Loader workers have a copy of it and go on from epoch to epoch. They start anew at an epoch's turn where it is seen
    to have changed: an attribute of the dataset, of one inside it or of the collate function was set, a list has grown,
    a tensor has changed. Items replaced in a list or an array they don't see: set the attribute anew. Those of an
    iterable dataset start anew each epoch. A batch sampler's `set_epoch`, or its sampler's, is called when its epoch
    begins."""
    loss: Callable[[Any, Any], Tensor] = default_loss
    """Of the model and a batch on the device: a scalar, the mean over what the batch weighs."""
    optimizer: Callable[[Any], Optimizer] | None = None
    """Makes the optimizer of the model, once that is on its device; None: AdamW, lr 5e-5, weight decay 0.01."""
    batch_size: int = 8
    """Samples in a micro-batch; a DataLoader brings its own."""
    epochs: int = 1
    """Times through the training data."""
    eval_data: Dataset[Any] | DataLoader[Any] | None = None
    """What the loss is measured on at each epoch's end and on request; None: nothing."""
    metrics: Callable[[Any, Iterator[Any]], dict[str, Any]] | None = None
    """Of the model and an iterator of eval batches on the device: floats by name; a str is text the model wrote.

    Called with the model in eval mode and without gradients."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; None: torch's default."""
    clip_norm: float | None = 1.0
    """The largest gradient norm of a step; None: no clipping."""
    seed: int = 0
    """Of the data's order and of dropout. The command's --seed takes its place, and seeds what recipe() draws too."""
    max_steps: int | None = None
    """Optimizer steps after which training ends before its last epoch; None: all epochs."""
    scheduler: Callable[[Any, int], LRScheduler] | Literal["constant"] | None = None
    """Makes the schedule of the optimizer and the planned optimizer steps; None: linear warm-up over 3 % of them,
    then linear decay to zero."""
    weight: Callable[[Any], float] | None = None
    """What a batch (on the CPU) weighs beside others; None: its labels other than -100, else its samples."""
    blocks: Sequence[nn.Module] | None = None
    """The layers that checkpointing works on, in their order; None: found in the model."""
    shuffle: bool = True
    """Whether a dataset is gone through in a new order each epoch."""
    export: Callable[[Path], None] | None = None
    """Writes what was learned into a folder, called when training is over; None: nothing is written."""
    notes: Sequence[str] = ()
    """What the user should know about the data, a sentence each; they come into the log."""

    def __post_init__(self) -> None:
        self._check_model()
        _check_data("train_data", self.train_data)
        if self.eval_data is not None:
            _check_data("eval_data", self.eval_data)
        elif self.metrics is not None:
            raise RecipeError("metrics is given, but nothing to measure on: give eval_data too, or leave metrics out.")
        _check_optimizer(self.optimizer)
        for name in ("batch_size", "epochs"):
            _check_whole(name, getattr(self, name), least=1)
        _check_whole("seed", self.seed, least=0)
        if self.max_steps is not None:
            _check_whole("max_steps", self.max_steps, least=1)
        self._check_clip_norm()
        for name in ("loss", "metrics", "collate_fn", "weight", "export"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "loss"):
                raise RecipeError(f"{name} is {_a(value)}: give a function, or leave it out.")
        if not callable(self.scheduler) and self.scheduler not in ("constant", None):
            raise RecipeError(
                f"scheduler is {self.scheduler!r}: give 'constant', a function of the optimizer and the planned steps, "
                "or leave it out for warm-up and linear decay."
            )
        if not isinstance(self.shuffle, bool):
            raise RecipeError(f"shuffle is {self.shuffle!r}: give True or False.")
        self._check_blocks()

    def _check_model(self) -> None:
        from torch import nn

        if not isinstance(self.model, nn.Module):
            raise RecipeError(f"model is {_a(self.model)}: give a torch.nn.Module.")
        if not any(p.requires_grad for p in self.model.parameters()):
            raise RecipeError(
                f"model, {_a(self.model)}, has no trainable parameter: set requires_grad on those that are to train."
            )

    def _check_clip_norm(self) -> None:
        value = self.clip_norm
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise RecipeError(f"clip_norm is {value!r}: give a number above 0, or None for no clipping.")

    def _check_blocks(self) -> None:
        if self.blocks is None:
            return
        own = {id(module) for module in self.model.modules()}
        for block in self.blocks:
            if id(block) not in own:
                raise RecipeError(f"blocks holds {_a(block)} that is no module of the model: give layers of the model.")


def _a(value: object) -> str:
    """What a value is, with its article."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RecipeError(f"{name} is {value!r}: give a whole number, {least} or more.")
    if not least <= value < 2**63:
        raise RecipeError(f"{name} is {value}: give {least} or more.")


def _check_data(name: str, data: object) -> None:
    """Whatever can be indexed and has a length, or can be gone through again and again, passes."""
    from torch.utils.data import Dataset

    if isinstance(data, Mapping):
        splits = ", ".join(str(key) for key in list(data)[:4])
        raise RecipeError(f"{name} is {_a(data)} ({splits}): give one of its splits.")
    if isinstance(data, (str, bytes)) or not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
        raise RecipeError(f"{name} is {_a(data)}: give a torch Dataset or DataLoader.")
    if isinstance(data, Iterator) and not isinstance(data, Dataset):
        raise RecipeError(f"{name} is {_a(data)}, which can be gone through once only: give a Dataset.")
    if not hasattr(data, "__len__"):
        if not hasattr(data, "__iter__"):
            raise RecipeError(f"{name}, {_a(data)}, has no __len__: define it, or make it an IterableDataset.")
        return
    try:
        length = len(data)
    except TypeError:  # a DataLoader over an iterable dataset
        return
    samples = getattr(data, "dataset", ())
    if length == 0 and getattr(data, "drop_last", False) and len(samples):
        raise RecipeError(
            f"{name}, {_a(data)}, gives no batch: its {len(samples)} samples make no full one, and drop_last is on."
        )
    if length == 0:
        raise RecipeError(f"{name}, {_a(data)}, is empty: look at the path and the filters it was made with.")


def _check_optimizer(optimizer: object) -> None:
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, type)):
        return
    name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    raise RecipeError(
        f"optimizer is the {'class' if isinstance(optimizer, type) else 'object'} {name}: give a function that makes "
        f"it once the model is on its device, like optimizer=lambda model: {name}(model.parameters(), lr=...)."
    )


def shifts_labels(model: Any) -> bool:
    """Whether the model compares each position with the label of the next one, so that the first label counts for
    nothing: causal language models of transformers by their class, others by an attribute `shifts_labels = True`."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper
    said = getattr(inner, "shifts_labels", None)
    if isinstance(said, bool):
        return said
    return any(cls.__name__.endswith(("ForCausalLM", "LMHeadModel")) for cls in type(inner).__mro__)


def weigh(recipe: Recipe, batch: Any) -> float:
    """What a batch on the CPU weighs: the recipe's `weight`, else its labels other than -100, after the shift of a
    causal model, else its samples. 0: it teaches nothing. Raises RecipeError where `weight` returns no such number."""
    if recipe.weight is not None:
        given = recipe.weight(batch)
        try:
            weight = float(given)
        except (TypeError, ValueError, RuntimeError):
            raise RecipeError(f"weight returned {_a(given)}: it must return a number.") from None
        if not 0 <= weight < math.inf:
            raise RecipeError(f"weight returned {weight:g}: it must return a finite number, 0 or more.")
        return weight
    labels = _named(batch).get("labels")
    # floating labels are targets of a regression, where -100 is a value like any other
    if not _is_tensor(labels) or labels.is_floating_point() or labels.dim() == 0:
        return float(samples_in(batch))
    if shifts_labels(recipe.model):
        labels = labels[..., 1:]
    return float((labels != IGNORED).sum())


def samples_in(batch: Any) -> int:
    """The samples of a batch: the first dimension of its token ids, its labels, or else its first tensor."""
    named = _named(batch)
    for value in (named.get("input_ids"), named.get("labels"), batch):
        length = _length(value)
        if length is not None:
            return length
    return 1


def tokens_in(batch: Any) -> int:
    """The tokens of a batch on the CPU, padding left out where an attention mask tells; 0: its data has no tokens."""
    named = _named(batch)
    ids = named.get("input_ids")
    mask = named.get("attention_mask")
    if _is_tensor(mask) and mask.dim() == 2:
        return int((mask != 0).sum())
    return int(ids.numel()) if _is_tensor(ids) else 0


def padding_in(batch: Any) -> int:
    """The padding of a batch on the CPU, in tokens: what its attention mask leaves out."""
    mask = _named(batch).get("attention_mask")
    return int((mask == 0).sum()) if _is_tensor(mask) and mask.dim() == 2 else 0


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    from torch import Tensor

    return isinstance(value, Tensor)


def _named(batch: Any) -> Mapping[str, Any]:
    """The batch's parts by name; empty where they have none."""
    if isinstance(batch, Mapping):
        return batch
    if is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {} if _is_tensor(batch) else getattr(batch, "__dict__", {})


def _length(value: Any) -> int | None:
    """The first dimension of the first tensor in a value, or the length of a list without any."""
    if _is_tensor(value):
        return int(value.shape[0]) if value.dim() else None
    parts = value if isinstance(value, (list, tuple)) else list(_named(value).values())
    for part in parts:
        if isinstance(part, (list, tuple, Mapping)) or _is_tensor(part) or is_dataclass(part):
            length = _length(part)
            if length is not None:
                return length
    return len(value) if isinstance(value, list) and value else None
