"""What the techniques that work on blocks (checkpointing, compile, offload) share: another forward for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module's forward is `forward`; afterwards it is what it was. Nests: the class itself is never touched."""
    own = vars(module)  # straight: torch's own way to set an attribute is slow, and this comes with every step
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
    compiler would compile each block anew for the place it has in it. Parts of a model may have a config of their own.
    """
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    caching: list[Any] = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
