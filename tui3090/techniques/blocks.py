"""What the techniques that work on blocks (checkpointing, compile, offload) share: another forward for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module's forward is `forward`; afterwards it is what it was. Nests: the class itself is never touched."""
    own = vars(module)  # straight, for torch's own way to set an attribute takes a while, and this comes with every step
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
    config: Any = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = True
