"""What GPT-2 medium costs to fine-tune at 1024 tokens: its published shape, random weights, random tokens.

    tui3090 fit tests/bench/gpt2_medium.py --vram 24 -- --batch-size 4

What it learns is of no interest.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tui3090 import Recipe

SAMPLES = 64


def recipe(
    batch_size: int = 4,  # samples in a micro-batch
    tokens: int = 1024,  # in a sample
) -> Recipe:
    """Causal language modelling."""
    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, n_positions=1024)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # on a CPU drawing the weights takes seconds
        model = GPT2LMHeadModel(config)
    ids = torch.randint(config.vocab_size, (SAMPLES, tokens))
    return Recipe(
        model=model,
        train_data=[{"input_ids": sample, "labels": sample} for sample in ids],
        batch_size=batch_size,
    )
