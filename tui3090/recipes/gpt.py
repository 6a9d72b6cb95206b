"""A byte-level GPT, in plain torch, on English that every Python carries: the help texts of the language.

It needs no download. The small size learns visibly within a minute on two CPU cores; gpt2 and gpt2-medium have the
shape of the published models (124M and 355M parameters) and are for a card. A token is a byte, so of their vocabulary
of 50304 rows 256 are used.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pydoc_data.topics import topics
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tui3090 import Recipe

BYTES = 256
PROMPT = "The "
WRITTEN = 200
"""Bytes that the model writes after the prompt at each evaluation."""
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Size:
    """The shape of a model, and what it trains well with."""

    layers: int
    heads: int
    width: int
    context: int
    """Tokens it sees at once."""
    vocabulary: int
    lr: float


SIZES = {
    "small": Size(layers=4, heads=4, width=128, context=128, vocabulary=BYTES, lr=1e-3),
    "gpt2": Size(layers=12, heads=12, width=768, context=1024, vocabulary=50304, lr=6e-4),
    "gpt2-medium": Size(layers=24, heads=16, width=1024, context=1024, vocabulary=50304, lr=3e-4),
}


class Windows(Dataset[dict[str, Tensor]]):
    """A text cut into windows that follow one another; the labels are the bytes one further on."""

    def __init__(self, text: bytes, context: int) -> None:
        if context < 1:
            raise ValueError(f"context is {context}: give 1 byte or more")
        self.text = torch.tensor(list(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}  # [context] each


class Block(nn.Module):
    """A transformer block that normalizes before attention and before the MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width], in and out
        x = x + self.drop(self.attention_out(self.attention(self.norm1(x))))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))

    def attention(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [batch, heads, context, width / heads] each
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return mixed.transpose(1, 2).reshape(batch, context, width)

    def drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the output layer shares the embedding's weights."""

    def __init__(self, size: Size, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = size.context
        self.dropout = dropout
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads, dropout) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.apply(self._start)
        for (
            name,
            weight,
        ) in self.named_parameters():  # what blocks add to the stream sums up with depth: start it smaller
            if name.endswith(("attention_out.weight", "down.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.layers))

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:  # [batch, context] -> [batch, context, vocabulary]
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        x = nn.functional.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.tokens.weight)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of the next byte, in nats; computed in fp32 under AMP too."""
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def metrics(model: nn.Module, batches: Iterator[dict[str, Tensor]]) -> dict[str, float | str]:
    """Bits per byte of the eval text, and a few lines of what the model writes."""
    nats, count = 0.0, 0
    for batch in batches:
        labels = batch["labels"].numel()
        nats += loss(model, batch).item() * labels
        count += labels
    return {"bits per byte": nats / count / math.log(2), "wrote": write(model)}


def write(model: Any, seed: int = 0) -> str:
    """`WRITTEN` bytes drawn from the model after `PROMPT`; its own generator leaves training's random numbers alone."""
    device = model.tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.tensor([list(PROMPT.encode())], device=device)
    for _ in range(WRITTEN):
        logits = model(ids[:, -model.context :])[:, -1, :BYTES].float()
        ids = torch.cat([ids, torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)], dim=1)
    return bytes(ids[0].tolist()).decode("utf-8", "replace")


def recipe(
    size: Literal["small", "gpt2", "gpt2-medium"] = "small",  # small is for a CPU, the others for a card
    batch_size: int = 8,  # windows in a micro-batch
    context: int | None = None,  # bytes in a window; by size: 128, 1024, 1024
    lr: float | None = None,  # peak learning rate; by size: 1e-3, 6e-4, 3e-4
    epochs: int = 8,  # times through the text
    dropout: float = 0.0,  # share of activations that training drops
) -> Recipe:
    """Train a GPT of some size to write like Python's help."""
    asked: dict[str, Any] = {"context": context, "lr": lr}
    shape = replace(SIZES[size], **{name: value for name, value in asked.items() if value is not None})
    text = "\n".join(topics.values()).encode()
    cut = len(text) * 9 // 10
    return Recipe(
        train_data=Windows(text[:cut], shape.context),
        eval_data=Windows(text[cut:], shape.context),
        model=GPT(shape, dropout),
        loss=loss,
        metrics=metrics,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=shape.lr, betas=(0.9, 0.95), weight_decay=0.1),
        batch_size=batch_size,
        epochs=epochs,
    )
