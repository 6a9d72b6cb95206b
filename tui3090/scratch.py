"""Models of the published shapes with random weights, and tokenizers trained on the data: for measuring without a file.

BERT's shapes are Devlin et al. 2018, table 1; GPT-2's are Radford et al. 2019, table 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from tui3090 import pretrained

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
SPECIAL = ("pad", "unk", "cls", "sep", "mask")
END = "<|endoftext|>"


def bert(size: str, texts: list[str], names: Sequence[str]) -> tuple[Any, Any]:
    """A BERT classifier and a WordPiece tokenizer; but for `tiny` the vocabulary has the published size, 30522."""
    shape = {"vocab_size": 2048 if size == "tiny" else 30522, **BERT[size]}
    config = BertConfig(num_labels=len(names), **shape, **pretrained.classes(names))
    made = BertWordPieceTokenizer(_vocabulary(texts, config.vocab_size))
    special = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, **special)
    return BertForSequenceClassification(config), tokenizer


def _vocabulary(texts: list[str], size: int) -> dict[str, int]:
    """The commonest letters and words; the library's own training gives another vocabulary each time."""
    normal, cut = BertNormalizer(), BertPreTokenizer()
    words = Counter(word for text in texts for word, _ in cut.pre_tokenize_str(normal.normalize_str(text)))
    letters: Counter[str] = Counter()
    for word, count in words.items():
        letters.update(dict.fromkeys(word, count))
    common = sorted(letters, key=lambda letter: (-letters[letter], letter))[: size // 4]
    pieces = [f"[{name.upper()}]" for name in SPECIAL]
    pieces += [*common, *(f"##{letter}" for letter in common), *sorted(words, key=lambda word: (-words[word], word))]
    return {piece: number for number, piece in enumerate(list(dict.fromkeys(pieces))[:size])}


def gpt2(size: str, texts: list[str]) -> tuple[Any, Any]:
    """A GPT-2 and a byte-level BPE tokenizer; but for `tiny` the vocabulary has the published size, 50257."""
    vocabulary = 2048 if size == "tiny" else 50257
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, bos_token=END, eos_token=END)
    end = tokenizer.eos_token_id
    config = GPT2Config(vocab_size=vocabulary, bos_token_id=end, eos_token_id=end, use_cache=False, **GPT2[size])
    return GPT2LMHeadModel(config), tokenizer
