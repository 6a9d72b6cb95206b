"""The recipes for transformers' models on a card: a plain loop's numbers, replay on padded shapes, AMP."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.conftest import Ran, Train
from tests.recipes.conftest import Make, make, tiny_folder  # noqa: F401 (fixtures)
from tests.reference import plain_loop
from tui3090 import assemble
from tui3090.commands import Change
from tui3090.feed import Feed
from tui3090.recipe import Recipe, RecipeError
from tui3090.records import Changed, Event, StepRecord
from tui3090.settings import Settings
from tui3090.techniques import offload
from tui3090.techniques.graph import SHAPES

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.timeout(300),
]

LR, WINDOWS = 1e-3, 30
OPTIONS: dict[str, dict[str, Any]] = {
    "bert": {"batch_size": 16},
    "gpt2": {"batch_size": 8, "pack": False},
    "lora": {"batch_size": 8},
}


def recipe(make: Make, name: str) -> Recipe:  # noqa: F811
    made = make(name, lr=LR, weight_decay=0.0, **OPTIONS[name])
    return replace(made, eval_data=None, metrics=None, scheduler="constant", epochs=100)


def furthest(ran: Ran, losses: list[float]) -> float:
    """Of the losses, relatively."""
    return max(abs(a / b - 1) for a, b in zip(ran.losses, losses, strict=True))


@pytest.mark.parametrize("changes", [{}, {5: {"amp": "bf16"}}, {5: {"amp": "fp16", "accumulate": 2}}])
@pytest.mark.parametrize("name", ["bert", "gpt2", "lora"])
def test_a_plain_loop_gives_the_same(
    train: Train,
    make: Make,  # noqa: F811
    name: str,
    changes: dict[int, dict[str, Any]],
) -> None:
    """On the batches of our own feed, in their order, epochs joined."""
    ours = recipe(make, name)
    batches: list[Any] = []
    for epoch in range(20):
        feed = Feed(ours, torch.device("cpu"), seed=0)
        feed.start_epoch(epoch)
        while (window := feed.next_window(1)) is not None:
            batches.append(window.micro_batches[0].batch)
    accumulated = next((c["accumulate"] for c in changes.values() if "accumulate" in c), 1)
    batches = batches[: 5 + (WINDOWS - 5) * accumulated]
    assert len(batches) == 5 + (WINDOWS - 5) * accumulated
    model = copy.deepcopy(ours.model).to("cuda:0")
    assert ours.optimizer is not None
    groups = ours.optimizer(model).param_groups
    lr = torch.tensor(LR, device="cuda:0")
    optimizer = torch.optim.AdamW(
        [{"params": group["params"]} for group in groups], lr=lr, weight_decay=0.0, fused=True, capturable=True
    )
    weighed = [_with_counted_labels(batch, shifted=name != "bert") for batch in batches]
    losses = plain_loop(
        model,
        weighed,
        optimizer,
        total_steps=WINDOWS,
        changes=changes,
        device="cuda",
        loss_of=ours.loss,
        base_lr=LR,
        factor=lambda step, total: 1.0,
    )
    given = replace(ours, train_data=batches, batch_size=1, shuffle=False, collate_fn=lambda batch: batch[0])
    script = {window: [Change(k, v) for k, v in change.items()] for window, change in changes.items()}
    ran = train(given, script, device="cuda:0", steps=WINDOWS)
    assert ran.status == 0, ran.records[-1]
    off = furthest(ran, losses)
    print(f"\n{name} {changes}: furthest from the plain loop {off:.3g}")
    assert off <= 1e-6  # the weights are equal to the bit; the loop adds a window's losses in another precision


def _with_counted_labels(batch: dict[str, torch.Tensor], shifted: bool) -> dict[str, torch.Tensor]:
    """A causal model's first label counts for nothing: the plain loop counts what is not -100."""
    if not shifted:
        return batch
    labels = batch["labels"].clone()
    labels[:, 0] = -100
    return {**batch, "labels": labels}


