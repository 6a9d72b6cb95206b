"""torch.compile by key: the same training within rounding, compiled once, with a sentence where it can't be had.

The compiler itself takes long: it runs in one test. The others stop before it makes kernels, so that what is compiled
computes exactly what eager does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Ran, Train
from tests.reference import Blocks, loss_of, samples
from tui3090.commands import Change, Stop
from tui3090.meters.flops import counting
from tui3090.recipe import Recipe
from tui3090.records import Available, Changed, Event, Refused, State, StepRecord
from tui3090.savefolder import saves
from tui3090.settings import Settings
from tui3090.techniques import compile
from tui3090.techniques.compile import missing_compiler

ON = Settings(compile=True)
TOLERANCE = 1e-5
"""Of a loss, relatively, after 11 steps in fp32: fused kernels round otherwise."""

BF16_TOLERANCE = 1e-2
"""The same in bf16 or fp16, which eager rounds to after every operation and compiled code does not."""


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but inductor."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    monkeypatch.setattr(compile, "OPTIONS", {})


class Embedded(Blocks):
    """The blocks behind a layer, as in a language model: all of them are called alike."""

    def __init__(self, depth: int = 3, batch_norm: bool = False) -> None:
        super().__init__(depth=depth, batch_norm=batch_norm)
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 16] -> [batch, 4]."""
        return super().forward(self.first(x))


