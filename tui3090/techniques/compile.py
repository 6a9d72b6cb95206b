"""torch.compile of a model's blocks, one by one, and of the loss around the model, in the training thread.

Equal blocks share what was compiled for the first of them, so that compiling takes as long for 48 blocks as for one.
The blocks stay the modules they are (their forward is replaced while the technique is on), so the keys of the state
dict do, too. What was compiled is kept: switching on again compiles nothing. Inductor's own CUDA graphs are not used,
our replay captures the compiled kernels instead.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tui3090.meters.flops import counting
from tui3090.recipe import default_loss
from tui3090.settings import CORES, Settings
from tui3090.techniques.blocks import configs_of, forward_replaced, no_key_value_cache

if TYPE_CHECKING:
    from tui3090.techniques import Machine

BACKEND = "inductor"
OPTIONS: dict[str, Any] = {"fallback_random": True}
"""Dropout draws what it draws in eager: inductor's own draws would be cheaper, and others."""
VARIANTS = 8
"""Compilations of a forward for one precision at the most (shapes, mostly), and one more for each block, should they
differ; further ones run uncompiled."""
WORKERS = 8
"""Inductor's processes at the most: a block's kernels are a dozen or two."""
NOTED_BREAKS = 3
"""Graph breaks that are spoken of."""


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """It needs a compiler, and on a card one that Triton can make code for."""
    if not settings.compile:
        return None
    if machine.cuda and machine.capability < (7, 0):
        return "torch.compile needs a card of the Volta generation or newer: Triton makes no code for older ones."
    return machine.no_compiler or None


def missing_compiler(device: torch.device) -> str:
    """What compiling for a device lacks on this machine, a sentence; empty: nothing that can be seen beforehand."""
    if device.type == "cuda":
        if find_spec("triton") is None:
            return "compile unavailable: Triton, which makes the kernels, is not installed (pip install triton)."
        given, known = os.environ.get("CC"), ["gcc", "clang"]
    else:
        given, known = os.environ.get("CXX"), ["g++"]
    names = given.split()[:1] if given and given.strip() else known
    if not any(shutil.which(name) for name in names):
        return f"compile unavailable: no compiler ({' or '.join(names)} is not on the PATH; apt install g++)."
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "compile unavailable: no Python.h for the compiler (apt install python3-dev)."
    return ""


Loss = Callable[[nn.Module, Any], Any]
_Made = tuple[list[tuple[nn.Module, Callable[..., Any]]], Loss]
"""The modules whose forward is replaced, by what; and the loss."""


