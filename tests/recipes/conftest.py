"""The tiny models and their data, made once."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tui3090.recipe import Recipe

Make = Callable[..., Recipe]


CARD = torch.cuda.is_available()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On one thread, because two that wait for each other crawl on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test in which a host's name is asked for: whatever fetches something begins with that."""
    asked: list[Any] = []

    def refuse(host: Any, *rest: Any, **options: Any) -> Any:
        asked.append(host)
        raise socket.gaierror(f"the test lets nobody ask for {host}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not asked


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bert/, gpt2/ and llama/ with weights and tokenizers, and their data in .jsonl files."""
    from tests.recipes import tiny

    folder = tmp_path_factory.mktemp("tiny")
    tiny.bert(folder / "bert")
    tiny.gpt2(folder / "gpt2")
    tiny.llama(folder / "llama")
    tiny.labelled(folder / "bert.jsonl")
    tiny.texts(folder / "gpt2.jsonl")
    tiny.chats(folder / "lora.jsonl")
    return folder


@pytest.fixture
def make(tiny_folder: Path) -> Make:
    """Makes the recipe of a name with a tiny model and its data: `make("bert", batch_size=4)`."""

    def made(name: str, **options: Any) -> Recipe:
        from importlib import import_module

        model = tiny_folder / ("llama" if name == "lora" else name)
        given = {"model": str(model), "data": str(tiny_folder / f"{name}.jsonl"), "max_length": 128, **options}
        torch.manual_seed(0)
        # where a run loads it: one before in this thread has left a stream of its own as the current one
        with torch.cuda.stream(torch.cuda.default_stream()) if CARD else nullcontext():
            recipe: Recipe = import_module(f"tui3090.recipes.{name}").recipe(**given)
        return recipe

    return made