@pytest.mark.parametrize("settings", [Settings(), Settings(amp="bf16"), Settings(amp="fp16", checkpointing=1)])
@pytest.mark.parametrize("name", ["bert", "gpt2", "lora"])
def test_replay_on_padded_shapes_equals_eager_and_hits(
    train: Train,
    make: Make,  # noqa: F811
    name: str,
    settings: Settings,
) -> None:
    windows = 60
    eager = train(recipe(make, name), settings=settings, device="cuda:0", steps=windows)
    replayed = train(recipe(make, name), settings=settings.having("graph", True), device="cuda:0", steps=windows)
    assert replayed.status == 0, replayed.records[-1]
    hits = [record.replayed for record in replayed.of(StepRecord)]
    padding = sum(r.padding for r in replayed.of(StepRecord)) / sum(
        r.padding + r.tokens for r in replayed.of(StepRecord)
    )
    off = furthest(replayed, eager.losses)
    print(f"\n{name} {settings.short()}: hits {sum(hits)} of {windows}, padding {padding:.0%}, furthest {off:.3g}")
    assert len(replayed.trainer.replay._captures) <= SHAPES
    assert sum(hits[windows // 2 :]) >= 0.8 * (windows // 2), replayed.of(Event)
    assert 0 < padding < 1
    assert off <= (1e-5 if settings.amp == "off" else 1e-3)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_adapters_on_a_bf16_base_train_under_amp_and_replay(
    train: Train,
    make: Make,  # noqa: F811
    tmp_path: Path,
    amp: str,
) -> None:
    made = replace(make("lora", base="bf16", lr=5e-3, batch_size=8), eval_data=None, metrics=None, epochs=100)
    ran = train(made, settings=Settings(amp=amp, graph=True), device="cuda:0", steps=40, folder=tmp_path)
    assert ran.status == 0, ran.records[-1]
    steps = ran.of(StepRecord)
    assert sum(record.replayed for record in steps) >= 15, ran.of(Event)
    assert sum(ran.losses[-5:]) < sum(ran.losses[:5])
    assert (steps[-1].loss_scale is not None) == (amp == "fp16")
    assert {p.dtype for p in ran.trainer.job.step.model.parameters() if p.requires_grad} == {torch.float32}
    assert (tmp_path / "result" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("base", ["4bit", "8bit"])
def test_a_quantized_base_trains_or_says_what_is_missing(train: Train, make: Make, base: str) -> None:  # noqa: F811
    try:
        made = make("lora", base=base, lr=5e-3, batch_size=8)
    except RecipeError as error:
        assert "pip install 'tui3090[quantized]'" in str(error)  # noqa: PT017
        pytest.skip(str(error))
    ran = train(replace(made, eval_data=None, metrics=None, epochs=100), device="cuda:0", steps=30)
    assert ran.status == 0, ran.records[-1]
    assert sum(ran.losses[-5:]) < sum(ran.losses[:5])


def test_a_recipe_is_loaded_on_the_default_stream(
    train: Train,
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bitsandbytes quantizes there, whichever is current: what it reads must have been copied there."""
    seen: list[torch.cuda.Stream] = []
    load = assemble.load_recipe

    def noted(*given: Any) -> Recipe:
        seen.append(torch.cuda.current_stream())
        return load(*given)

    monkeypatch.setattr(assemble, "load_recipe", noted)
    ran = train(recipe(make, "bert"), device="cuda:0", steps=2)
    assert ran.status == 0, ran.records[-1]
    assert seen == [torch.cuda.default_stream()]
    assert torch.cuda.current_stream() != torch.cuda.default_stream(), "training has a stream of its own"


@pytest.mark.parametrize("name", ["gpt2", "lora"])
def test_the_fused_loss_is_the_models_own(make: Make, name: str) -> None:  # noqa: F811
    try:
        fused = make(name, liger=True)
    except RecipeError as error:
        assert "pip install 'tui3090[liger]'" in str(error)  # noqa: PT017
        pytest.skip(str(error))
    plain = make(name)
    model: Any = fused.model.to("cuda:0")
    for batch in plain.eval_data:  # type: ignore[union-attr]
        moved = {key: value.to("cuda:0") for key, value in batch.items()}
        assert fused.loss(model, moved).item() == pytest.approx(plain.loss(model, moved).item(), rel=1e-4)


@pytest.mark.parametrize("technique", ["offload", "prefetch", "workers"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "lora"])
def test_what_changes_no_numbers_changes_none(
    train: Train,
    make: Make,  # noqa: F811
    name: str,
    technique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "LEAST", 64)
    monkeypatch.setattr(offload, "STAY", 1)  # the models have two blocks
    value = {"offload": True, "prefetch": 2, "workers": 1}[technique]
    plain = train(recipe(make, name), device="cuda:0", steps=12)
    script = {3: [Change(technique, value)], 9: [Change(technique, type(value)())]}
    ran = train(recipe(make, name), script, device="cuda:0", steps=12)
    assert ran.status == 0, ran.records[-1]
    assert [change.new for change in ran.of(Changed)] == [value, type(value)()]
    assert not [event for event in ran.of(Event) if event.level == "error"]
    assert any(event.text.startswith("offload: ") for event in ran.of(Event)) == (technique == "offload")
    assert ran.losses == plain.losses


@pytest.mark.parametrize(("amp", "bound"), [("off", 1e-4), ("bf16", 1e-2)])
@pytest.mark.parametrize("name", ["bert", "gpt2", "lora"])
def test_compiled_blocks_give_the_same_but_for_rounding(
    train: Train,
    make: Make,  # noqa: F811
    name: str,
    amp: str,
    bound: float,
) -> None:
    settings = Settings(amp=amp)
    plain = train(recipe(make, name), settings=settings, device="cuda:0", steps=12)
    ran = train(recipe(make, name), {2: [Change("compile", True)]}, settings, device="cuda:0", steps=12)
    assert ran.status == 0, ran.records[-1]
    assert [change.new for change in ran.of(Changed)] == [True], ran.of(Event)
    assert not [event for event in ran.of(Event) if event.level == "error"]
    off = furthest(ran, plain.losses)
    print(f"\n{name}, amp {amp}: compiled, furthest {off:.3g}")
    assert off <= bound
