"""Models of the published shapes with random weights, and tokenizers trained on the data: for measuring without a file.

BERT's shapes are Devlin et al. 2018, table 1; GPT-2's are Radford et al. 2019, table 2.
"""

from __future__ import annotations

from typing import Any

from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer
from transformers import BertConfig, GPT2Config, PreTrainedTokenizerFast

BERT: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
GPT2: dict[str, dict[str, int]] = {
    "tiny": {"n_embd": 128, "n_layer": 4, "n_head": 4},
    "small": {},
    "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
}
END = "<|endoftext|>"


def bert_config(size: str) -> Any:
    """The shape of a BERT; its vocabulary is the published one's, 30522, for all but `tiny`."""
    return BertConfig(vocab_size=2048 if size == "tiny" else 30522, **BERT[size])


def bert_tokenizer(texts: list[str], config: Any) -> Any:
    """WordPiece, trained on the texts."""
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(texts, vocab_size=config.vocab_size, show_progress=False)
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **special)


def gpt2_config(size: str) -> Any:
    """The shape of a GPT-2; its vocabulary is the published one's, 50257, for all but `tiny`."""
    return GPT2Config(vocab_size=2048 if size == "tiny" else 50257, **GPT2[size])


def gpt2_tokenizer(texts: list[str], config: Any) -> Any:
    """Byte-level BPE, trained on the texts; the model's end token becomes the tokenizer's last."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=config.vocab_size, special_tokens=[END], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, bos_token=END, eos_token=END)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    return tokenizer
