"""What profiled steps cost and leave behind: a step's time before and after two of them, on a card.

    python -m tests.bench.profiled

A stack of GPT-2's size at 1 x 128 in bf16, launched eagerly and replayed from one graph, with the profiler's hooks
taken down afterwards and with them left; each in a process of its own. Before stands twice, so that what drifts by
itself is seen.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from tui3090.meters.kernels import Profiler

WAYS = "eager", "replay"
HOOKS = {"1": "taken down", "0": "left"}
TURNS, TURN_S = 5, 0.4


def step_of() -> Callable[[], None]:
    """A step of a dozen blocks, all of it on the card."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(block, 12, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
    x = torch.randn(1, 128, 768, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def replayed(step: Callable[[], None]) -> Callable[[], None]:
    """The same, captured once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(way: str) -> None:
    """Print a row."""
    step = step_of()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.synchronize()
    run = replayed(step) if way == "replay" else step
    steps = max(5, round(TURN_S / _milliseconds(run, 10) * 1e3))
    before, again = ([_milliseconds(run, steps) for _ in range(TURNS)] for _ in range(2))
    for _ in range(2):  # the first one loads libraries
        began = time.perf_counter()
        with Profiler() as profiler:
            run()
            torch.cuda.synchronize()
        kernels, look_ms = len(profiler.kernels()), (time.perf_counter() - began) * 1e3
        _milliseconds(run, steps)  # as training goes on: a look that followed at once would wait
    after = [_milliseconds(run, steps) for _ in range(TURNS)]
    cells = (f"{statistics.median(ms):.3f} ({min(ms):.3f} to {max(ms):.3f})" for ms in (before, again, after))
    ratio = statistics.median(after) / statistics.median([*before, *again])
    hooks = HOOKS[os.environ["TEARDOWN_CUPTI"]]
    print(f"| {way}, hooks {hooks} | {kernels} | {look_ms:.0f} | {' | '.join(cells)} | {ratio:.3f} |", flush=True)


def _milliseconds(run: Callable[[], None], steps: int) -> float:
    """Of a step."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def main() -> None:
    """Print the table."""
    if len(sys.argv) > 1:
        return measure(sys.argv[1])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| | kernels | second look, ms | before, ms a step | again | after | after over before |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for way, teardown in itertools.product(WAYS, HOOKS):
        environment = {**os.environ, "TEARDOWN_CUPTI": teardown}
        subprocess.run([sys.executable, "-m", "tests.bench.profiled", way], env=environment, check=False)
    return None


if __name__ == "__main__":
    main()
