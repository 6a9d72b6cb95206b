"""What BERT-large costs to fine-tune at 512 tokens: its published shape, random weights, random tokens.

    tui3090 fit tests/bench/bert_large.py --vram 24 -- --batch-size 8

What it learns is of no interest.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

from tui3090 import Recipe

SAMPLES = 64


def recipe(
    batch_size: int = 8,  # samples in a micro-batch
    tokens: int = 512,  # in a sample
) -> Recipe:
    """Classification into two classes."""
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # on a CPU drawing the weights takes seconds
        model = BertForSequenceClassification(config)
    ids = torch.randint(config.vocab_size, (SAMPLES, tokens))
    return Recipe(
        model=model,
        train_data=[{"input_ids": sample, "labels": torch.tensor(i % 2)} for i, sample in enumerate(ids)],
        batch_size=batch_size,
    )
