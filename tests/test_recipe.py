"""Recipe: what it accepts, what it says where a field can't be used, and how much a batch weighs."""

import subprocess
import sys
from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tui3090.recipe import Recipe, RecipeError, default_loss, harmless, samples_in, shifts_labels, tokens_in, weigh

DATA = TensorDataset(torch.zeros(4, 2))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class OwnIterator(Stream):
    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


class TinyForCausalLM(nn.Linear):
    """Named as transformers names its causal models."""


class Wrapped(nn.Module):
    """Wrapped as PEFT wraps a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_base_model(self) -> nn.Module:
        return self.inner


def make(**given: Any) -> Recipe:
    return Recipe(**{"model": nn.Linear(2, 1), "train_data": DATA} | given)


def frozen() -> nn.Module:
    return nn.Linear(2, 1).requires_grad_(False)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": None}, "model is None: give a torch.nn.Module."),
        ({"model": {}}, "model is a dict: give a torch.nn.Module."),
        (
            {"model": frozen()},
            "model, a Linear, has no trainable parameter: set requires_grad on those that are to train.",
        ),
        ({"train_data": "data.txt"}, "train_data is a str: give a torch Dataset or DataLoader."),
        ({"train_data": 3}, "train_data is an int: give a torch Dataset or DataLoader."),
        ({"train_data": {"train": DATA, "test": DATA}}, "train_data is a dict (train, test): give one of its splits."),
        (
            {"train_data": (x for x in range(3))},
            "train_data is a generator, which can be gone through once only: give a Dataset.",
        ),
        (
            {"train_data": Unsized()},
            "train_data, an Unsized, has no __len__: define it, or make it an IterableDataset.",
        ),
        (
            {"train_data": TensorDataset(torch.zeros(0, 2))},
            "train_data, a TensorDataset, is empty: look at the path and the filters it was made with.",
        ),
        (
            {"eval_data": []},
            "eval_data, a list, is empty: look at the path and the filters it was made with.",
        ),
        (
            {"metrics": lambda model, batches: {}},
            "metrics is given, but nothing to measure on: give eval_data too, or leave metrics out.",
        ),
        (
            {"optimizer": torch.optim.AdamW},
            "optimizer is the class AdamW: give a function that makes it once the model is on its device, like "
            "optimizer=lambda model: AdamW(model.parameters(), lr=...).",
        ),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)},
            "optimizer is the object SGD: give a function that makes it once the model is on its device, like "
            "optimizer=lambda model: SGD(model.parameters(), lr=...).",
        ),
        ({"batch_size": 0}, "batch_size is 0: give 1 or more."),
        ({"batch_size": 2.5}, "batch_size is 2.5: give a whole number, 1 or more."),
        ({"batch_size": True}, "batch_size is True: give a whole number, 1 or more."),
        ({"epochs": -1}, "epochs is -1: give 1 or more."),
        ({"max_steps": 0}, "max_steps is 0: give 1 or more."),
        ({"seed": -1}, "seed is -1: give 0 or more."),
        ({"clip_norm": 0}, "clip_norm is 0: give a number above 0, or None for no clipping."),
        ({"clip_norm": float("nan")}, "clip_norm is nan: give a number above 0, or None for no clipping."),
        ({"clip_norm": "1"}, "clip_norm is '1': give a number above 0, or None for no clipping."),
        ({"loss": None}, "loss is None: give a function, or leave it out."),
        ({"collate_fn": "pad"}, "collate_fn is a str: give a function, or leave it out."),
        ({"weight": 2}, "weight is an int: give a function, or leave it out."),
        (
            {"scheduler": "cosine"},
            "scheduler is 'cosine': give 'constant', a function of the optimizer and the planned steps, or leave it "
            "out for warm-up and linear decay.",
        ),
        ({"shuffle": 1}, "shuffle is 1: give True or False."),
        (
            {"blocks": [nn.Linear(2, 1)]},
            "blocks holds a Linear that is no module of the model: give layers of the model.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_field_that_cant_be_used_is_named_with_its_value_and_the_way_out(given, sentence):
    with pytest.raises(RecipeError) as caught:
        make(**given)
    assert str(caught.value) == sentence


def test_what_can_be_trained_on():
    for data in (DATA, [1, 2], torch.zeros(3, 2), Stream(), OwnIterator(), DataLoader(DATA), DataLoader(Stream())):
        assert make(train_data=data).train_data is data


def test_fields_that_are_fine():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    recipe = make(
        model=model,
        blocks=list(model),
        clip_norm=None,
        max_steps=1,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
    )
    assert recipe.blocks == [model[0], model[1]]
    assert (recipe.batch_size, recipe.epochs, recipe.seed, recipe.shuffle) == (8, 1, 0, True)
    assert make().clip_norm == 1.0


def test_importing_it_does_not_import_torch():
    code = "import sys, tui3090, tui3090.source; sys.exit('torch' in sys.modules or 'textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.text())
def test_a_sentence_is_one_printable_line(text):
    line = harmless(text)
    assert line.isprintable()
    assert len(line) <= 400
    assert str(RecipeError(text)) == line


def test_escape_codes_are_shown_not_obeyed():
    assert harmless("[b]x \x1b[31m\nred") == "[b]x \\x1b[31m red"


@pytest.mark.parametrize(
    "output",
    [{"loss": torch.tensor(2.0)}, SimpleNamespace(loss=torch.tensor(2.0)), (torch.tensor(2.0), "logits")],
)
def test_the_default_loss_is_the_models_own(output):
    assert default_loss(lambda **batch: output, {"x": 1}) == 2.0


def test_a_model_without_a_loss():
    with pytest.raises(RecipeError, match=r"^function returned no loss: put labels into the batch, or give Recipe"):
        default_loss(lambda **batch: {"logits": 1}, {"x": 1})
    with pytest.raises(RecipeError, match=r"^The default loss calls model\(\*\*batch\), but a batch is a list: "):
        default_loss(lambda **batch: 0, [1])


LABELS = torch.tensor([[5, -100, 7, 8], [-100, -100, 3, -100]])


def test_a_batch_weighs_its_labels():
    assert weigh(make(), {"labels": LABELS}) == 4
    assert weigh(make(), UserDict(labels=LABELS)) == 4
    assert weigh(make(), {"labels": torch.full((2, 3), -100)}) == 0


@pytest.mark.parametrize("model", [TinyForCausalLM(2, 1), Wrapped(TinyForCausalLM(2, 1))])
def test_a_causal_models_first_label_weighs_nothing(model):
    assert weigh(make(model=model), {"labels": LABELS}) == 3


def test_a_model_can_say_whether_it_shifts_labels():
    model = nn.Linear(2, 1)
    model.shifts_labels = True
    assert weigh(make(model=model), {"labels": LABELS}) == 3
    causal = TinyForCausalLM(2, 1)
    causal.shifts_labels = False
    assert not shifts_labels(causal)


def test_without_token_labels_a_batch_weighs_its_samples():
    assert weigh(make(), (torch.zeros(6, 2), LABELS)) == 6
    assert weigh(make(), {"labels": torch.tensor([0.5, -100.0, 2.0])}) == 3  # targets of a regression
    assert weigh(make(), {"labels": torch.tensor([1, 0, 2])}) == 3


def test_a_recipes_own_weight():
    assert weigh(make(weight=lambda batch: torch.tensor(2.5)), {}) == 2.5
    assert weigh(make(weight=lambda batch: 0), {}) == 0
    with pytest.raises(RecipeError, match=r"^weight returned -1: it must return a finite number, 0 or more\.$"):
        weigh(make(weight=lambda batch: -1), {})
    with pytest.raises(RecipeError, match=r"^weight returned None: it must return a number\.$"):
        weigh(make(weight=lambda batch: None), {})


@dataclass
class Pair:
    x: torch.Tensor
    y: int = 0


@dataclass(slots=True)
class Slotted:
    input_ids: torch.Tensor


Named = namedtuple("Named", "x y")


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(9)], 4),
        ((["a", "b"], torch.zeros(2)), 2),
        (Named(torch.zeros(5), 1), 5),
        ({"pixels": torch.zeros(99, 4), "input_ids": torch.zeros(2, 4)}, 2),  # patches of all images in one row
        ({"meta": {"x": torch.zeros(7, 1)}}, 7),
        (UserDict(x=torch.zeros(6)), 6),
        (Pair(torch.zeros(8, 1)), 8),
        (Slotted(torch.zeros(2, 3)), 2),
        (SimpleNamespace(x=torch.zeros(3, 1)), 3),
        (["one", "two"], 2),
        (torch.tensor(1.0), 1),
        ({}, 1),
        (None, 1),
    ],
)
def test_samples_of_a_batch(batch, samples):
    assert samples_in(batch) == samples


def test_tokens_of_a_batch():
    ids = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    assert tokens_in({"input_ids": ids, "attention_mask": mask}) == 5
    assert tokens_in({"input_ids": ids, "attention_mask": torch.ones(2, 1, 5, 5)}) == 10
    assert tokens_in({"input_ids": ids}) == 10
    assert tokens_in(Slotted(ids)) == 10
    assert tokens_in((ids, mask)) == 0
    assert tokens_in({"pixels": ids}) == 0
