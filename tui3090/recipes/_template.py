"""What this trains, in a line.

    tui3090 run FILE                      train it
    tui3090 run FILE -- --lr 1e-3         with another value of a parameter of recipe()
    tui3090 run FILE -- --help            what parameters there are

As it stands it learns what kind of character (a capital, a digit, a symbol ...) goes by a Unicode name, in seconds on
a CPU. Put your data and your model in its place. No loop, no device and no technique belongs here: tui3090 has them.
"""

import unicodedata
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tui3090 import Recipe

CHARACTERS = [c for c in map(chr, range(0x3000)) if unicodedata.name(c, "")]
KINDS = sorted({unicodedata.category(c) for c in CHARACTERS})


class Names(Dataset[tuple[Tensor, int]]):
    """Names of characters as 64 bytes, and the number of their kind."""

    def __init__(self, characters: list[str]) -> None:
        self.characters = characters

    def __len__(self) -> int:
        return len(self.characters)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        character = self.characters[index]
        name = unicodedata.name(character).encode()[:64].ljust(64)
        return torch.tensor(list(name)), KINDS.index(unicodedata.category(character))


class Classifier(nn.Module):
    """Looks at five letters at a time and keeps, for each feature, where it is strongest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, 32)
        self.features = nn.Conv1d(32, width, kernel_size=5)
        self.kinds = nn.Linear(width, len(KINDS))

    def forward(self, names: Tensor) -> Tensor:  # [batch, 64] -> [batch, kinds]
        features = self.features(self.letters(names).transpose(1, 2))
        logits: Tensor = self.kinds(nn.functional.relu(features).amax(dim=2))
        return logits


def accuracy(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Share of characters whose kind is told right; tui3090 calls it in eval mode, without gradients."""
    right = torch.cat([model(names).argmax(1) == kinds for names, kinds in batches])
    return {"accuracy": right.float().mean().item()}


def recipe(
    lr: float = 2e-3,  # peak learning rate
    batch_size: int = 64,  # names in a micro-batch
    epochs: int = 5,  # times through the data
    width: int = 64,  # features of the classifier
) -> Recipe:
    """The parameters of this function are the options after -- on the command line."""
    held_out = CHARACTERS[::10]
    return Recipe(
        # any nn.Module, on the CPU; tui3090 takes it to the device
        model=Classifier(width),
        # a Dataset or a DataLoader; eval_data is gone through at each epoch's end and when you press e
        train_data=Names(sorted(set(CHARACTERS) - set(held_out))),
        eval_data=Names(held_out),
        # the mean loss of a batch; without it, model(**batch).loss as transformers' models have it
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        metrics=accuracy,
        # called once the model is on its device; without it, AdamW at 5e-5
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01),
        batch_size=batch_size,
        epochs=epochs,
        # What else there is, with its default:
        # collate_fn=None,   a function that makes a batch of a list of samples; None: torch's
        # clip_norm=1.0,     the largest gradient norm; None: no clipping
        # scheduler=None,    "constant", or a function of optimizer and planned steps; None: warm-up, linear decay
        # max_steps=None,    optimizer steps after which to end early
        # weight=None,       what a batch weighs, a function of it; None: its labels other than -100, else its samples
        # blocks=None,       the layers that checkpointing works on; None: found in the model
        # shuffle=True,      a new order each epoch
        # seed=0,            of the order and of dropout
        # export=None,       a function of a folder, to write into it what was learned when training is over
        # notes=(),          sentences on the data for the log
    )