class Compiled:
    """The compiled forwards of a model's blocks (of a model without any, its own), and the compiled loss."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], loss: Loss) -> None:
        self.say: Callable[[str, str], None] = lambda text, level: None
        """Takes a sentence for the log, and its level."""
        self.progress: Callable[[str], None] = lambda text: None
        """Takes what is being compiled."""
        self._model = model
        self._configs = configs_of(model)
        self._loss = loss
        self._pieces = list(blocks) or [model]
        self._takes_loss = bool(blocks) and loss is not default_loss  # which only asks the model for its own
        self._made: dict[tuple[str, bool], _Made] = {}
        """By precision: what is compiled for one counts against the bound of that one alone."""
        self._preparing = False
        self._at = 0
        self._began = 0.0
        self._seconds, self._times = 0.0, 0
        self._lately = False
        self._ran, self._said_unused = False, False
        self._before: Counter[str] = Counter()
        """The graph breaks of the process before this forward."""
        self._noted: set[str] = set()
        """Those that were spoken of."""

    @contextmanager
    def in_force(self, settings: Settings) -> Iterator[Loss]:
        """The blocks' forwards are compiled, if `settings` say so; gives the loss, compiled too. Must stay entered
        until backward is over.

        Where FLOPs are being counted they are not: the compiler leaves code alone for good that it first meets under a
        dispatch mode.
        """
        if not settings.compile or counting():
            yield self._loss
            return
        self._preparing = True
        _bound_workers()
        if not self._made:
            self.progress("loading the compiler")
        from torch._dynamo import config as dynamo
        from torch._functorch import config as functorch

        variants = VARIANTS + len(self._pieces)
        self._seconds, self._times, self._ran, self._before = 0.0, 0, False, _breaks()
        with ExitStack() as undo:
            undo.enter_context(no_key_value_cache(self._configs))
            undo.enter_context(dynamo.patch(recompile_limit=variants, accumulated_recompile_limit=max(256, variants)))
            if hasattr(functorch, "backward_pass_autocast"):  # an older torch has no choice
                undo.enter_context(functorch.patch(backward_pass_autocast="off"))  # as eager does it
            undo.enter_context(self._watched())
            forwards, loss = self._for(settings)
            for module, forward in forwards:
                undo.enter_context(forward_replaced(module, forward))
            self._preparing = False
            yield loss
        self._tell()

    def lately(self) -> bool:
        """Whether something was compiled since the last call."""
        lately, self._lately = self._lately, False
        return lately

    def failed(self, error: Exception) -> bool:
        """Whether an error that ended a forward or backward may be the compiler's: run it again without, to see."""
        if self._preparing or self._times:
            return True
        from torch._dynamo.exc import TorchDynamoException

        return isinstance(error, TorchDynamoException)

    def leave_loss(self) -> bool:
        """After a failure: try the blocks alone. Returns whether that is something else than before."""
        took, self._takes_loss = self._takes_loss, False
        self._made.clear()  # what failed once would pass as not worth compiling
        return took

    def _run(self, number: int, forward: Callable[..., Any], piece: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._at, self._ran = number, True
        try:
            return forward(piece, *args, **kwargs)
        finally:
            self._at = 0

    def _for(self, settings: Settings) -> _Made:
        """The forwards to put in place, and the loss. Blocks that have the same forward share what is compiled."""
        key = (settings.amp, settings.tf32)
        if key in self._made:
            return self._made[key]
        compiled: dict[Any, Callable[..., Any]] = {}
        forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        # disabled: what calls a block, or the model, is not to be compiled into one with it
        for number, piece in enumerate(self._pieces, 1):
            forward: Any = piece.forward
            own = getattr(forward, "__self__", None) is piece
            function = forward.__func__ if own else partial(_without_first, forward)
            if function not in compiled:
                compiled[function] = _compile(_calling(function))
            forwards.append((piece, torch.compiler.disable(partial(self._run, number, compiled[function], piece))))
        loss = self._loss
        if self._takes_loss:
            forwards.append((self._model, torch.compiler.disable(self._model.forward)))
            loss = _compile(loss)
        self._made[key] = forwards, loss
        return self._made[key]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Be told when something is compiled; backward may be so on autograd's thread of the device."""
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._starts)
        callback_handler.register_end_callback(self._ends)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._starts)
            callback_handler.remove_end_callback(self._ends)

    def _starts(self, args: Any) -> None:
        self._began = time.perf_counter()
        if args.callback_trigger.name == "LAZY_BACKWARD":
            self.progress("compiling, backward")
        else:
            self.progress(f"compiling, block {self._at} of {len(self._pieces)}" if self._at else "compiling, loss")

    def _ends(self, args: Any) -> None:
        self._times += 1
        self._lately = True
        self._seconds += time.perf_counter() - self._began

    def _tell(self) -> None:
        """What a forward and backward brought to light."""
        if not self._ran and not self._said_unused:
            self._said_unused = True
            what = "model" if self._pieces == [self._model] else "model's blocks"
            self.say(f"the {what} can't be compiled, for the loss does not call the forward", "warning")
        if self._times:
            self.say(f"compiled in {self._seconds:.0f} s, in {self._times} pieces", "info")
        self._times = 0
        self._tell_of_breaks()

    def _tell_of_breaks(self) -> None:
        for broke in (_breaks() - self._before).keys() - self._noted:
            if "torch.compiler.disable" in broke:
                continue  # ours: the loss calls the model
            if "recompile limit" in _line(broke):
                text = (
                    "what compiled code depends on keeps changing (batch shapes, a list that grows): what is new runs"
                )
                self.say(f"{text} uncompiled from here on", "warning")
            elif len(self._noted) < NOTED_BREAKS:
                self.say(f"compiled in parts where the compiler can't follow: {_line(broke)}", "info")
            self._noted.add(broke)


def _breaks() -> Counter[str]:
    """Where the compiler gave up following code, and how often, in this process."""
    from torch._dynamo.utils import counters

    return counters["graph_break"] + counters["unimplemented"]


def why_failed(error: BaseException) -> str:
    """What the compiler failed at, in a line: the innermost error's."""
    while (inner := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = inner
    return _line(str(error)) or type(error).__name__


def _line(text: str) -> str:
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "")


def _without_first(function: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours that calls it: the compiler passes over code that is torch's own, as nn.Sequential's is."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """It compiled, with code of its own: what is compiled, and how often it may be, belongs to that."""
    given = function if isinstance(function, FunctionType) else _calling(function)
    own = FunctionType(
        given.__code__.replace(), given.__globals__, given.__name__, given.__defaults__, given.__closure__
    )
    own.__kwdefaults__ = given.__kwdefaults__
    compiled: Callable[..., Any] = torch.compile(own, backend=BACKEND, options=OPTIONS)
    return compiled


def _bound_workers() -> None:
    """Before inductor is imported, which starts its processes (for Triton only; on the CPU the compiler is one itself).

    They are forked from a process that is executed, not from this one with its threads; they inherit that SIGHUP is
    ignored, and end when this process does.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, min(WORKERS, CORES))))
