"""Models of the published shapes with random weights, and tokenizers made of the data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.conftest import Train
from tests.recipes.conftest import Make
from tui3090 import pretrained, scratch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("name", "size"), [("bert", "tiny"), ("gpt2", "tiny")])
def test_random_weights_need_no_model(train: Train, make: Make, tmp_path: Path, name: str, size: str) -> None:
    ran = train(make(name, model="", scratch=size, batch_size=16, lr=1e-3, epochs=9), steps=15, folder=tmp_path)
    assert ran.status == 0, ran.records[-1]
    assert sum(ran.losses[-3:]) < sum(ran.losses[:3])
    assert AutoTokenizer.from_pretrained(tmp_path / "result").pad_token == ("[PAD]" if name == "bert" else None)


def test_a_tokenizer_made_of_the_data() -> None:
    _, words = scratch.bert("tiny", ["Read the file.", "read a zebra"], ["no", "yes"])
    said = words.convert_ids_to_tokens(words("Read zeal, read?")["input_ids"])
    assert said == ["[CLS]", "read", "z", "##e", "##a", "##l", "[UNK]", "read", "[UNK]", "[SEP]"]
    _, pieces = scratch.gpt2("tiny", ["Read the file."] * 9)
    assert pieces.decode(pieces("Read zeal, öffne")["input_ids"]) == "Read zeal, öffne"
    assert pieces.eos_token == "<|endoftext|>"


def test_tokenizers_made_of_the_data_are_the_same_in_every_process() -> None:
    script = (
        "from tui3090 import samples, scratch; texts = [r['text'] for r in samples.docstrings_by_package()[:200]]\n"
        "for made in (scratch.bert('tiny', texts, ['a', 'b'])[1], scratch.gpt2('tiny', texts)[1]):\n"
        "    print(sorted(made.get_vocab().items()))"
    )
    root = Path(pretrained.__file__).parents[1]
    run = [
        subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert run[0] == run[1]


@pytest.mark.parametrize(("size", "parameters"), [("base", 109_483_778), ("large", 335_143_938)])
def test_berts_published_sizes(size: str, parameters: int) -> None:
    with torch.device("meta"):
        model, _ = scratch.bert(size, ["a"], ["no", "yes"])
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(("size", "parameters"), [("small", 124_439_808), ("medium", 354_823_168)])
def test_gpt2s_published_sizes(size: str, parameters: int) -> None:
    with torch.device("meta"):
        model, _ = scratch.gpt2(size, ["a"])
    assert sum(p.numel() for p in model.parameters()) == parameters
