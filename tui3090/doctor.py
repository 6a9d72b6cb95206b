"""`tui3090 doctor`: in one screen what this machine offers, and what each missing thing costs.

Cards are asked through NVML, so that CUDA is not started: that would take memory on a card. Each finding is given as
soon as it is known; torch, whose import takes seconds or fails, comes after what needs none.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import psutil
import pynvml

from tui3090.meters.cards import Card, cards, visible
from tui3090.meters.nvml import CardMissing, ask, by_user, close_nvml, gib, handle_of, open_nvml, text
from tui3090.meters.peaks import peak
from tui3090.recipe import harmless
from tui3090.settings import CORES
from tui3090.shm import SHM

ENOUGH_SHM = 1 << 30
SCREEN = (80, 24)
"""Columns and rows from which on every panel has its place."""

ESTIMATES = "how busy the Tensor Cores are is an estimate from kernels and FLOPs"
DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")

LIBRARIES = (
    ("transformers", "its models; the recipes bert, gpt2 and lora"),
    ("peft", "LoRA"),
    ("bitsandbytes", "8-bit optimizers, 4-bit models"),
    ("datasets", "its data sets"),
    ("accelerate", "loading big models in parts"),
    ("flash-attn", "its kernels; torch has its own"),
)
"""What a train.py may want, and what it is for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    cost: str = ""
    """What it costs the user that something is missing, with the way out; empty: nothing is missing."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a card can do, as NVML tells it."""

    card: Card
    capability: tuple[int, int] | None
    gpm: bool
    """Whether it has the counters of NVML's GPM."""


def doctor(counters: bool = False) -> int:
    """Print the report; the exit status is 0 whatever is missing.

    With `counters` CUPTI's are checked too, which starts CUDA; the status is 1 where they can't be trusted.
    """
    cells = min(shutil.get_terminal_size((100, 24)).columns, 110)

    def say(finding: Finding) -> None:
        print("\n".join(lines(finding, cells)), flush=True)

    for finding in findings():
        say(finding)
    if not counters:
        return 0
    try:
        from tui3090.counters_check import check_counters

        sentence, right = check_counters()
    except ImportError:
        sentence, right = "not checked: torch can't be imported", False
    say(Finding("counters", sentence, "" if right else ESTIMATES))
    return 0 if right else 1


def lines(finding: Finding, cells: int) -> list[str]:
    """A finding as it is printed: its name, what was found, and below it what that costs."""
    name = f"{finding.name:<13} "
    found = textwrap.wrap(harmless(finding.text), cells, initial_indent=name, subsequent_indent=" " * len(name))
    indent = " " * len(name)
    cost = textwrap.wrap(harmless(finding.cost), cells, initial_indent=f"{indent}→ ", subsequent_indent=f"{indent}  ")
    return [*found, *cost]


def findings() -> Iterator[Finding]:
    """All of the report, in its order."""
    yield Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield _terminal()
    yield from _host()
    yield _libraries()
    driver, offers, report = _cards()
    yield from report
    yield from _torch(driver, offers)


def _terminal() -> Finding:
    name = os.environ.get("TERM", "")
    if not os.isatty(1) or name in ("", "dumb"):
        return Finding("terminal", "none to draw on", "tui3090 run prints plain lines here, as with --headless")
    size = os.get_terminal_size(1)
    cost = []
    if size.columns < SCREEN[0] or size.lines < SCREEN[1]:
        cost.append(f"some panels find no room below {SCREEN[0]} x {SCREEN[1]}: make it bigger, or zoom them with 1-7")
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    if encoding != "utf8":
        cost.append("charts need UTF-8: set LANG=C.UTF-8")
    return Finding("terminal", f"{name}, {size.columns} x {size.lines}, {encoding or 'no encoding'}", "; ".join(cost))


