"""Real weights, from packages: what the recipes bert and lora do by themselves when the extra `models` is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.conftest import Ran, Train
from tui3090 import chat, pretrained, samples
from tui3090.recipes import bert, lora
from tui3090.records import Evaluated

pytestmark = [pytest.mark.models, pytest.mark.timeout(600)]


def figures(ran: Ran) -> dict[str, float]:
    """The metrics of the last evaluation."""
    words = ran.of(Evaluated)[-1].metrics.split("  ")
    return {name: float(value) for name, value in (word.rsplit(" ", 1) for word in words)}


def test_minilm_learns_which_package_a_docstring_is_from(train: Train, tmp_path: Path) -> None:
    """Ten classes: naming the commonest is right for 18 %, MiniLM after 60 steps of 16 for 54 %."""
    torch.manual_seed(0)
    ran = train(bert.recipe(max_length=64, lr=5e-4), steps=60, folder=tmp_path)
    assert ran.status == 0, ran.records[-1]
    told = figures(ran)
    assert told["commonest"] < 0.25
    assert told["accuracy"] > 0.45
    assert told["macro F1"] > 0.35
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "result", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "result", local_files_only=True)
    asked = tokenizer("Return the header value of an email message.", return_tensors="pt")
    with torch.no_grad():
        assert loaded.config.id2label[int(loaded(**asked).logits.argmax())] == "email"


def test_smollm2_learns_with_adapters_that_change_what_it_says(train: Train, tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = lora.recipe(batch_size=2, lr=1e-3, max_length=96, held_out=0.004)
    ran = train(recipe, steps=8, folder=tmp_path)
    assert ran.status == 0, ran.records[-1]
    assert sum(ran.losses[4:]) < sum(ran.losses[:4])
    assert ran.of(Evaluated)[-1].text.startswith("What does ")
    trained = ran.trainer.job.step.model
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "result", local_files_only=True)
    asked = chat.prompt_ids(tokenizer, samples.questions()[0]["messages"][:1])
    wrote = pretrained.write(trained, tokenizer, asked, 20)
    base = trained.unload()
    before = pretrained.write(base, tokenizer, asked, 20)
    with torch.no_grad():
        told_before = pretrained.perplexity(pretrained.causal_loss, base, iter(recipe.eval_data))  # type: ignore[arg-type]
    assert figures(ran)["perplexity"] < 0.6 * told_before
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "result"))
    assert pretrained.write(loaded, tokenizer, asked, 20) == wrote != before
