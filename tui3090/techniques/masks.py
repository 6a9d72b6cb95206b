"""Attention masks of transformers' models under graph capture.

transformers looks on the host whether a mask hides anything, and where it does not takes a faster attention kernel,
with another draw of dropout. While a graph is captured it can't look, and some versions then take the general kernel
(5.17, say), so that replay would not compute what eager does. Here a capture is given the answers that the eager run
got, for batches that bring no mask and no positions of their own: then the masks are the model's own, and the same for
every batch of that shape.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

ASKING = "transformers.masking_utils"
FRAMES = 4
"""How far above a look at a tensor's value the function that asks may be."""


class _Asked(TorchFunctionMode):
    """Notes what transformers' mask functions learn from tensors, or answers them."""

    def __init__(self, answers: list[bool] | None = None) -> None:
        super().__init__()
        self.noted: list[bool] = []
        self._answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__bool__ or not _by_mask_functions():
            return func(*args, **(kwargs or {}))
        if self._answers is None:
            answer = bool(func(*args))
        elif len(self.noted) < len(self._answers):
            answer = self._answers[len(self.noted)]
        else:
            raise RuntimeError("transformers asks more about the attention mask under capture than in eager")
        self.noted.append(answer)
        return answer


def _by_mask_functions() -> bool:
    frame = sys._getframe(2)
    for _ in range(FRAMES):
        if frame is None or frame.f_globals.get("__name__") == ASKING:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False


class MaskAnswers:
    """What a model of transformers learned in eager about the masks that it makes for a shape."""

    def __init__(self, batch: Any) -> None:
        brought = isinstance(batch, Mapping) and any("mask" in key or key == "position_ids" for key in batch)
        module = sys.modules.get(ASKING)
        self._module: Any = None if brought or not hasattr(module, "is_tracing") else module
        self._answers: list[bool] | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around an eager run. Raises RuntimeError where two batches got other answers."""
        if self._module is None:
            yield
            return
        with _Asked() as asked:
            yield
        if self._answers not in (None, asked.noted):
            raise RuntimeError("the model takes another attention kernel for one batch than for another of its shape")
        self._answers = asked.noted

    @contextmanager
    def given(self) -> Iterator[None]:
        """Around a capture."""
        if self._module is None:
            yield
            return
        before = self._module.is_tracing
        self._module.is_tracing = lambda *_: False
        try:
            with _Asked(self._answers or []):
                yield
        finally:
            self._module.is_tracing = before
