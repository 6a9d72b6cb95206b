"""The FLOPs of a forward and backward, counted once for each shape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
"""The fused kernels behind scaled_dot_product_attention. torch has no formula for the CPU's and, in some versions, none
that takes fewer key heads than query heads."""


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Floating-point operations; a multiplication with its addition is two."""

    model: float
    """What the mathematics asks for: the numerator of MFU."""
    hardware: float
    """What ran: with what checkpointing and fused attention compute a second time."""


class FlopCounter:
    """Counts what its thread runs inside `with`: matrix products, convolutions and attention.

    Run one eager forward and backward of a micro-batch inside. Kernels that torch does not know (an external
    flash-attn, a custom extension) count as nothing. For a transformer the model's part is 6 * N * tokens
    + 12 * layers * heads * head size * context * tokens, N the parameters in matrix products; a causal mask is not
    taken off.
    """

    def __init__(self) -> None:
        self._model = self._hardware = 0
        self._understood = True
        self._recomputing = False
        registry = {op: self._counting(formula) for op, formula in flop_registry.items()}
        for kernel in _ATTENTION:
            name = f"_scaled_dot_product_{kernel}"
            registry[getattr(torch.ops.aten, name)] = self._attention
            registry[getattr(torch.ops.aten, f"{name}_backward")] = self._attention_backward
        self._mode: TorchDispatchMode = _EachOperator(registry)

    @property
    def count(self) -> FlopCount | None:
        """What was counted; None when nothing was, or when an operator's shapes were not understood."""
        return FlopCount(self._model, self._hardware) if self._hardware and self._understood else None

    def __enter__(self) -> Self:
        self._mode.__enter__()
        _active.counter = self
        return self

    def __exit__(self, *exception: Any) -> None:
        _active.counter = None
        self._mode.__exit__(*exception)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """What runs inside belongs to the hardware's count alone."""
        self._recomputing = True
        try:
            yield
        finally:  # checkpointing ends a recomputation by an exception
            self._recomputing = False

    def _add(self, model: int, hardware: int) -> None:
        self._hardware += hardware
        if not self._recomputing:
            self._model += model

    def _counting(self, formula: Callable[..., int]) -> Callable[..., None]:
        """torch's formula, with its result added up here. A shape that it refuses must not end the step it counts."""

        def counted(*args: Any, **kwargs: Any) -> None:
            try:
                flops = formula(*args, **kwargs)
            except Exception:
                self._understood = False
                return
            self._add(flops, flops)

        return counted

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> None:
        scores, values = _attention_products(query, key, value)
        self._add(scores + values, scores + values)

    def _attention_backward(
        self, _gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        # Two products for each of the forward's two; the kernel did not keep the scores and computes them again.
        scores, values = _attention_products(query, key, value)
        self._add(2 * scores + 2 * values, 3 * scores + 2 * values)


def _attention_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
    """FLOPs of query x key and of scores x value; all are [batch, heads, tokens, head size]."""
    batch, heads, tokens, _ = query.shape
    pairs = 2 * batch * heads * tokens * key.shape[-2]
    return pairs * query.shape[-1], pairs * value.shape[-1]


def recompute_context() -> AbstractContextManager[None]:
    """The context for a checkpoint's recomputation; to be made in its forward, as `context_fn` is.

    The forward knows which counter counts this thread; the recomputation may come on autograd's thread of the device.
    """
    counter: FlopCounter | None = getattr(_active, "counter", None)
    return counter.recomputing() if counter else nullcontext()


def counting() -> bool:
    """Whether what this thread runs is being counted."""
    return getattr(_active, "counter", None) is not None


_active = threading.local()
"""`counter`: the one that counts this thread."""


class _EachOperator(TorchDispatchMode):
    """Runs each operator as it runs uncounted, and shows it to its formula.

    torch's FlopCounterMode takes operators apart where it can, also those that the device has a kernel for (silu's
    backward, RMSNorm): the step that is counted would differ from one that is not in its last bits.
    """

    supports_higher_order_operators = True

    def __init__(self, formulas: dict[Any, Callable[..., None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas = formulas

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if formula := self._formulas.get(getattr(func, "_overloadpacket", func)):
            formula(*args, **kwargs, out_val=out)
        return out