def recipe(count: int = 44, **fields: Any) -> Recipe:
    """11 batches of 4."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Embedded(batch_norm=fields.pop("batch_norm", False)),
        "train_data": samples(count),
        "loss": loss_of,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batch_size": 4,
        "shuffle": False,
    }
    return Recipe(**{**options, **fields})


def said(ran: Ran) -> list[str]:
    """What torch.compile told."""
    return [event.text for event in ran.of(Event) if event.source == "compile"]


def equal(ran: Ran, plain: Ran) -> None:
    """The same losses and weights, to the bit."""
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == plain.losses
    assert ran.weights.keys() == plain.weights.keys()
    for name, value in ran.weights.items():
        assert torch.equal(value, plain.weights[name]), name


def test_switched_on_twice_with_kernels_in_a_thread(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()  # what another test of this process has compiled would not be counted here
    plain = train(recipe())
    script = {2: [Change("compile", True)], 5: [Change("compile", False)], 8: [Change("compile", True)]}
    runs: list[Ran] = []
    thread = threading.Thread(target=lambda: runs.append(train(recipe(), script)))
    thread.start()
    thread.join()
    (ran,) = runs
    assert ran.status == 0
    assert ran.losses == pytest.approx(plain.losses, rel=TOLERANCE)  # dropout has drawn the same
    assert ran.weights.keys() == plain.weights.keys()
    for name, value in ran.weights.items():
        torch.testing.assert_close(value, plain.weights[name], rtol=1e-3, atol=1e-4)
    (compiled,) = said(ran)  # switched on twice
    assert compiled.endswith("in 5 pieces")  # one forward and backward for three blocks, and what the loss does before
    # the model, after it, and in backward
    assert list(tmp_path.rglob("*.so")), "inductor has made kernels"


@pytest.mark.usefixtures("no_kernels")
class TestWithoutKernels:
    def test_what_is_on_screen_meanwhile(self, train: Train) -> None:
        ran = train(recipe(), {2: [Change("compile", True)]})
        assert [record.compiled for record in ran.of(StepRecord)] == [window == 2 for window in range(11)]
        assert [(state.state, state.detail) for state in ran.of(State)] == [
            ("training", ""),
            ("training", "loading the compiler"),
            ("training", "compiling, loss"),
            ("training", "compiling, block 1 of 3"),
            ("training", "compiling, loss"),
            ("training", "compiling, backward"),
            ("training", ""),
            ("finished", "after 11 steps"),
        ]

    @pytest.mark.parametrize("batch_norm", [False, True])
    @pytest.mark.parametrize(
        "settings",
        [Settings(checkpointing=1), Settings(checkpointing=2, accumulate=2), Settings(checkpointing=1, amp="bf16")],
    )
    def test_with_the_others(self, train: Train, settings: Settings, batch_norm: bool) -> None:
        plain = train(recipe(batch_norm=batch_norm), settings=settings)
        ran = train(recipe(batch_norm=batch_norm), settings=settings.having("compile", True))
        if settings.amp == "off":
            equal(ran, plain)
        assert ran.losses == pytest.approx(plain.losses, rel=BF16_TOLERANCE)
        assert said(ran)
        of_plain, of_ran = plain.of(StepRecord)[-1], ran.of(StepRecord)[-1]
        assert of_ran.flops == of_plain.flops  # counted, and compiled all the same
        assert of_ran.hardware_flops == of_plain.hardware_flops
        assert not [module for module in ran.trainer.job.step.model.modules() if "forward" in vars(module)]

    def test_precisions_are_compiled_apart_and_kept(self, train: Train) -> None:
        keys = {2: "bf16", 4: "off", 6: "bf16", 8: "fp16"}
        script = {window: [Change("amp", value)] for window, value in keys.items()}
        ran = train(recipe(), script, ON)
        assert ran.losses == pytest.approx(train(recipe(), script).losses, rel=BF16_TOLERANCE)
        assert len(said(ran)) == 3

    def test_a_model_without_blocks_is_compiled_whole(self, train: Train) -> None:
        def made() -> Recipe:
            torch.manual_seed(3)
            return recipe(model=nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)), loss=whole)

        def whole(model: nn.Module, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])

        ran = train(made(), settings=ON)
        equal(ran, train(made()))
        assert "compiling, block 1 of 1" in [state.detail for state in ran.of(State)]

    def test_a_loss_that_goes_past_the_blocks(self, train: Train) -> None:
        def past(model: Any, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(model.head(batch["x"]), batch["labels"])

        ran = train(recipe(loss=past), settings=ON)
        equal(ran, train(recipe(loss=past)))
        assert said(ran)[0] == "the model's blocks can't be compiled, for the loss does not call the forward"
        assert said(ran).count(said(ran)[0]) == 1

    def test_shapes_are_generalized_after_the_second(self, train: Train) -> None:
        sizes = [4, 3, 4, 2, 5, 6, 3]
        rows = samples(sum(sizes))
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        batches = [list(range(end - size, end)) for size, end in zip(sizes, ends)]
        loader: Any = torch.utils.data.DataLoader(rows, batch_sampler=batches)  # type: ignore[arg-type, var-annotated]
        ran = train(recipe(train_data=loader), settings=ON)
        equal(ran, train(recipe(train_data=loader)))
        # each shape comes first to have its FLOPs counted: 4 is compiled for when it comes again, then 3 and all others
        assert len(said(ran)) == 2

    def test_what_the_compiler_can_not_follow_is_told(self, train: Train) -> None:
        class Reads(nn.Module):
            """Its block asks for a value on the host."""

            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(16, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.linear(x)
                return y * 2 if y.sum().item() > 1e9 else y

        def made() -> Recipe:
            torch.manual_seed(3)
            return recipe(model=Reads(), loss=loss_of)

        ran = train(made(), settings=ON)
        equal(ran, train(made()))
        (told,) = [text for text in said(ran) if text.startswith("compiled in parts where the compiler can't follow: ")]
        assert "item" in told

    def test_the_bound_on_variants(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compile, "VARIANTS", 1)

        class Counts(nn.Module):
            """Whose forward depends on a number that changes."""

            def __init__(self) -> None:
                super().__init__()
                self.linear, self.calls = nn.Linear(16, 4), "x"

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x) * len(self.calls)

        def counted(model: Any, batch: Any) -> torch.Tensor:
            model.calls += "x"
            return loss_of(model, batch)

        def made() -> Recipe:
            torch.manual_seed(3)
            return recipe(model=Counts(), loss=counted)

        ran = train(made(), settings=ON)
        equal(ran, train(made()))
        (bound,) = [event for event in ran.of(Event) if "keeps changing" in event.text]
        assert bound.level == "warning"


def broken_forward(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that fails at once."""
    raise RuntimeError("ptxas fatal: no space\nleft")


