"""Which kernels a window runs and whether they use the Tensor Cores, told by their names under torch's profiler.

It is what every card can tell, a GeForce too, without a right to hardware counters; kernels inside a replayed graph are
seen as well. Labelled 'share of kernel time in Tensor Core kernels, sampled'.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LISTED = 8
"""Kernels, or layers, that a list names at the most."""
TEARDOWN_S = 0.1
"""From a look's end until CUPTI is surely down, if the card is called meanwhile; it takes some milliseconds."""

Uses = Literal["yes", "no", "unknown"]

_CUDA_CORES = re.compile(r"ffma|simt")
_TENSOR_CORES = re.compile(
    r"(?<!\d)(884|1688|16816|8816)(?!\d)|tensorop|xmma|gmma|hmma|nvjet|flash_|fmha"  # gmma: wgmma too
)
_MATMUL = re.compile(r"gemm|matmul|conv|attention|attn")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel."""

    name: str
    start_ns: int
    end_ns: int


def uses_tensor_cores(name: str) -> Uses:
    """Whether a kernel of this name uses them. The order matters: `sm80_xmma_gemm_…_ffma_…` multiplies in fp32.

    What Triton made may use them or not, and so may a matmul whose name follows no pattern of NVIDIA's libraries.
    """
    lower = name.lower()
    if _CUDA_CORES.search(lower) or ("sgemm" in lower and "tf32" not in lower):
        return "no"
    if _TENSOR_CORES.search(lower):
        return "yes"
    return "unknown" if "triton" in lower or _MATMUL.search(_head(lower)) else "no"


def is_fp32_matmul(name: str) -> bool:
    """Whether a kernel multiplies matrices in fp32, beside the Tensor Cores that could do it."""
    lower = name.lower()
    return uses_tensor_cores(name) == "no" and ("gemm" in lower or bool(_CUDA_CORES.search(lower)))


_GENERIC = re.compile(r"elementwise|multi_tensor_apply|reduce_kernel|^kernel\d?$|^device_kernel$", re.IGNORECASE)
"""Kernels that stand for any function: their template arguments say which."""
_TELLING = re.compile(
    r"(\w+?)(?:CUDAKernelImpl|KernelImpl|_kernel_cuda|_kernel_impl|_cuda_kernel|MathFunctor|Functor|_functor|Ops?)\b"
)
_WRAPPERS = {"gpu", "Binary", "AUnary", "BUnary", "Unary", "Reduce"}
"""What takes a function as an argument: the next word says which."""


def short_name(name: str) -> str:
    """A kernel's name as a person would say it: 'gelu', 'FusedAdam', 'ampere_bf16_s16816gemm'."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = _head(plain)
    base = head.rsplit("::", 1)[-1].strip()
    arguments = plain[len(head) :]
    if arguments and _GENERIC.search(base):
        library = re.search(r"\b(?:cutlass_|sm\d+_)\w+", arguments)
        if library:
            base = library.group()
        elif function := re.search(r"CUDAFunctor_?(\w+)", arguments):
            base = function.group(1)
        else:
            found = (telling.group(1) for telling in _TELLING.finditer(arguments))
            base = next((word for word in found if word not in _WRAPPERS), base)
    base = re.split(r"_\d+x\d+", base, maxsplit=1)[0]  # tiles and stages
    return base.removesuffix("_kernel").replace("vectorized_layer_norm", "layer_norm")[:32] or name[:32]


def _head(name: str) -> str:
    """A kernel's name without template arguments and parameters."""
    return re.split(r"[<(]", name, maxsplit=1)[0]


