"""When Python looks for garbage that only cycles keep: between micro-batches, and not among what a run keeps anyway.

A look at all objects of a process with torch takes a tenth of a second, in which nothing is launched and no key is
answered. So what importing torch made is set aside unseen (`gc.freeze`), and what is there once the first step is done
after a look: from then on even a full collection sees only what came later.
Automatic collection stays on, by Python's own thresholds, except while a micro-batch or an update is being launched;
what became due meanwhile comes right after. Who has switched it off in his train.py is left alone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def later() -> Iterator[None]:
    """No automatic collection inside."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def set_aside() -> None:
    """Set aside all there is, without a look at it: modules that have just been imported stay."""
    gc.freeze()


def freeze() -> None:
    """Collect what is not set aside yet, then set aside what is left."""
    gc.collect()
    gc.freeze()
    # Python puts a full collection off until a quarter as many objects are new as the last one left: now it left none
    gc.collect()


def collect() -> None:
    """Collect everything, also what was set aside and is in use no more; it takes as long as before `freeze`."""
    if gc.get_freeze_count():
        gc.unfreeze()
        freeze()
    else:
        gc.collect()


def restore() -> None:
    """Nothing is set aside any more."""
    gc.unfreeze()
