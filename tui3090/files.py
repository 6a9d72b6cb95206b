"""Opening files of a run folder, which may come from anywhere.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """`path` opened for reading, links followed. Raises OSError also for what is no regular file.

    A FIFO under a file's name would wait for its writer for ever, and a device may have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_regular(path: Path) -> bool:
    """Whether `path` leads to a regular file that may be looked at; never raises."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False
