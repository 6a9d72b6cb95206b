"""What the techniques that work on blocks (checkpointing, compile, offload) share: another forward for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module's forward is `forward`; afterwards it is what it was. Nests: the class itself is never touched."""
    own = vars(
        module
    )  # straight, for torch's own way to set an attribute takes a while, and this comes with every step
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


@contextmanager
def no_key_value_cache(model: nn.Module) -> Iterator[None]:
    """transformers' key-value cache, which training has no use for, is off: recomputation would fill it twice, and the
    compiler would compile each block anew for the place it has in it."""
    configs = _caching(model)
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def _caching(model: nn.Module) -> list[Any]:
    """The configs that ask for a key-value cache: of a model of transformers, and of its parts that have their own."""
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if getattr(config, "use_cache", False)]
