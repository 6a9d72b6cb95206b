"""The dense peak of each card that we know: what a model's FLOP/s are compared with.

TFLOPS without sparsity, with fp32 accumulation as training needs it, from NVIDIA's data sheets and architecture papers.
GeForce cards accumulate in fp32 at half their advertised rate: a 3090 does 71 TFLOPS in bf16, not 142.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Peaks:
    """TFLOPS by precision; None: the card can't do it on its Tensor Cores."""

    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float


_A100 = _Peaks(19.5, 156, 312, 312)
_H100_SXM = _Peaks(67, 495, 989, 989)
_V100_SXM = _Peaks(15.7, None, None, 125)

_CARDS = {
    "GeForce RTX 3090": _Peaks(35.6, 35.6, 71, 71),
    "GeForce RTX 3090 Ti": _Peaks(40, 40, 80, 80),
    "GeForce RTX 4090": _Peaks(82.6, 82.6, 165.2, 165.2),
    "GeForce RTX 5090": _Peaks(104.8, 104.8, 209.5, 209.5),
    "RTX A6000": _Peaks(38.7, 77.4, 154.8, 154.8),
    "L40S": _Peaks(91.6, 183, 362, 362),
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100 80GB PCIe": _A100,
    "H100 80GB HBM3": _H100_SXM,
    "H200": _H100_SXM,
    "Tesla T4": _Peaks(8.1, None, None, 65),
    "Tesla V100-SXM2-16GB": _V100_SXM,
    "Tesla V100-SXM2-32GB": _V100_SXM,
}
"""By the driver's name without its NVIDIA prefix, which older drivers leave out. Names match whole: a laptop's 3090
or a PCIe H100 is another card with another peak."""


def peak(device_name: str, precision: str) -> float | None:
    """Dense peak of a card in FLOP/s for fp32, tf32, bf16 or fp16; None where it is not known, never another card's.

    `device_name` is what NVML or torch calls the card. Raises ValueError for another precision.
    """
    if precision not in ("fp32", "tf32", "bf16", "fp16"):
        raise ValueError(f"precision is fp32, tf32, bf16 or fp16, not {precision!r}")
    card = _CARDS.get(device_name.removeprefix("NVIDIA "))
    tflops: float | None = getattr(card, precision) if card else None
    return None if tflops is None else tflops * 1e12
