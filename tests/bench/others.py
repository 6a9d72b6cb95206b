"""The same training by transformers' Trainer, by accelerate and by Lightning, and the plain loop under TraceML, each as
its documentation shows it.

Each is a loop that takes turns (turns.py). What a library can't do here (fp16 on a CPU, say) it says itself.
"""

from __future__ import annotations

import atexit
import logging
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.bench.loops import OPTIMIZER, PlainLoop, forever, loader
from tests.bench.turns import Loop
from tui3090.recipe import Recipe
from tui3090.settings import Settings
from tui3090.techniques.amp import DTYPES


def _adamw(recipe: Recipe, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(recipe.model.parameters(), fused=fused, **OPTIMIZER)


def _checked(recipe: Recipe, device: torch.device, settings: Settings) -> None:
    """The first forward fails where the library runs another precision than it was asked for, and says nothing."""
    asked = DTYPES.get(settings.amp)
    inner = next(module for module in recipe.model.modules() if isinstance(module, nn.Linear))

    def look(*given: Any) -> None:
        hook.remove()
        on = torch.is_autocast_enabled(device.type)
        found = torch.get_autocast_dtype(device.type) if on else None
        if found != asked:
            raise RuntimeError(f"asked for {asked or 'fp32'} it runs {found or 'fp32'}")

    hook = inner.register_forward_pre_hook(look)


def transformers_trainer(recipe: Recipe, device: torch.device, settings: Settings) -> Loop:
    """transformers' Trainer: `compute_loss` is the recipe's loss."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    _checked(recipe, device, settings)

    class WithLoss(Trainer):  # type: ignore[misc]
        """Takes the loss from the recipe."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            """Its mean over the batch."""
            return recipe.loss(model, inputs)

    class Boundary(TrainerCallback):  # type: ignore[misc]
        """Waits before each step."""

        def __init__(self, boundary: Callable[[], bool]) -> None:
            self.boundary = boundary

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
            """The last step ends training after itself."""
            control.should_training_stop = not self.boundary()
            return control

    def run(boundary: Callable[[], bool]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=recipe.batch_size,
                max_steps=1_000_000,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                bf16=settings.amp == "bf16",
                fp16=settings.amp == "fp16",
                use_cpu=device.type == "cpu",
                dataloader_num_workers=settings.workers,
                dataloader_persistent_workers=settings.workers > 0,
                dataloader_drop_last=True,
                dataloader_pin_memory=device.type == "cuda",
                remove_unused_columns=False,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            trainer = WithLoss(
                model=recipe.model,
                args=arguments,
                train_dataset=recipe.train_data,
                data_collator=recipe.collate_fn or torch.utils.data.default_collate,
                optimizers=(_adamw(recipe), None),
                callbacks=[Boundary(boundary)],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()

    return run


def accelerate_loop(recipe: Recipe, device: torch.device, settings: Settings) -> Loop:
    """A loop by hand whose precision, device and clipping are accelerate's."""

    def run(boundary: Callable[[], bool]) -> None:
        from accelerate import Accelerator

        _checked(recipe, device, settings)
        precision = {"off": "no"}.get(settings.amp, settings.amp)
        accelerator = Accelerator(mixed_precision=precision, cpu=device.type == "cpu")
        model, optimizer, data = accelerator.prepare(
            recipe.model.train(), _adamw(recipe), loader(recipe, settings.workers, device)
        )
        batches = forever(data)
        while boundary():
            loss = recipe.loss(model, next(batches))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()

    return run


def lightning_trainer(recipe: Recipe, device: torch.device, settings: Settings) -> Loop:
    """Lightning's Trainer with all that it shows and keeps switched off."""
    import lightning

    _checked(recipe, device, settings)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """The recipe's model and loss."""

        def __init__(self) -> None:
            super().__init__()
            self.model = recipe.model

        def training_step(self, batch: Any, number: int) -> Any:
            """The loss of a batch."""
            return recipe.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            """The same as everybody's, but under AMP not fused: there Lightning does not clip with a fused one."""
            return _adamw(recipe, fused=settings.amp == "off")

    class Boundary(lightning.Callback):  # type: ignore[misc, name-defined]
        """Waits before each step."""

        def __init__(self, boundary: Callable[[], bool]) -> None:
            self.boundary = boundary

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            """The last step ends training after itself."""
            trainer.should_stop = not self.boundary()

    def run(boundary: Callable[[], bool]) -> None:
        warnings.filterwarnings("ignore", module="lightning")
        for name in ("lightning", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.ERROR)
        precision: Any = {"off": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[settings.amp]
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision=precision,
            gradient_clip_val=1.0,
            max_steps=1_000_000,
            max_epochs=-1,
            callbacks=[Boundary(boundary)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), loader(recipe, settings.workers, device))

    return run


def plain_under_traceml(recipe: Recipe, device: torch.device, settings: Settings) -> Loop:
    """The plain loop, each step traced by TraceML, which sends what it measures to its aggregator beside us.

    From its first turn to the end of the process TraceML samples once a second, and times the batches of every
    DataLoader whose iteration begins later: let no other contender begin after it.
    """

    def run(boundary: Callable[[], bool]) -> None:
        import traceml_ai

        _start_traceml()
        loop = PlainLoop(recipe, device, settings)
        while boundary():
            with traceml_ai.trace_step(loop.model):
                loop.step()

    return run


@cache
def _start_traceml() -> None:
    import traceml_ai

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    at_exit = ExitStack()
    atexit.register(at_exit.close)  # after TraceML's own, which was registered later
    logs = at_exit.enter_context(tempfile.TemporaryDirectory())
    given = f"serve --mode summary --logs-dir {logs} --run-name bench --aggregator-port {port}"
    program = "from traceml_ai.launcher.cli import main; main()"
    server = subprocess.Popen([sys.executable, "-c", program, *given.split()], stdout=subprocess.DEVNULL)
    at_exit.enter_context(server)
    at_exit.callback(server.terminate)
    traceml_ai.init(
        ui_mode="summary",
        logs_dir=logs,
        session_id="bench",
        aggregator_port=port,
        connect_timeout_sec=60.0,
        on_missing_aggregator="raise",
    )
