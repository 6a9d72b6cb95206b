"""Tiny models with random weights and tokenizers trained on the spot, in folders as save_pretrained leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tui3090 import samples, scratch

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WORDS = [row["text"] for row in samples.docstrings_by_package()[:300]]


def bert(folder: Path) -> None:
    """Two layers of width 128, two classes, no dropout."""
    torch.manual_seed(0)
    model, tokenizer = scratch.bert("tiny", WORDS, ["asyncio", "email"])
    _save(model, tokenizer, folder, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})


def gpt2(folder: Path) -> None:
    """Four layers of width 128, no dropout."""
    torch.manual_seed(0)
    model, tokenizer = scratch.gpt2("tiny", WORDS)
    _save(model, tokenizer, folder, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})


def llama(folder: Path) -> None:
    """Two layers of width 64 with grouped queries, and a chat template."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=2048, num_key_value_heads=2, max_position_embeddings=256, **shape)
    _, tokenizer = scratch.gpt2("tiny", WORDS)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    tokenizer.chat_template = CHATML
    _save(LlamaForCausalLM(config), tokenizer, folder, {})


def _save(model: Any, tokenizer: Any, folder: Path, config: dict[str, Any]) -> None:
    model.config.update(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def labelled(path: Path, count: int = 80) -> Path:
    """Texts of two classes as JSON lines."""
    chosen = [row for row in samples.docstrings_by_package() if row["label"] in ("email", "asyncio")]
    return _lines(path, chosen[:: len(chosen) // count][:count])


def texts(path: Path, count: int = 80) -> Path:
    """Texts of different lengths as JSON lines."""
    return _lines(path, [{"text": text} for text in WORDS[:count]])


def chats(path: Path, count: int = 80) -> Path:
    """Questions and answers as JSON lines."""
    return _lines(path, samples.questions()[:count])


def _lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
