"""transformers' own Trainer on the same batches, seed and settings gives the same losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tests.conftest import Train
from tests.recipes.conftest import Make
from tui3090.feed import Feed
from tui3090.recipe import Recipe
from tui3090.records import StepRecord
from tui3090.settings import Settings

STEPS, TOLERANCE = 20, 1e-4

pytestmark = pytest.mark.usefixtures("one_thread")


def batches_of(recipe: Recipe, count: int) -> list[dict[str, torch.Tensor]]:
    """The batches of our run in their order, with the mask that Trainer's user would give."""
    feed = Feed(recipe, torch.device("cpu"), seed=0)
    batches: list[dict[str, torch.Tensor]] = []
    epoch = 0
    while len(batches) < count:
        feed.start_epoch(epoch)
        while (window := feed.next_window(1)) is not None:
            batches.append(window.micro_batches[0].batch)
        epoch += 1
    return batches[:count]


class Recording(Trainer):
    """A Trainer over ready batches that keeps each micro-batch's share of the loss."""

    def __init__(self, batches: list[dict[str, torch.Tensor]], **options: Any) -> None:
        super().__init__(train_dataset=batches, **options)
        self.losses: list[float] = []

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches as they are, in their order."""
        return DataLoader(self.train_dataset, batch_size=None, shuffle=False)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trainer's, its loss noted."""
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def trainers_losses(recipe: Recipe, accumulate: int, folder: Path, lr: float, decay: float) -> list[float]:
    model: Any = recipe.model
    if model.loss_type is None:
        # GPT2LMHeadModel, whose loss falls back to this one; Trainer shifts the labels it counts by this name alone
        model.loss_type = "ForCausalLM"
    torch.manual_seed(0)
    trainer = Recording(
        batches_of(recipe, STEPS * accumulate),
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            gradient_accumulation_steps=accumulate,
            learning_rate=lr,
            weight_decay=decay,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        ),
    )
    trainer.train()
    shares = torch.tensor(trainer.losses).view(STEPS, accumulate)
    return shares.sum(1).tolist()


@pytest.mark.parametrize(
    ("name", "accumulate", "options"),
    [
        ("bert", 1, {}),
        ("gpt2", 1, {}),
        ("gpt2", 3, {"pack": False}),
        ("lora", 1, {}),
        ("lora", 3, {}),
    ],
)
def test_twenty_steps_cost_what_transformers_trainer_says(
    train: Train, make: Make, tmp_path: Path, name: str, accumulate: int, options: dict[str, Any]
) -> None:
    options = {"batch_size": 4, "lr": 1e-3, "weight_decay": 0.1, "eval_data": "", **options}
    theirs = trainers_losses(make(name, **options), accumulate, tmp_path, options["lr"], options["weight_decay"])
    ours = replace(make(name, **options), scheduler="constant", eval_data=None, metrics=None, epochs=100)
    # an epoch's last window would be short where Trainer's goes on into the next one
    in_order = batches_of(ours, STEPS * accumulate)
    given = replace(ours, train_data=in_order, batch_size=1, shuffle=False, collate_fn=lambda batch: batch[0])
    ran = train(given, settings=Settings(accumulate=accumulate), steps=STEPS)
    assert ran.status == 0, ran.records[-1]
    assert len({record.loss for record in ran.of(StepRecord)}) == STEPS
    assert ran.losses[-1] < ran.losses[0]
    assert ran.losses == pytest.approx(theirs, abs=TOLERANCE)
