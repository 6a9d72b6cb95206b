"""Activation checkpointing: blocks keep only their inputs, and are computed again in backward.

Always torch's non-reentrant form: it needs no input that requires a gradient (frozen embeddings would silently lose the
gradients of everything behind them in the re-entrant form) and preserves the random state, so that dropout draws the
same mask again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tui3090.meters.flops import recompute_context
from tui3090.rewind import forward_state, holders
from tui3090.settings import Settings
from tui3090.techniques.blocks import configs_of, forward_replaced, no_key_value_cache

if TYPE_CHECKING:
    from tui3090.techniques import Machine


def unavailable(machine: Machine, settings: Settings) -> str | None:
    """It needs blocks to cut at."""
    if settings.checkpointing and not machine.blocks:
        return "The model has no list of two or more equal blocks to cut at: give Recipe(blocks=[...])."
    return None


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of every outermost ModuleList or Sequential of two or more modules of one class, in model order.

    Lists inside a block (its experts, say) are left alone: they are computed again with it.
    """
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        children = list(model)
        if len(children) >= 2 and len({type(child) for child in children}) == 1 and list(children[0].parameters()):
            return children
    return [block for child in model.children() for block in find_blocks(child)]


class Checkpointing:
    """Recomputes a model's blocks. What it has to look for in the model it finds once, not with every step."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._configs = configs_of(model)
        self._blocks = [(block, holders(block)) for block in blocks]

    @contextmanager
    def in_force(self, every: int) -> Iterator[None]:
        """Every `every`-th block is recomputed in backward; 0: none. Afterwards the model is as it was.

        Must stay entered until backward is over.
        """
        if not every:
            yield
            return
        with ExitStack() as undo:
            undo.enter_context(no_key_value_cache(self._configs))
            for block, held in self._blocks[::every]:
                undo.enter_context(forward_replaced(block, _recomputed(block, held)))
            yield


def _recomputed(block: nn.Module, held: Sequence[nn.Module]) -> Callable[..., Any]:
    """The block's forward under torch's checkpoint; `held` are its modules that hold buffers.

    torch looks for the card whose random state it must put back among the positional arguments alone: with a block that
    takes its input by keyword, the recomputation would draw another dropout. So all are handed over by position.
    """
    forward, contexts = block.forward, partial(_contexts, forward_state(held))

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        names, count = tuple(kwargs), len(args)

        def by_position(*given: Any) -> Any:
            return forward(*given[:count], **dict(zip(names, given[count:])))

        return checkpoint(by_position, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)

    return recomputed


def _contexts(state: list[Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What torch's checkpoint enters around the forward, which comes next, and around the recomputation."""
    before = [buffer.clone() for buffer in state]
    return nullcontext(), _recomputing(state, before, recompute_context())


@contextmanager
def _recomputing(state: list[Tensor], before: list[Tensor], not_model: AbstractContextManager[None]) -> Iterator[None]:
    """The block begins with the state that its forward began with, and leaves none; it runs no model FLOP.

    So running statistics do not see a batch twice, and a spectral norm divides by what it divided by.
    """
    after = [buffer.clone() for buffer in state]
    _put(state, before)
    try:
        with not_model:
            yield
    finally:
        _put(state, after)


def _put(state: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(state, values):
        buffer.copy_(value)
