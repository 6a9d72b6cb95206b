"""The recipes for transformers' models: every technique on each, right figures, the result as transformers saves it."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.conftest import Ran, Train
from tests.recipes.conftest import Make
from tui3090 import pretrained
from tui3090.commands import Change, Stop
from tui3090.recipe import Recipe, RecipeError
from tui3090.recipes.bert import Scores
from tui3090.records import Evaluated, Event
from tui3090.savefolder import MODEL
from tui3090.settings import Settings
from tui3090.source import bundled, load_recipe, new_file, parse_options
from tui3090.techniques.checkpointing import find_blocks
from tui3090.textdata import Packed, Pad, Tokens

NAMES = ("bert", "gpt2", "lora")
LAYERS = {"bert": ("BertLayer", 2), "gpt2": ("GPT2Block", 4), "lora": ("LlamaDecoderLayer", 2)}

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_is_looked_up")


def with_dropout(recipe: Recipe, share: float = 0.1) -> Recipe:
    """The tiny models come without; adapters start at zero and would hide it."""
    for module in recipe.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
    return replace(recipe, eval_data=None, metrics=None)


def weights(ran: Ran) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in ran.trainer.job.step.model.named_parameters() if p.requires_grad}


def furthest(a: Ran, b: Ran) -> float:
    """The largest difference of losses and of trained weights."""
    of_losses = max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))
    theirs = weights(b)
    return max(of_losses, *(float((p - theirs[name]).abs().max()) for name, p in weights(a).items()))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_found(make: Make, name: str) -> None:
    blocks = find_blocks(make(name).model)
    assert (type(blocks[0]).__name__, len(blocks)) == LAYERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_switched_in_mid_run_changes_nothing(train: Train, make: Make, name: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "lr": 1e-3, "dropout": 0.1} if name == "lora" else {"batch_size": 4}
    plain = train(with_dropout(make(name, **options)), steps=6)
    script = {1: [Change("checkpointing", 1)], 3: [Change("checkpointing", 2)], 5: [Change("checkpointing", 0)]}
    toggled = train(with_dropout(make(name, **options)), script, steps=6)
    assert plain.status == toggled.status == 0, toggled.records[-1]
    assert len(set(plain.losses)) == 6
    assert furthest(plain, toggled) <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_uninterrupted_one(train: Train, make: Make, tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"batch_size": 8, "lr": 1e-3, **({"dropout": 0.1} if name == "lora" else {})}
    whole = train(with_dropout(make(name, **options)), steps=10)
    first = train(with_dropout(make(name, **options)), {4: [Stop()]}, steps=10, folder=tmp_path)
    torch.manual_seed(9)  # a new process has other random numbers
    second = train(with_dropout(make(name, **options)), steps=10, folder=tmp_path, resume=True)
    assert second.status == 0, second.records[-1]
    assert 0 < len(first.losses) < 10
    assert first.losses + second.losses == pytest.approx(whole.losses, abs=1e-6)
    assert (tmp_path / "result").is_dir()
    saved = load_file(sorted((tmp_path / "saves").iterdir())[-1] / MODEL)
    assert all("lora_" in key for key in saved) == (name == "lora")  # the base comes from the recipe


@pytest.mark.parametrize(("name", "pack"), [("bert", {}), ("lora", {"pack": True})])
def test_loader_workers_give_the_same_batches(train: Train, make: Make, name: str, pack: dict[str, Any]) -> None:
    plain = train(replace(make(name, batch_size=4, **pack), eval_data=None, metrics=None), steps=4)
    script = {1: [Change("workers", 1)], 3: [Change("workers", 0)]}
    ran = train(replace(make(name, batch_size=4, **pack), eval_data=None, metrics=None), script, steps=4)
    assert ran.status == 0, ran.records[-1]
    assert not ran.trainer.job.feed.notes
    assert furthest(plain, ran) == 0


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_amp_trains_the_weights_in_fp32(train: Train, make: Make, name: str, amp: str) -> None:
    plain = train(replace(make(name, batch_size=2), eval_data=None, metrics=None), steps=3)
    mixed = train(replace(make(name, batch_size=2), eval_data=None, metrics=None), settings=Settings(amp=amp), steps=3)
    assert mixed.status == 0, mixed.records[-1]
    assert mixed.losses == pytest.approx(plain.losses, rel=0.02)
    assert mixed.losses != plain.losses
    assert {p.dtype for p in weights(mixed).values()} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_leaves_what_from_pretrained_loads(
    train: Train, make: Make, tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    ran = train(make(name, batch_size=4, lr=1e-2), steps=4, folder=tmp_path)
    assert ran.status == 0, ran.records[-1]
    assert ran.of(Event)[-1].text == f"what was learned is in {tmp_path / 'result'}"
    result = tmp_path / "result"
    assert not (tmp_path / "result.unfinished").exists()
    trained = ran.trainer.job.step.model.eval()
    tokenizer = AutoTokenizer.from_pretrained(result, local_files_only=True)
    batch = tokenizer(["Read one line of the file."], return_tensors="pt")
    if name == "lora":
        assert not list(result.glob("model*"))  # the adapter alone
        base = AutoModelForCausalLM.from_pretrained(tiny_folder / "llama", local_files_only=True)
        with torch.no_grad():
            untrained = base(**batch).logits
        loaded = PeftModel.from_pretrained(base, str(result))
    else:
        kind = AutoModelForSequenceClassification if name == "bert" else AutoModelForCausalLM
        loaded = kind.from_pretrained(result, local_files_only=True)
        with torch.no_grad():
            untrained = kind.from_pretrained(tiny_folder / name, local_files_only=True)(**batch).logits
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(**batch).logits, trained(**batch).logits, atol=1e-6)
        assert not torch.allclose(loaded(**batch).logits, untrained, atol=1e-3)
    if name == "bert":
        assert loaded.config.id2label == {0: "asyncio", 1: "email"}
    elif name == "lora":
        assert tokenizer.chat_template
    assert loaded.config.use_cache or name == "bert"
    assert loaded.config._attn_implementation == "sdpa"


def test_only_adapters_learn(train: Train, make: Make, tiny_folder: Path) -> None:
    ran = train(make("lora", batch_size=4, lr=1e-2), steps=3)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder / "llama", local_files_only=True).state_dict()
    assert all("lora_" in name for name in weights(ran))
    after = ran.trainer.job.step.model.unload().state_dict()
    assert all(torch.equal(after[name], value) for name, value in base.items())


def test_adapters_are_fp32_on_a_bf16_base(train: Train, make: Make) -> None:
    ran = train(make("lora", batch_size=4, lr=1e-2, base="bf16"), steps=3)
    assert ran.status == 0, ran.records[-1]
    dtypes = {p.requires_grad: p.dtype for p in ran.trainer.job.step.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert ran.trainer.job.started.weights_dtype == "float32"


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_with_8_bits(train: Train, make: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bnb = pytest.importorskip("bitsandbytes").optim
    monkeypatch.setattr(bnb.GlobalOptimManager, "_instance", None)  # it knows weights by address
    made = make(name, optimizer="adamw8bit", batch_size=4, lr=1e-3)
    usual = make(name).optimizer(made.model)
    ran = train(made, steps=3)
    assert ran.status == 0, ran.records[-1]
    optimizer = ran.trainer.job.step.optimizer
    assert type(optimizer) is bnb.AdamW8bit
    assert [g["weight_decay"] for g in optimizer.param_groups] == [g["weight_decay"] for g in usual.param_groups]
    assert [len(g["params"]) for g in optimizer.param_groups] == [len(g["params"]) for g in usual.param_groups]
    embeddings = {id(m.weight) for m in ran.trainer.job.step.model.modules() if isinstance(m, nn.Embedding)}
    for parameter, state in optimizer.state.items():
        eight = parameter.numel() >= 4096 and id(parameter) not in embeddings
        assert state["state1"].dtype == (torch.uint8 if eight else torch.float32)
    assert any(state["state1"].dtype == torch.uint8 for state in optimizer.state.values()) == (name != "lora")


@pytest.mark.parametrize("stopped_at", [0, 2])
def test_a_stopped_run_leaves_what_it_has_learned(train: Train, make: Make, tmp_path: Path, stopped_at: int) -> None:
    ran = train(make("bert", batch_size=4), {stopped_at: [Stop()]}, folder=tmp_path)
    assert ran.status == 0
    assert (tmp_path / "result" / "model.safetensors").is_file() == (stopped_at > 0)


def test_a_result_that_cannot_be_written_fails_the_run_and_leaves_none(
    train: Train, make: Make, tmp_path: Path
) -> None:
    def full(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError(28, "No space left on device")

    ran = train(replace(make("bert", batch_size=4), export=full), steps=1, folder=tmp_path)
    assert ran.status == 1
    assert "No space left on device" in ran.records[-1].detail  # type: ignore[attr-defined]
    assert not (tmp_path / "result").exists()


class Told(nn.Module):
    """A classifier that says what it is told to."""

    def forward(self, said: torch.Tensor, labels: torch.Tensor) -> Any:
        return type("Output", (), {"logits": nn.functional.one_hot(said, 3).float()})


def test_accuracy_and_f1() -> None:
    def scores(classes: int, labels: list[int], said: list[int]) -> dict[str, float]:
        whole = torch.tensor(labels), torch.tensor(said)
        batches = [{"labels": x, "said": y} for x, y in zip(whole[0].split(3), whole[1].split(3))]
        return Scores(classes)(Told(), iter(batches))

    # class 1: 2 hits, 1 missed, 1 taken wrongly: F1 = 4 / 6
    assert scores(2, [1, 1, 1, 0, 0], [1, 1, 0, 1, 0]) == pytest.approx(
        {"accuracy": 0.6, "F1": 4 / 6, "commonest": 0.6}
    )
    # F1 of the classes: 4 / 5, 0 and 2 / 3
    assert scores(3, [0, 0, 1, 2, 2], [0, 0, 0, 2, 1]) == pytest.approx(
        {"accuracy": 0.6, "macro F1": (4 / 5 + 0 + 2 / 3) / 3, "commonest": 0.4}
    )


@pytest.mark.parametrize("name", ["gpt2", "lora"])
def test_perplexity_is_that_of_the_eval_loss_and_something_is_written(train: Train, make: Make, name: str) -> None:
    ran = train(make(name, batch_size=4), steps=1)
    (evaluated,) = ran.of(Evaluated)
    assert evaluated.metrics == f"perplexity {math.exp(evaluated.loss):.4g}"
    assert evaluated.text.startswith("The" if name == "gpt2" else "What does ")


@pytest.mark.parametrize("name", ["gpt2", "lora"])
def test_packed_texts_do_not_see_each_other(make: Make, tiny_folder: Path, name: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder / "gpt2").eval()
    if name == "lora":
        model = make("lora", pack=True).model.eval()
    ids = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34]]
    tokens = Tokens(ids, ids)
    packed = Packed(tokens, 16)
    batch = Pad((16,), 0)([packed[0]])
    assert len(packed) == 1
    with torch.no_grad():
        together = pretrained.causal_loss(model, batch).item()
        apart = [model(input_ids=torch.tensor([i]), labels=torch.tensor([i])).loss.item() for i in ids]
    assert together == pytest.approx(sum(a * (len(i) - 1) for a, i in zip(apart, ids)) / 9, rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "lora"])
def test_a_causal_model_needs_no_mask_for_padding_on_the_right(make: Make, name: str) -> None:
    recipe = make(name, batch_size=4, **({"pack": False} if name == "gpt2" else {}))
    batch = next(batch for batch in recipe.eval_data if not batch["attention_mask"].all())  # type: ignore[union-attr]
    with torch.no_grad():
        assert pretrained.causal_loss(recipe.model, batch).item() == pytest.approx(
            recipe.model(**batch).loss.item(), rel=1e-5
        )


@pytest.mark.parametrize("name", ["gpt2", "lora"])
def test_no_mask_is_built_and_nothing_else_changes(
    make: Make, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recipe = make(name)
    model: Any = recipe.model
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder / ("llama" if name == "lora" else name)).eval()
    batch = next(iter(recipe.eval_data))  # type: ignore[arg-type]
    ids = batch["input_ids"][:1, :5]
    with torch.no_grad():
        expected = plain(**batch).loss.item()
        written = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a mask is asked for")

        monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", refuse)
        monkeypatch.setattr("transformers.masking_utils._ignore_causal_mask_sdpa", refuse)
        assert pretrained.causal_loss(model.eval(), batch).item() == pytest.approx(expected, rel=1e-6)
        ours = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, written)


def test_layers_with_a_window_keep_their_masks() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    windowed = MistralForCausalLM(MistralConfig(vocab_size=64, num_key_value_heads=2, sliding_window=4, **shape))
    pretrained.leave_masks_out(windowed)
    assert windowed.config._attn_implementation == "sdpa"
    pretrained.leave_masks_out(whole := LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)))
    assert whole.config._attn_implementation == pretrained.MASK_FREE


@pytest.mark.parametrize("pack", [False, True])
def test_lora_learns_from_answers_alone(make: Make, pack: bool) -> None:
    recipe = make("lora", pack=pack)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.peft_config["default"].base_model_name_or_path)
    for batch in recipe.eval_data:  # type: ignore[union-attr]
        for ids, labels in zip(batch["input_ids"], batch["labels"]):
            said = tokenizer.decode(ids[labels != -100])
            assert said
            assert "<|" not in said.replace("<|endoftext|>", "")
            assert "What does" not in said


def refused(make: Make, name: str, sentence: str, **options: Any) -> None:
    with pytest.raises(RecipeError, match=sentence):
        make(name, **options)


def test_what_cannot_be_trained_on_is_refused(make: Make, tiny_folder: Path, tmp_path: Path) -> None:
    same = tmp_path / "same.csv"
    same.write_text("text,label\n" + "a word,x\n" * 9)
    refused(make, "bert", "All 9 rows have the label 'x'", data=str(same))
    ids = tmp_path / "ids.csv"
    ids.write_text("text,label\n" + "".join(f"a word,{i}\n" for i in range(9)))
    refused(make, "bert", "9 rows have 9 different labels, one of them '0'", data=str(ids))
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text('{"text": "a", "label": 0.5}\n')
    refused(make, "bert", "its 'label' is 0.5: a label is a name or a whole number", data=str(numbers))
    few = tmp_path / "few.csv"
    few.write_text("text,label\na,x\nb,y\n")
    refused(make, "bert", "2 rows can't be split", data=str(few))
    refused(make, "bert", "--max-length is 4096: this model takes 8 to 512 tokens", max_length=4096)
    refused(make, "lora", "holds no row that can be used: .*its prompt alone has .* tokens", max_length=8, bad_rows=999)
    refused(
        make, "lora", "row 1: its prompt alone has .* tokens.*more than 3 such rows", data="", max_length=8, bad_rows=3
    )
    refused(make, "lora", "no token for a text's end: is it a model that writes", model=str(tiny_folder / "bert"))
    refused(make, "gpt2", "no token for a text's end", model=str(tiny_folder / "bert"))


def test_labels_of_the_eval_file_must_be_known(make: Make, tmp_path: Path) -> None:
    train, evaluation = tmp_path / "a.csv", tmp_path / "b.csv"
    train.write_text("text,label\n" + "good,10\nbad,9\n" * 4)
    evaluation.write_text("text,label\nx,9\ny,8\n")
    recipe = make("bert", data=str(train), eval_data=str(evaluation))
    assert recipe.model.config.id2label == {0: "9", 1: "10"}
    assert recipe.notes == [
        f"1 of 2 rows were skipped: {evaluation}, line 3: its label '8' is none of the training data's"
    ]
    (batch,) = recipe.eval_data  # type: ignore[union-attr, misc]
    assert batch["labels"].tolist() == [0]


@pytest.mark.parametrize(("name", "of", "length"), [("bert", 72, 8), ("gpt2", 72, 8), ("lora", 76, 80)])
def test_what_is_cut_at_the_greatest_length_is_told(make: Make, name: str, of: int, length: int) -> None:
    (note,) = make(name, max_length=length, **({"pack": False} if name == "gpt2" else {})).notes
    assert re.fullmatch(rf"\d+ of {of} rows fill --max-length {length}: what they have beyond is cut off", note)
    assert make(name, max_length=256).notes == []


def test_a_few_long_texts_are_evaluated_on_their_ends(make: Make, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"Text {number}. " * 100 + f"The end of {number}.")
    recipe = make("gpt2", data=str(tmp_path), max_length=512, held_out=0.02)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.config._name_or_path)
    (batch,) = recipe.eval_data  # type: ignore[union-attr, misc]
    said = tokenizer.decode(batch["input_ids"][0][batch["attention_mask"][0] == 1])
    assert [said.count(f"The end of {number}.<|endoftext|>") for number in range(3)] == [1, 1, 1]
    assert len(said) < 0.05 * 3 * 900


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_recipe_gives_the_same(make: Make, tiny_folder: Path, tmp_path: Path, name: str) -> None:
    copied = tmp_path / f"my_{name}_{tmp_path.name}.py"
    new_file(copied, bundled(name))
    model = tiny_folder / ("llama" if name == "lora" else name)
    options = parse_options(copied, ["--model", str(model), "--data", str(tiny_folder / f"{name}.jsonl")])
    torch.manual_seed(0)
    mine, theirs = load_recipe(copied, options | {"max_length": 128}), make(name)
    for ours, bundled_ones in zip(mine.eval_data, theirs.eval_data, strict=True):  # type: ignore[arg-type]
        assert torch.equal(ours["input_ids"], bundled_ones["input_ids"])
    with torch.no_grad():
        assert torch.equal(mine.loss(mine.model, ours), theirs.loss(theirs.model, ours))


def test_notes_of_a_recipe_come_into_the_log(train: Train, make: Make) -> None:
    ran = train(replace(make("bert", batch_size=4), notes=["2 rows were skipped"]), steps=1)
    assert ("data", "warning", "2 rows were skipped") in [(e.source, e.level, e.text) for e in ran.of(Event)]


@pytest.mark.parametrize("name", ["gpt2", "lora"])
def test_the_fused_loss_gets_what_the_models_own_loss_is_made_of(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With torch's kernels in liger-kernel's place, which needs a card."""

    class Fused:
        def __init__(self, ignore_index: int) -> None:
            self.ignored = ignore_index

        def __call__(self, weight: Any, hidden: Any, labels: Any, bias: Any) -> torch.Tensor:
            logits = nn.functional.linear(hidden, weight, bias)
            return nn.functional.cross_entropy(logits, labels, ignore_index=self.ignored)

    stand_in = type(sys)("liger_kernel.transformers")
    stand_in.LigerFusedLinearCrossEntropyLoss = Fused  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", type(sys)("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    recipe = make(name, liger=True, **({"pack": True} if name == "lora" else {}))
    for batch in recipe.eval_data:  # type: ignore[union-attr]
        fused = recipe.loss(recipe.model, batch)
        assert fused.item() == pytest.approx(pretrained.causal_loss(recipe.model, batch).item(), rel=1e-5)
        assert fused.requires_grad


def test_a_copied_recipe_runs_by_the_command_and_leaves_its_result(tmp_path: Path) -> None:
    root = Path(pretrained.__file__).parents[1]

    def tui3090(*arguments: str) -> str:
        command = [sys.executable, "-m", "tui3090", *arguments]
        env = os.environ | {"PYTHONPATH": str(root), "XDG_RUNTIME_DIR": str(tmp_path)}  # out of other tests' reach
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    tui3090("new", "--from", "bert", "mine.py")
    options = ["--scratch", "tiny", "--max-length", "32"]
    said = tui3090("run", "mine.py", "--headless", "--steps", "2", "--run-dir", "run", "--", *options)
    assert " % padding)" in said
    assert "  result      run/result\n" in said
    kind = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "result", local_files_only=True)
    assert len(kind.config.id2label) == 10
