"""Loads torch's libraries without the interpreter's lock, which Python's own import holds all the while.

Linking them takes a quarter of a second, longer when they are not in memory yet; no key would be answered meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class _LibrariesFirst(MetaPathFinder):
    """Finds nothing; asked for `torch._C`, it loads what that is linked with.

    Not before: by then torch has loaded the CUDA libraries it wants. And only what needs no Python: libtorch_python,
    whose start may, is left to the import.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Load; where that fails in any way, the import does it, or says why not."""
        if fullname == "torch._C" and path:
            with contextlib.suppress(Exception):
                _open(Path(path[0]) / "lib" / "libtorch.so")


@contextlib.contextmanager
def libraries_first() -> Iterator[None]:
    """Inside, `import torch` lets other threads run while its libraries are linked."""
    finder = _LibrariesFirst()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(finder)


def _open(library: Path) -> None:
    """As importing would, with its flags; ctypes lets go of the lock in a function that it calls, not in CDLL."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlopen(bytes(library), sys.getdlopenflags())