def _host() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    ours = f"{CORES} of {os.cpu_count()} cores" if os.cpu_count() != CORES else f"{CORES} cores"
    cost = "loader workers (w) share the one core with training" if CORES == 1 else ""
    yield Finding("host", f"{ours}, {gib(memory.available)} of {gib(memory.total)} of memory free", cost)
    try:
        room = shutil.disk_usage(SHM)
    except OSError:
        yield Finding("/dev/shm", "not there", "loader workers (w) can't hand batches over: keep --workers 0")
        return
    cost = ""
    if room.free < ENOUGH_SHM:
        cost = "loader workers (w) hand batches over in it and may die: in a container, docker run --shm-size=8g"
    yield Finding("/dev/shm", f"{gib(room.free)} of {gib(room.total)} free", cost)


def _libraries() -> Finding:
    there = [f"{name} {known}" for name, _ in LIBRARIES if (known := _version(name))]
    missing = [f"{name} ({use})" for name, use in LIBRARIES if not _version(name)]
    cost = f"not here: {', '.join(missing)}; pip install what a train.py wants" if missing else ""
    return Finding("libraries", ", ".join(there) or "none of those that a train.py may want", cost)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _cards() -> tuple[str, list[Offer], list[Finding]]:
    """The newest CUDA that the driver runs ('12.8'; empty: no driver), the cards, and what is to be said of both."""
    cost = "training runs on the CPU"
    try:
        open_nvml()
    except CardMissing as missing:
        return "", [], [Finding("driver", str(missing), cost)]
    try:
        version = text(ask(pynvml.nvmlSystemGetDriverVersion) or "of an unknown version")
        number = ask(pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0
        cuda = f"{number // 1000}.{number % 1000 // 10}" if number else ""
        offers = [_offer(card) for card in cards()]
        report = [Finding("driver", f"NVIDIA {version}" + (f", runs CUDA up to {cuda}" if cuda else ""))]
        if not offers:
            report.append(Finding("cards", "none", cost))
        report += _of_cards(offers)
    except CardMissing as missing:
        return "", [], [Finding("driver", str(missing), cost)]
    finally:
        close_nvml()
    return cuda, offers, report


def _offer(card: Card) -> Offer:
    handle = handle_of(card.uuid)
    capability = ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    support = ask(pynvml.nvmlGpmQueryDeviceSupport, handle)
    return Offer(card, tuple(capability) if capability else None, bool(support and support.isSupportedDevice))


def _of_cards(offers: Sequence[Offer]) -> Iterator[Finding]:
    hidden = ""
    try:
        seen, ordered = visible([offer.card for offer in offers])
    except CardMissing as missing:
        seen, ordered, hidden = [], False, str(missing)
    for offer in offers:
        card = offer.card
        number = f"cuda:{seen.index(card)}" if ordered and card in seen else f"card {card.index}"
        memory = f"{gib(card.free or 0)} of {gib(card.total)} free" if card.total else "memory unknown"
        held = f", held by {by_user(card.holders)}" if card.holders else ""
        cost = ""
        if hidden or card not in seen:
            cost = hidden or "CUDA_VISIBLE_DEVICES hides it"
        yield Finding(number, f"{card.name}, {memory}{held}", cost)
    kinds = {(offer.card.name, offer.capability, offer.gpm): offer for offer in offers}  # once for cards of one kind
    for offer in kinds.values():
        for finding in (_precision(offer), _tensor_cores(offer)):
            yield finding if len(kinds) == 1 else replace(finding, text=f"{offer.card.name}: {finding.text}")


def _precision(offer: Offer) -> Finding:
    capability = offer.capability
    if capability is None:
        return Finding("  precision", "the driver does not tell the compute capability")
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return Finding("  precision", f"{name}: bf16, fp16 and TF32 on the Tensor Cores")
    if capability >= (7, 0):
        return Finding("  precision", f"{name}: fp16 on the Tensor Cores", "no bf16, no TF32: use --amp fp16")
    return Finding("  precision", f"{name}: no Tensor Cores", "AMP saves memory here, hardly time")


def _tensor_cores(offer: Offer) -> Finding:
    """The sources for how busy the Tensor Cores are, the best first."""
    known = peak(offer.card.name, "fp16")
    sources = ["GPM counters"] if offer.gpm else []
    sources += ["kernels by the profiler (r)", "counted FLOPs"]
    cost = []
    if not offer.gpm:
        cupti = f"run --counters samples CUPTI's (not yet verified on hardware){_admin_only()}"
        cost.append(f"no GPM counters (H100 or newer): {ESTIMATES}; {cupti}")
    if known is None:
        cost.append("this card's peak is not known: TFLOPS without MFU")
    peaks = f"; MFU against {known / 1e12:.4g} TFLOPS" if known else ""
    return Finding("  Tensor Cores", f"by {', '.join(sources)}{peaks}", "; ".join(cost))


def _admin_only() -> str:
    """That the driver keeps its counters for the admin, if it does."""
    try:
        kept = "RmProfilingAdminOnly: 1" in DRIVER_PARAMETERS.read_text()
    except OSError:
        return ""
    return (
        ", but the driver keeps counters for root (NVreg_RestrictProfilingToAdminUsers)"
        if kept and os.geteuid()
        else ""
    )


def _torch(driver: str, offers: Sequence[Offer]) -> Iterator[Finding]:
    """What torch was built for, against what is here."""
    if not _version("torch"):
        yield Finding("torch", "not installed", "nothing can be trained: pip install torch")
        return
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else is_available starts CUDA's driver
    try:
        import torch
    except Exception as error:  # a broken library raises anything
        why = f"{type(error).__name__}: {error}"
        yield Finding("torch", f"can't be imported: {why}", "nothing can be trained: install it anew in this Python")
        return
    built: str | None = torch.version.cuda
    if built is None:
        cost = "the cards above stay idle: install a CUDA build of torch (pytorch.org)" if offers else ""
        yield Finding("torch", f"{torch.__version__}, built without CUDA", cost)
        yield _compiler("cpu")
        return
    cost = ""
    if not driver:
        cost = "without a driver it trains on the CPU"
    elif int(built.split(".")[0]) > int(driver.split(".")[0]):
        cost = (
            f"the driver runs CUDA up to {driver}: update it, or install a torch built for CUDA {driver.split('.')[0]}"
        )
    elif offers and not torch.cuda.is_available():
        cost = 'torch sees no card: python -c "import torch; torch.cuda.init()" says why'
    yield Finding("torch", f"{torch.__version__}, built for CUDA {built}", cost)
    yield _compiler("cuda" if driver and offers else "cpu")
    unbuilt = [
        o for o in offers if o.capability is not None and not _has_kernels(torch.cuda.get_arch_list(), o.capability)
    ]
    for offer in unbuilt if not cost else ():
        assert offer.capability is not None
        name = f"sm_{offer.capability[0]}{offer.capability[1]}"
        yield Finding(
            "", f"{offer.card.name}: torch has no kernels for {name}", "install a torch that has (pytorch.org)"
        )


def _compiler(device: str) -> Finding:
    """What torch.compile has here; torch is loaded."""
    lacks = _missing_compiler(device).removeprefix("compile unavailable: ")
    return Finding("torch.compile", lacks, "the key k is refused") if lacks else Finding("torch.compile", "can compile")


def _missing_compiler(device: str) -> str:
    import torch

    from tui3090.techniques.compile import missing_compiler

    return missing_compiler(torch.device(device))


def _has_kernels(built: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether one of torch's targets (sm_86, compute_90) runs on a card: binaries within a generation, PTX on newer."""
    major, minor = capability
    for target in built:
        kind, _, number = target.partition("_")
        digits = "".join(c for c in number if c.isdigit())
        if len(digits) < 2:
            continue
        of = int(digits[:-1]), int(digits[-1])
        if (kind == "sm" and of[0] == major and of[1] <= minor) or (kind == "compute" and of <= (major, minor)):
            return True
    return not built