def read(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """The fields of a `Profiled` record that come from the kernels of a window."""
    total = sum(kernel.end_ns - kernel.start_ns for kernel in kernels)
    if not total:
        return {"tensor_core_share": None, "unknown_share": None, "fp32_share": None, "busy_share": None} | {
            "kernels": len(kernels),
            "kernel_s": 0.0,
        }
    spent: dict[Uses, Counter[str]] = {"yes": Counter(), "no": Counter(), "unknown": Counter()}
    fp32 = 0
    for name, time_ns in _by_name(kernels).items():
        spent[uses_tensor_cores(name)][short_name(name)] += time_ns
        fp32 += time_ns if is_fp32_matmul(name) else 0
    start, end = min(kernel.start_ns for kernel in kernels), max(kernel.end_ns for kernel in kernels)
    return {
        "tensor_core_share": spent["yes"].total() / total,
        "unknown_share": spent["unknown"].total() / total,
        "fp32_share": fp32 / total,
        "busy_share": _covered(kernels) / (end - start),
        "kernels": len(kernels),
        "kernel_s": total / 1e9,
        "with_tensor_cores": _listed(spent["yes"], total),
        "without": _listed(spent["no"], total),
        "unknown": _listed(spent["unknown"], total),
    }


def _by_name(kernels: Iterable[Kernel]) -> Counter[str]:
    spent: Counter[str] = Counter()
    for kernel in kernels:
        spent[kernel.name] += kernel.end_ns - kernel.start_ns
    return spent


def _covered(kernels: Iterable[Kernel]) -> int:
    """Nanoseconds in which at least one kernel ran."""
    covered = upto = 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns):
        covered += max(0, kernel.end_ns - max(kernel.start_ns, upto))
        upto = max(upto, kernel.end_ns)
    return covered


def _listed(spent: Counter[str], total: int) -> str:
    """The longest that take at least half a percent: 'gelu 6.1 %, FusedAdam 5.0 %'."""
    shares = [(name, time_ns / total) for name, time_ns in spent.most_common(LISTED)]
    return ", ".join(f"{name} {share:.1%}".replace("%", " %") for name, share in shares if share >= 0.005)


class Profiler:
    """Torch's profiler around one window; nothing may be in flight when it is entered and when it is left."""

    _last_ended = -math.inf
    """When the last look of the process ended, in seconds of time.monotonic."""

    def __init__(self) -> None:
        # CUPTI makes every launch dearer as long as it is there, and Kineto would leave it there. Before CUDA 12.6
        # replayed graphs do not survive that it goes and comes back. One or the other for all of the process: what is
        # taken down comes back only where this says that it will be taken down again.
        os.environ.setdefault("TEARDOWN_CUPTI", "1" if _cuda_version() >= (12, 6) else "0")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each look leaves lines of its own in the output
        self._profile = profile(activities=[ProfilerActivity.CUDA])

    def __enter__(self) -> Profiler:
        # a thread of Kineto's takes CUPTI down at a call that comes after a look: in the middle of the next one, which
        # then sees nothing, if that follows at once
        while os.environ["TEARDOWN_CUPTI"] == "1" and time.monotonic() < Profiler._last_ended + TEARDOWN_S:
            torch.cuda.synchronize()
            time.sleep(TEARDOWN_S / 20)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        Profiler._last_ended = time.monotonic()

    def kernels(self) -> list[Kernel]:
        """What ran. Reads the raw events: torch's own digest of them takes several times as long."""
        return list(kernels_of(self._profile.profiler.kineto_results.events()))  # type: ignore[union-attr]


def _cuda_version() -> tuple[int, ...]:
    """That torch was built for; () without."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part.isdigit())


def kernels_of(events: Iterable[Any]) -> Iterator[Kernel]:
    """The kernels among Kineto's events; copies and what marks ranges of kernels are none."""
    for event in events:
        if event.device_type() != DeviceType.CUDA or event.is_user_annotation():
            continue
        name = event.name()
        if not name.startswith(("Memcpy", "Memset")):
            yield Kernel(name, event.start_ns(), event.start_ns() + event.duration_ns())


def off_by_8(model: nn.Module) -> list[str]:
    """Layers that multiply by a weight with a dimension that 8 does not divide: 'classifier [2 × 1024]'.

    cuBLAS takes a slower kernel for such sizes on some cards, on others it pads them by itself.
    """
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        multiplies = isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or type(module).__name__ == "Conv1D"
        if not multiplies or not isinstance(weight, torch.Tensor) or weight.dim() < 2:
            continue
        # of a 4-bit base the shape is that of its packed bytes; the module says what it stands for
        rows, columns = (
            getattr(module, "out_features", weight.shape[0]),
            getattr(module, "in_features", weight.shape[1]),
        )
        if rows % 8 or columns % 8:
            found.append(f"{name or type(module).__name__} [{rows} × {columns}]")
    return found


def off_by_8_text(model: nn.Module) -> str:
    """The same in a line; equal layers of several blocks are told once, with their number."""
    counted = Counter(re.sub(r"\.\d+\.", ".*.", layer) for layer in off_by_8(model))
    names = [layer if times == 1 else f"{layer} ({times} times)" for layer, times in counted.items()]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
