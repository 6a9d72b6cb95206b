"""From a plan to a model on its device: everything before the first step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from tui3090.feed import Feed
from tui3090.meters.cards import choose
from tui3090.optimizers import make_optimizer, of_bitsandbytes
from tui3090.recipe import Recipe, RecipeError
from tui3090.records import Event, Record, Stage, Started
from tui3090.settings import RunPlan, Settings
from tui3090.source import load_recipe
from tui3090.step import Step
from tui3090.techniques import Machine, refusal
from tui3090.techniques.channels_last import lay_out
from tui3090.techniques.checkpointing import find_blocks
from tui3090.techniques.compile import missing_compiler
from tui3090.techniques.tf32 import on_now

NO_IMAGES = "--channels-last does nothing here: the model has no 4-d weight, as convolutions of images have"


@dataclass(slots=True)
class Job:
    """A fine-tune ready to run."""

    recipe: Recipe
    machine: Machine
    settings: Settings
    feed: Feed
    step: Step
    max_steps: int | None
    """Optimizer steps after which the run ends; None: after the recipe's epochs."""
    device_name: str
    device_uuid: str
    """NVML's identifier; empty on the CPU."""
    weights_dtype: str
    """Of most trainable weights: float32, bfloat16 …"""
    started: Started

    def steps_left(self, step: int) -> int | None:
        """Optimizer steps that come after the first `step`, at the accumulation in force; None: unknown."""
        if self.max_steps is not None:
            return max(0, self.max_steps - step)
        left, whole, k = self.feed.batches_left(), self.feed.batches_per_epoch(), self.settings.accumulate
        if left is None or whole is None:
            return None
        return -(-left // k) + max(0, self.recipe.epochs - 1 - self.feed.epoch) * -(-whole // k)


def assemble(
    plan: RunPlan, emit: Callable[[Record], None], load: Callable[[Path, dict[str, Any]], Recipe] | None = None
) -> Job:
    """Load the recipe and bring it to its device, stage by stage. Raises RecipeError and whatever a recipe raises.

    `load` takes the place of `load_recipe`, to train something else than exactly what the train.py gives.
    """

    @contextmanager
    def stage(name: str) -> Iterator[list[str]]:
        began = time.perf_counter()  # the time of day may be set back
        emit(Stage(time=time.time(), name=name))
        detail: list[str] = []
        yield detail
        seconds = time.perf_counter() - began
        emit(Stage(time=time.time(), name=name, seconds=seconds, detail="".join(detail)))

    def say(source: str, text: str, level: str = "info") -> None:
        if text:
            emit(Event(time=time.time(), level=level, source=source, text=text))

    device, name, uuid = choose_device(plan, say)
    seed_before_recipe = 0 if plan.seed is None else plan.seed
    torch.manual_seed(seed_before_recipe)  # the weights that a recipe draws are the same in every run
    with stage("train.py") as detail, _default_stream(device):
        recipe = (load or load_recipe)(plan.recipe, plan.options)
        detail.append(plan.recipe.name)
    seed = recipe.seed if plan.seed is None else plan.seed
    model = recipe.model
    with stage("model") as detail:
        # each once: a model may run one block several times
        blocks = list(dict.fromkeys(recipe.blocks if recipe.blocks is not None else find_blocks(model)))
        parameters = sum(p.numel() for p in model.parameters())
        trained = [p for p in model.parameters() if p.requires_grad]
        if any(p.dtype == torch.float16 for p in trained):  # GradScaler can't unscale their gradients
            raise RecipeError(
                "The trainable weights are fp16: load them in float32 (dtype=torch.float32) and switch AMP on with "
                "--amp fp16."
            )
        if any(p.dtype == torch.bfloat16 for p in trained):
            text = (
                "the trainable weights are bf16, with 8 bits of mantissa: updates below about 0.4 % of a weight round "
                "away. Load the model in float32 (dtype=torch.float32) and use --amp bf16"
            )
            say("run", text, "warning")
        detail.append(f"{type(model).__name__}, {parameters / 1e6:.1f} M parameters")
    with stage("data") as detail:
        max_steps = plan.steps if plan.steps is not None else recipe.max_steps
        epochs = recipe.epochs if max_steps is None else None
        feed = Feed(recipe, device, seed, plan.settings.workers, plan.settings.prefetch, epochs)
        feed.start_epoch(0)
        first, rows = feed.peek(), feed.rows
        if first is None:
            raise RecipeError("The training data gives no batch: its iterator ended at once.")
        detail.append("unknown length" if rows is None else f"{rows} samples")
    for note in recipe.notes:
        say("data", note, "warning")
    machine = Machine(
        device=device,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        torch_version=tuple(int(part) for part in torch.__version__.split(".")[:2]),  # type: ignore[arg-type]
        blocks=len(blocks),
        no_compiler=missing_compiler(device),
        indexed=feed.indexed,
    )
    settings = plan.settings
    if "tf32" not in plan.asked and on_now():
        settings = replace(settings, tf32=True)
        say("run", "train.py switched TF32 on: it is in force")
    if reason := refusal(machine, settings):
        raise RecipeError(reason)
    with stage("device") as detail:
        _place(model, device)
        if plan.channels_last:
            count = lay_out(model)
            feed.channels_last = count > 0
            say("run", f"channels_last: {count} weights and the images of the batches" if count else NO_IMAGES)
        model.train()
        torch.manual_seed(seed)  # dropout's stream starts here, whatever the recipe drew
        optimizer, note = make_optimizer(recipe, model, device)
        say("run", note)
        if feed.channels_last and of_bitsandbytes(optimizer):
            raise RecipeError(
                f"--channels-last can't be used with bitsandbytes' {type(optimizer).__name__}, which lays out every "
                "weight contiguously: leave it out, or take torch.optim.AdamW."
            )
        detail.append(name)
    dtype = str(Counter(p.dtype for p in trained).most_common(1)[0][0]).removeprefix("torch.")
    step = Step(recipe, model, optimizer, blocks, device, feed.to_device)
    step.settings = settings
    started = Started(
        time=time.time(),
        model=type(model).__name__,
        parameters=parameters,
        trainable=sum(p.numel() for p in trained),
        weights_dtype=dtype,
        rows=rows,
        eval_rows=_length(recipe.eval_data),
        batch_size=feed.batch_size,
        epochs=recipe.epochs,
        device=str(device),
        device_name=name,
        device_uuid=uuid,
        memory=_memory(device),
        unit="tokens" if first.tokens else "samples",
        torch=torch.__version__,
        settings=settings.short(),
        memory_cap=None if plan.vram_gib is None else round(plan.vram_gib * 2**30),
        cards=torch.cuda.device_count() if device.type == "cuda" else 0,
    )
    emit(started)
    return Job(recipe, machine, settings, feed, step, max_steps, name, uuid, dtype, started)


def choose_device(plan: RunPlan, say: Callable[[str, str], None]) -> tuple[torch.device, str, str]:
    """The device, its name, and its NVML identifier. Raises RecipeError for one that is not there."""
    wanted = plan.device
    if not wanted and torch.cuda.is_available():
        card, sentence = choose()
        say("run", sentence)
        uuids = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]
        wanted = f"cuda:{uuids.index(card.uuid)}" if card is not None and card.uuid in uuids else "cuda:0"
    try:
        device = torch.device(wanted or "cpu")
    except RuntimeError:
        raise RecipeError(f"There is no device {wanted!r}: --device takes cpu or cuda:0, cuda:1, …") from None
    if device.type == "cpu":
        if plan.vram_gib is not None:
            raise RecipeError("--vram caps a card's memory, and training runs on the CPU: leave it out.")
        threads = torch.get_num_threads()
        return device, f"CPU, {threads} thread{'' if threads == 1 else 's'}", ""
    if device.type != "cuda":
        raise RecipeError(f"Training on {device.type} is not supported: --device takes cpu or cuda:0, cuda:1, …")
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        there = f"there are {count}" if count else "torch sees none"
        raise RecipeError(f"{wanted} is not there: of CUDA devices {there}.")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    # everything of this thread runs on one stream, eager and captured: autograd remembers the stream of each gradient
    torch.cuda.set_stream(torch.cuda.Stream(device))
    properties = torch.cuda.get_device_properties(device)
    if plan.vram_gib is not None:
        share = plan.vram_gib * 2**30 / properties.total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    return device, properties.name, f"GPU-{properties.uuid}"


def _default_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, work goes where other programs have it: bitsandbytes quantizes there, whichever stream is current."""
    return torch.cuda.stream(torch.cuda.default_stream(device)) if device.type == "cuda" else nullcontext()


def _place(model: nn.Module, device: torch.device) -> None:
    """Move a model that is on the CPU; one that its recipe has placed (a quantized base) stays where it is."""
    places = {p.device for p in model.parameters()}
    if places <= {torch.device("cpu")}:
        model.to(device)
    elif places != {device}:
        where = ", ".join(sorted(str(place) for place in places))
        raise RecipeError(f"The recipe put the model on {where}, and training runs on {device}: name it with --device.")
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # once, before the first step: copies of other streams have arrived


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return int(psutil.virtual_memory().total)


def _length(data: Any) -> int | None:
    try:
        return len(getattr(data, "dataset", data))
    except TypeError:
        return None
