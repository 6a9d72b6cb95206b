"""Real text that every Python carries, to try a recipe on without a download: the standard library's own words."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

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


def reference() -> list[str]:
    """The chapters of the language reference behind `help()`."""
    return list(topics.values())


def docstrings_by_package() -> list[tuple[str, str]]:
    """The first paragraph of each docstring in `PACKAGES`, and the package that it is from; each text once."""
    return list({text: package for package in PACKAGES for _, text in _docstrings(package)}.items())


def questions() -> list[list[dict[str, str]]]:
    """Chats of a question about a function of the standard library and its docstring as the answer."""
    chats = {}
    for package in PACKAGES:
        for name, text in _docstrings(package):
            if not any(part.startswith("_") for part in name.split(".")):
                chats[name] = [
                    {"role": "user", "content": f"What does {name} of Python's standard library do?"},
                    {"role": "assistant", "content": text},
                ]
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
