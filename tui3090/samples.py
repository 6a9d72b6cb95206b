"""Real text that every Python carries, to try a recipe on without a download: the standard library's own words."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tui3090.rows import Row

PACKAGES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "mailbox",
    "multiprocessing",
    "tarfile",
    "unittest",
    "urllib",
)
"""Parts of the library with a hundred docstrings or more."""
SHORT = 20
"""Characters of a docstring that says something."""


def reference() -> list[Row]:
    """The chapters of the language reference behind `help()`: rows with a `text`."""
    return [{"text": chapter} for chapter in topics.values()]


def docstrings_by_package() -> list[Row]:
    """Rows of the first paragraph of a docstring in `PACKAGES` as `text` and its package as `label`; each text once."""
    packages = {text: package for package in PACKAGES for _, text in _docstrings(package)}
    return [{"text": text, "label": package} for text, package in packages.items()]


def questions() -> list[Row]:
    """Rows of `messages`: a question about a function of the standard library, and its docstring as the answer."""
    chats: dict[str, Row] = {}
    for package in PACKAGES:
        for name, text in _docstrings(package):
            if not any(part.startswith("_") for part in name.split(".")):
                asked = {"role": "user", "content": f"What does {name} of Python's standard library do?"}
                chats[name] = {"messages": [asked, {"role": "assistant", "content": text}]}
    return list(chats.values())


def _docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Qualified names of a package's functions and methods, and the first paragraphs of their docstrings."""
    path = Path(sysconfig.get_paths()["stdlib"]) / package
    sources = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    for source in sources:
        yield from _of_body(ast.parse(source.read_bytes()).body, package)


def _of_body(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        name = f"{owner}.{node.name}"
        text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if len(text) >= SHORT:
            yield name, text
        if isinstance(node, ast.ClassDef):
            yield from _of_body(node.body, name)
