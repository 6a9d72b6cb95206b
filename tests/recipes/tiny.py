"""Tiny models with random weights and tokenizers trained on the spot, in folders as save_pretrained leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tui3090 import samples, scratch

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WORDS = [text for text, _ in samples.docstrings_by_package()[:300]]


def bert(folder: Path, dropout: float = 0.0) -> Path:
    """Two layers of width 128, two classes."""
    torch.manual_seed(0)
    config = scratch.bert_config("tiny")
    config.update({"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout})
    return _saved(BertForSequenceClassification(config), scratch.bert_tokenizer(WORDS, config), folder)


def gpt2(folder: Path, dropout: float = 0.0) -> Path:
    """Four layers of width 128."""
    torch.manual_seed(0)
    config = scratch.gpt2_config("tiny")
    config.update({"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout})
    return _saved(GPT2LMHeadModel(config), scratch.gpt2_tokenizer(WORDS, config), folder)


def llama(folder: Path) -> Path:
    """Two layers of width 64 with grouped queries, and a chat template."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=2048, num_key_value_heads=2, max_position_embeddings=256, **shape)
    tokenizer = scratch.gpt2_tokenizer(WORDS, config)
    tokenizer.chat_template = CHATML
    return _saved(LlamaForCausalLM(config), tokenizer, folder)


def _saved(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def labelled(path: Path, count: int = 80) -> Path:
    """Texts of two classes as JSON lines."""
    chosen = [pair for pair in samples.docstrings_by_package() if pair[1] in ("email", "asyncio")]
    return _lines(path, [{"text": text, "label": label} for text, label in chosen[:: len(chosen) // count][:count]])


def texts(path: Path, count: int = 80) -> Path:
    """Texts of different lengths as JSON lines."""
    return _lines(path, [{"text": text} for text in WORDS[:count]])


def chats(path: Path, count: int = 80) -> Path:
    """Questions and answers as JSON lines."""
    return _lines(path, [{"messages": chat} for chat in samples.questions()[:count]])


def _lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
