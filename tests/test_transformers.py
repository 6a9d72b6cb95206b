"""transformers' and peft's models under checkpointing: the numbers of the run without it, to the bit.

No gradient is lost, whatever is frozen. The models are tiny, made from their configs, with dropout on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from tests.conftest import Train
from tui3090.commands import Change
from tui3090.recipe import Recipe
from tui3090.records import Changed, Event, StepRecord
from tui3090.settings import Settings
from tui3090.techniques.checkpointing import Checkpointing, find_blocks

WORDS, LENGTH = 40, 9
SPECIAL: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=4, n_head=2, n_embd=16, n_positions=16, **SPECIAL)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=4, num_attention_heads=2, hidden_size=16, intermediate_size=32, num_labels=3, **SPECIAL
    )
    return transformers.BertForSequenceClassification(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_size=16,
        intermediate_size=32,
        attention_dropout=0.1,
        **SPECIAL,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        num_layers=2, num_heads=2, d_model=16, d_kv=8, d_ff=32, decoder_start_token_id=0, **SPECIAL
    )
    return transformers.T5ForConditionalGeneration(config)


def lora() -> nn.Module:
    """Everything frozen but the adapters."""
    config = peft.LoraConfig(target_modules=["c_attn", "c_fc"], r=2, lora_dropout=0.1, fan_in_fan_out=True)
    return peft.get_peft_model(gpt2(), config)  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "bert": bert, "llama": llama, "t5": t5, "lora": lora}
BLOCKS = {"gpt2": 4, "bert": 4, "llama": 4, "t5": 4, "lora": 4}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().train()


def rows(name: str, count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Sequences with padding at the end of every third."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        ids = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        mask = torch.ones(LENGTH, dtype=torch.int64)
        if i % 3 == 0:
            mask[-3:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        if name == "bert":
            labels = torch.tensor(i % 3)
        found.append({"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels})
    return found


def loss_and_gradients(model: nn.Module, name: str, every: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = torch.utils.data.default_collate(rows(name, 4))
    model.zero_grad()
    torch.manual_seed(7)
    with Checkpointing(model, find_blocks(model)).in_force(every):
        loss = model(**batch).loss
        loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_those_without(name: str) -> None:
    model = made(name)
    assert len(find_blocks(model)) == BLOCKS[name]
    loss, gradients = loss_and_gradients(model, name, 0)
    assert gradients.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    again, _ = loss_and_gradients(model.eval(), name, 0)
    assert again != loss, "dropout must be on"
    model.train()
    for every in (1, 2):
        got_loss, got = loss_and_gradients(model, name, every)
        assert torch.equal(got_loss, loss)
        assert got.keys() == gradients.keys()
        assert all(torch.equal(got[n], wanted) for n, wanted in gradients.items())


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_really_computed_again(name: str) -> None:
    model = made(name)
    blocks, calls = find_blocks(model), [0]
    parts = [next(m for m in block.modules() if not list(m.children())) for block in blocks]
    for part in parts:
        part.register_forward_hook(lambda *given: calls.__setitem__(0, calls[0] + 1))
    loss_and_gradients(model, name, 0)
    plain, calls[0] = calls[0], 0
    loss_and_gradients(model, name, 1)
    assert calls[0] == 2 * plain >= 2 * len(blocks)


@pytest.mark.parametrize("name", MODELS)
def test_switched_on_and_off_in_mid_run(train: Train, name: str) -> None:
    def recipe() -> Recipe:
        return Recipe(model=made(name), train_data=rows(name), batch_size=2)

    script = {2: [Change("checkpointing", 1)], 4: [Change("checkpointing", 2)], 6: [Change("checkpointing", 0)]}
    plain, ran = train(recipe()), train(recipe(), script)
    assert ran.status == 0, ran.records[-1]
    assert len(ran.of(Changed)) == 3
    assert ran.losses == plain.losses
    assert len(ran.losses) == 8
    assert not [event for event in ran.of(Event) if event.level != "info"]
    born = made(name).state_dict()
    for weight, value in ran.weights.items():
        assert torch.equal(value, plain.weights[weight]), weight
    trained = {n for n, p in ran.trainer.job.step.model.named_parameters() if p.requires_grad}
    assert [n for n in trained if torch.equal(ran.weights[n], born[n])] == []
    assert ran.trainer.job.step.model.config.use_cache == made(name).config.use_cache


def test_the_key_value_cache_is_off_meanwhile_in_every_part() -> None:
    model = made("t5")  # whose decoder has a config of its own

    def cached() -> list[bool]:
        return [module.config.use_cache for module in model.modules() if hasattr(module, "config")]

    before = cached()
    assert any(before)
    with Checkpointing(model, find_blocks(model)).in_force(2):
        assert not any(cached())
    assert cached() == before


def test_accumulation_and_amp_with_it(train: Train) -> None:
    def recipe() -> Recipe:
        return Recipe(model=made("lora"), train_data=rows("lora"), batch_size=2)

    settings = Settings(accumulate=2, amp="bf16")
    plain, ran = train(recipe(), settings=settings), train(recipe(), settings=settings.having("checkpointing", 1))
    assert ran.losses == plain.losses
    assert [r.micro_batches for r in ran.of(StepRecord)] == [2] * 4
    for weight, value in ran.weights.items():
        assert torch.equal(value, plain.weights[weight]), weight
