"""numpy's global random stream, kept apart and read as quickly as torch's own.

numpy spells out the 624 words of its generator one by one, some thirty microseconds each time it is read or set, and
every window reads it. So a stream of somebody else's draws from a generator of its own, which takes the other's place
meanwhile, and what was read before is right for as long as the words in the generator's memory are the same.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WORDS = 624
"""Of the state of numpy's Mersenne twister."""
_BYTES = 4 * (WORDS + 1)
"""Of the words and the place in them that comes next."""

_read: tuple[Any, bytes, Any] | None = None
"""The generator that was read last, its words, its state."""
_own: Any = None
"""The generator of what draws apart."""


def state() -> Any:
    """As `numpy.random.get_state()`; None where numpy is not loaded."""
    global _read
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return numpy.random.get_state(legacy=False)
    words = ctypes.string_at(generator.ctypes.state_address, _BYTES)
    if _read is None or _read[0] is not generator or _read[1] != words:
        found = numpy.random.get_state()
        # a number that waits is taken without a word being drawn
        _read = (generator, words, found) if not _number_waits(found) else None
        return found
    return _read[2]


def restore(state: Any) -> None:
    """Go on from a state that was read."""
    global _read
    _read = None
    sys.modules["numpy"].random.set_state(state)


@contextmanager
def apart() -> Iterator[None]:
    """Draws inside, which seed the stream first, leave it outside as it was."""
    global _own
    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    before, outer = state(), numpy.random.get_bit_generator()
    _own = _own or numpy.random.MT19937(0)
    numpy.random.set_bit_generator(_own if outer is not _own else numpy.random.MT19937(0))
    try:
        yield
    finally:
        numpy.random.set_bit_generator(outer)
        if _number_waits(before):
            restore(before)  # the exchange has lost it


def _number_waits(state: Any) -> bool:
    """Whether of a pair of normal numbers, which are drawn together, the second has not been asked for yet."""
    return bool(state["has_gauss"] if isinstance(state, dict) else state[3])