def broken_backward(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that fails at backward, when a forward has drawn its dropout and counted its statistics."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    made = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=broken_forward)
    compiled: Callable[..., Any] = made(graph, inputs)
    return compiled


def test_a_torch_that_can_not_compile_here(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(torch, "compile", refused)
    ran = train(recipe(), {3: [Change("compile", True)]})
    equal(ran, train(recipe()))
    assert said(ran)[-1].startswith("torch.compile failed in this run: torch.compile is not supported on Python 3.99+")
    assert not ran.trainer.job.settings.compile


@pytest.mark.parametrize("backend", [broken_forward, broken_backward])
def test_a_compiler_that_fails_leaves_training_as_it_was(
    train: Train, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    monkeypatch.setattr(compile, "BACKEND", backend)
    monkeypatch.setattr(compile, "OPTIONS", {})
    plain = train(recipe(batch_norm=True), settings=Settings(accumulate=2))
    script = {3: [Change("compile", True)], 4: [Change("compile", True)]}
    ran = train(recipe(batch_norm=True), script, Settings(accumulate=2))
    equal(ran, plain)
    sentence = "torch.compile failed in this run: ptxas fatal: no space (output.log has the rest)."
    assert said(ran) == [
        "the loss is not compiled, only the model's blocks: ptxas fatal: no space",
        f"{sentence} Training goes on without it",
    ]
    assert [(c.technique, c.new, c.origin) for c in ran.of(Changed)] == [
        ("compile", True, "key"),
        ("compile", False, "compile"),
    ]
    assert [r.reason for r in ran.of(Refused)] == [sentence]
    assert [a.reason for a in ran.of(Available) if a.technique == "compile"][-1] == sentence


def test_a_mistake_of_the_recipe_is_not_the_compilers(
    train: Train, failure: Callable[[Ran], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "BACKEND", "eager")
    monkeypatch.setattr(compile, "OPTIONS", {})

    def wrong(model: nn.Module, batch: Any) -> torch.Tensor:
        loss_of(model, batch)
        raise KeyError("lables")

    assert "KeyError: 'lables'" in failure(train(recipe(loss=wrong), settings=ON))


def test_without_a_compiler_the_reason_is_told_and_training_goes_on(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    ran = train(recipe(), {3: [Change("compile", True)]})
    sentence = "compile unavailable: no compiler (g++ is not on the PATH; apt install g++)."
    assert [r.reason for r in ran.of(Refused)] == [sentence]
    assert [a.reason for a in ran.of(Available) if a.technique == "compile"] == [sentence]
    equal(ran, train(recipe()))


def test_which_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setenv("CXX", "/nowhere/c++ -O2")
    assert "(/nowhere/c++ is not on the PATH" in missing_compiler(cpu)
    monkeypatch.setattr(compile, "find_spec", lambda name: None)
    assert "Triton" in missing_compiler(card)
    monkeypatch.setattr(compile, "find_spec", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "(gcc or clang is not on the PATH" in missing_compiler(card)
    (tmp_path / "clang").touch(mode=0o755)
    assert missing_compiler(card) == ""
    monkeypatch.setattr(compile.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h" in missing_compiler(card)


def test_counting_flops_uncompiled_may_take_more_memory_than_there_is(train: Train, no_kernels: None) -> None:
    counted: list[bool] = []

    def large(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        counted.append(counting())
        if counted[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    ran = train(recipe(loss=large), settings=ON)
    equal(ran, train(recipe()))
    assert counted[:2] == [True, False]
    assert not any(counted[1:])
    assert {record.flops for record in ran.of(StepRecord)} == {None}
    assert not ran.of(Changed)
    assert [e.text for e in ran.of(Event) if e.source == "memory"] == [
        "out of memory while FLOPs were counted, uncompiled: no FLOPs for this batch shape"
    ]


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("before", [False, True], ids=["saved without", "saved with"])
@pytest.mark.parametrize("after", [False, True], ids=["resumed without", "resumed with"])
def test_a_save_is_the_plain_models_whether_it_was_compiled_or_not(
    train: Train, tmp_path: Path, before: bool, after: bool
) -> None:
    whole = train(recipe())
    toggled = {2: [Change("compile", not before)], 3: [Change("compile", before)], 5: [Stop()]}
    train(recipe(), toggled, Settings(compile=before), folder=tmp_path)
    [save] = saves(tmp_path / "saves")[0]
    assert save.notes.tensors.keys() == whole.weights.keys()
    ran = train(recipe(), settings=Settings(compile=after), folder=tmp_path, resume=True)
    assert ran.status == 0, ran.records[-1]
    assert ran.losses == pytest.approx(whole.losses[5:], abs=1e-6)
