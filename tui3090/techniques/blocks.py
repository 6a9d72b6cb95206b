"""What the techniques that work on blocks (checkpointing, compile, offload) share: another forward for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


def configs_of(model: nn.Module) -> list[Any]:
    """Those of transformers; parts of a model may have one of their own. Looks at every module: not for each step."""
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    return list(configs.values())


@contextmanager
def no_key_value_cache(configs: Iterable[Any]) -> Iterator[None]:
    """transformers' key-value cache, which training has no use for, is off: recomputation would fill it twice, and the
    compiler would compile each block anew for the place it has in it.
    """
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
