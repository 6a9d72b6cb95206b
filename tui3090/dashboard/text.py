"""Words for the screen: rows of (text, role), cut and padded by terminal cells, and figures as people write them.

A role says what a piece of text means; app.tcss and panel.py decide its colour:

    plain  dim  bold     weight
    good  warn  bad      judgement, always beside words that say the same
    accent               what is worth the first look
    key                  a key to press
    raw  smooth          the two curves of a chart

Nothing here imports Textual. Widths are terminal cells by rich's table, which is the one that paints.
"""

from __future__ import annotations

import math
import re
import time
import unicodedata

from rich.cells import cell_len, set_cell_size

Row = list[tuple[str, str]]
"""One line of a panel: pieces of text, each with its role."""

ROLES = ("plain", "dim", "bold", "good", "warn", "bad", "accent", "key", "raw", "smooth")

UNKNOWN = "n/a"
"""How an unknown figure is written."""

GIB = 1 << 30


def clean(text: str) -> str:
    """`text` from outside made harmless on one line: control and format characters become visible or a space.

    An escape character becomes ␛, so that a sequence is shown and not obeyed; tabs, line ends and other controls become
    spaces; what reorders or hides text (bidi marks, zero-width characters) and lone surrogates become �.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _harmless(char) for char in text)


def _harmless(char: str) -> str:
    if char == "\x1b" or char == "\x9b":
        return "␛"
    return "�" if unicodedata.category(char) in ("Cf", "Cs", "Co", "Cn") else " "


def width(text: str) -> int:
    """The terminal cells that `text` takes."""
    return len(text) if text.isascii() else cell_len(text)


def cut(text: str, cells: int) -> str:
    """`text` in at most `cells` cells, with … where something was left off."""
    if width(text) <= cells:
        return text
    return set_cell_size(text, cells - 1).rstrip() + "…" if cells > 0 else ""


def fit(text: str, cells: int, right: bool = False) -> str:
    """`text` in exactly `cells` cells: cut with …, or padded; `right` puts it at the right end."""
    text = cut(text, cells)
    space = " " * (cells - width(text))
    return space + text if right else text + space


def row_width(row: Row) -> int:
    """The terminal cells that `row` takes."""
    texts = [text for text, _ in row]
    whole = "".join(texts)
    return len(whole) if whole.isascii() else sum(map(width, texts))


def row_text(row: Row) -> str:
    """`row` without its roles."""
    return "".join(text for text, _ in row)


def fit_row(row: Row, cells: int) -> Row:
    """`row` in exactly `cells` cells, cut with … or padded; its empty pieces are left out."""
    space = cells - row_width(row)
    if space >= 0:
        return [(text, role) for text, role in [*row, (" " * space, "plain")] if text]
    fitted: Row = []
    left = max(0, cells)
    for text, role in row:
        size = width(text)
        if size >= left:
            # also where this piece just fits: something after it is left off
            return [*fitted, (fit(text + " …" if size == left else text, left), role)] if left else fitted
        if text:
            fitted.append((text, role))
        left -= size
    return fitted


def brief(sentence: str, cells: int) -> str:
    """A sentence from outside; where it takes more than `cells` cells what it needs, or its first clause."""
    words = clean(sentence)
    if width(words) > cells:
        _, needs, what = words.partition(" needs ")
        words = re.split(r", |: | \(|; |\.$", f"needs {what}" if needs else words)[0]
    if width(words) > cells:
        words = re.split(r" to | of ", words)[0]
    return cut(words, cells)


def spread(left: Row, right: Row, cells: int) -> Row:
    """`left` at the left end and `right` at the right end of `cells` cells; where both don't fit, `right` goes."""
    space = cells - row_width(left) - row_width(right)
    if space < 1:
        return fit_row(left, cells)
    return [*left, (" " * space, "plain"), *right]


def number(value: float | None, decimals: int = 0) -> str:
    """`12 345` or, with decimals, `12 345.6`; n/a for None; nan and inf as such."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{decimals}f}".replace(",", " ")


def rounded(value: float | None, digits: int = 3) -> str:
    """`value` to so many significant digits, e.g. 1.06, 15 500, 0.0123; exponents (3.82e-05) only below 0.001."""
    if value is None or not math.isfinite(value) or value == 0:
        return number(value)
    if abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return number(round(value, decimals), max(0, decimals))


def percent(share: float | None, decimals: int = 0) -> str:
    """A fraction of 1 as `46.9 %`; n/a for None."""
    return UNKNOWN if share is None else f"{number(share * 100, decimals)} %"


def gib(size: float | None) -> str:
    """Bytes in GiB with two decimals, the unit left to the context; n/a for None."""
    return UNKNOWN if size is None else number(size / GIB, 2)


def duration(seconds: float | None) -> str:
    """`0.4 s`, `41 s`, `15 min 18 s`, `3 h 21 min`, `2 d 4 h`; n/a for None and what is not a time."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def clock(moment: float, seconds: bool = False) -> str:
    """The local time of day at `moment` (seconds since the epoch): `03:41`, or `03:41:07`; n/a for what is no time."""
    try:
        return time.strftime("%H:%M:%S" if seconds else "%H:%M", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return UNKNOWN
