"""What a forward keeps in memory for its backward, layer by layer: the activations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

LISTED = 10
"""Layers that the record names."""


class ActivationMeter:
    """Counts what autograd saves from `enter` to `exit`, each piece of memory once, at the layer that saved it first.

    Parameters and buffers are not counted, for they are there anyway. With checkpointing a block counts what it keeps,
    its inputs. Use it around the forward of one micro-batch, in the thread that runs it.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._model = model
        self._known = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._layers = ["the loss"]
        self._alike: Counter[str] = Counter()
        self._saved: Counter[str] = Counter()
        self._exit = ExitStack()
        self._within = {id(module) for block in blocks if list(block.children()) for module in block.modules()}

    def enter(self) -> None:
        """Begin to count."""
        for name, module in self._model.named_modules():
            name = name or type(module).__name__
            if id(module) in self._within:  # equal layers of equal blocks are one entry
                name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name, count=1)
            self._alike[name] += 1
            for handle in (
                module.register_forward_pre_hook(partial(self._into, name)),
                module.register_forward_hook(self._out, always_call=True),
            ):
                self._exit.callback(handle.remove)
        self._exit.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))

    def exit(self) -> None:
        """Stop counting; the model is as it was. What was saved stays saved."""
        self._exit.close()

    @property
    def total(self) -> int:
        """Bytes."""
        return self._saved.total()

    def layers(self) -> str:
        """The layers that keep most, for a record."""
        return "\n".join(
            f"{size} {name}" + (f" × {self._alike[name]}" if self._alike[name] > 1 else "")
            for name, size in self._saved.most_common(LISTED)
        )

    def _into(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._layers.append(name)

    def _out(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._layers.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        memory = _memory(tensor)
        if memory not in self._known:
            self._known.add(memory)
            self._saved[self._layers[-1]] += tensor.untyped_storage().nbytes()
        return tensor


def _memory(tensor: Tensor) -> int:
    """Tells pieces of memory apart: views of one have the same. A saved one's can't be given to another meanwhile."""
    return tensor.untyped_storage().data_ptr()
