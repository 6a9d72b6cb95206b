"""Language modelling with a GPT-2-type model: it learns to go on with texts like yours.

    tui3090 run gpt2 -- --model gpt2 --data texts/              a model from the local cache, a folder of texts
    tui3090 run gpt2 -- --scratch small                         GPT-2's shape (124M) with random weights
    tui3090 new --from gpt2 FILE                                this file, to change

Needs `pip install 'tui3090[hf]'`. Nothing is downloaded during a run.
"""

from collections.abc import Iterator
from typing import Any, Literal

from tui3090 import Recipe, pretrained, rows, samples, textdata
from tui3090.recipe import RecipeError

WRITTEN = 40
"""Tokens that the model writes at each evaluation."""


def recipe(
    model: str = "gpt2",  # a folder, a .gguf file, or a name in the local cache
    scratch: Literal["no", "tiny", "small", "medium"] = "no",  # random weights in a published size instead of --model
    data: str = "",  # .txt, .jsonl, .csv, .parquet: a file, several (a,b), a folder; default: Python's help
    eval_data: str = "",  # the same to evaluate on; default: --held-out of the data
    held_out: float = 0.1,  # share of the texts to evaluate on
    text_column: str = "text",  # the column with the text; a .txt file is one text
    max_length: int = 256,  # tokens of a sequence
    pack: bool = True,  # texts one after the other, cut at --max-length; --no-pack: each by itself, padded
    pad_to_max: bool = False,  # pad every batch to --max-length, instead of a few lengths
    prompt: str = "The",  # what the model goes on with at each evaluation
    liger: bool = False,  # fused linear cross-entropy, where a large vocabulary's logits fill the card
    bad_rows: int = 100,  # rows that are skipped at the most
    batch_size: int = 8,  # sequences in a micro-batch
    lr: float = 5e-5,  # peak learning rate
    weight_decay: float = 0.01,  # of all weights but biases and norms
    optimizer: Literal["adamw", "adamw8bit"] = "adamw",  # adamw8bit: moments in 8 bits, by bitsandbytes
    epochs: int = 3,  # times through the data
) -> Recipe:
    """Fine-tune a causal language model on texts."""

    # rows -> texts
    def read(data: str | list[rows.Row]) -> tuple[list[str], list[str]]:
        return rows.read_items(data, lambda row: rows.text(row, text_column, "text-column"), bad_rows)

    train, notes = read(data or samples.reference())
    if eval_data:
        evaluation, more = read(eval_data)
        notes = notes + more
    elif round(len(train) * held_out) == 0:  # a few long texts, like a file or two
        train, evaluation = rows.split_ends(train, held_out)
    else:
        train, evaluation = rows.split(train, held_out)

    # the model
    if scratch == "no":
        source = pretrained.find(model)
        net, tokenizer = pretrained.causal_lm(source), pretrained.tokenizer(source)
    else:
        from tui3090.scratch import gpt2

        net, tokenizer = gpt2(scratch, train)
    pretrained.check_length(net, max_length)
    pretrained.leave_masks_out(net)
    if tokenizer.eos_token_id is None:
        raise RecipeError("The tokenizer has no token for a text's end: set its eos_token and save it again.")

    # texts -> tokens -> batches
    def tokens(texts: list[str]) -> textdata.Tokens:
        ids = [list(one) for one in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
        if pack:
            return textdata.cut(ids, max_length, tokenizer.eos_token_id)
        short = [[*one[: max_length - 1], tokenizer.eos_token_id] for one in ids]
        return textdata.Tokens(short, short)

    loss = pretrained.FusedLoss(net) if liger else pretrained.causal_loss

    def figures(model: Any, batches: Iterator[Any]) -> dict[str, float | str]:
        written = pretrained.write(model, tokenizer, tokenizer(prompt)["input_ids"], WRITTEN)
        return {"perplexity": pretrained.perplexity(loss, model, batches), "wrote": prompt + written}

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
        loss=loss,
        metrics=figures,
        optimizer=lambda model: pretrained.adamw(model, lr, weight_decay, optimizer),
        epochs=epochs,
        export=lambda folder: pretrained.save(net, tokenizer, folder),
        notes=notes if pack else [*notes, *textdata.cut_short(learned.lengths.tolist(), max_length)],
    )
