"""torch's message when memory is full: the remedy for pieces only where pieces are the trouble."""

from __future__ import annotations

from tui3090.meters.oom import explain

MESSAGE = (
    "CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 31.73 GiB of which {free} is free. "
    "{others}Including non-PyTorch memory, this process has 18.99 GiB memory in use. Of the allocated memory "
    "{allocated} is allocated by PyTorch, {graphs}and {cached} is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def message(**changes: str) -> str:
    given = {"wanted": "22.78 GiB", "free": "12.73 GiB", "allocated": "9.08 GiB", "cached": "9.35 GiB"}
    return MESSAGE.format(**{"others": "", "graphs": ""} | given | changes)


def test_memory_in_pieces() -> None:
    said = explain(message())
    assert said.startswith("Memory is in pieces: 22.78 GiB were asked for and 12.73 GiB free, tensors hold 9.08 GiB, ")
    assert "9.35 GiB are cached but unusable for this request" in said
    assert "next run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in said
    assert "a running process can't change it" in said


def test_memory_that_tensors_hold() -> None:
    said = explain(message(wanted="2.00 MiB", free="1.50 MiB", allocated="825.15 MiB", cached="24.85 MiB"))
    assert said == "Memory is full: 2.0 MiB were asked for and 1.5 MiB free, tensors hold 0.81 GiB."


def test_a_fifth_is_the_limit() -> None:
    assert "expandable" not in explain(message(allocated="8.10 GiB", cached="1.90 GiB"))
    assert "expandable" in explain(message(allocated="8.00 GiB", cached="2.00 GiB"))


def test_who_else_holds_it() -> None:
    others = "Process 11 has 3.00 GiB memory in use. Process 12 has 512.00 MiB memory in use. "
    graphs = "with 1.25 GiB allocated in private pools (e.g., CUDA Graphs), "
    said = explain(message(others=others, graphs=graphs, cached="1.00 GiB"))
    assert said.endswith("tensors hold 9.08 GiB, 1.25 GiB of it in captured graphs, other processes 3.50 GiB.")


def test_another_message_is_not_explained() -> None:
    assert explain("CUDA out of memory. Tried to allocate 2.00 GiB.") == ""
    assert explain("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.") == ""
