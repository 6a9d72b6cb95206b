from __future__ import annotations

import pytest

from tui3090.meters.peaks import peak


@pytest.mark.parametrize(
    ("name", "fp32", "tf32", "bf16", "fp16"),
    [
        ("NVIDIA GeForce RTX 3090", 35.6, 35.6, 71, 71),
        ("GeForce RTX 3090", 35.6, 35.6, 71, 71),
        ("NVIDIA GeForce RTX 3090 Ti", 40, 40, 80, 80),
        ("NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2),
        ("NVIDIA GeForce RTX 5090", 104.8, 104.8, 209.5, 209.5),
        ("NVIDIA RTX A6000", 38.7, 77.4, 154.8, 154.8),
        ("NVIDIA L40S", 91.6, 183, 362, 362),
        ("NVIDIA A100-SXM4-40GB", 19.5, 156, 312, 312),
        ("NVIDIA A100 80GB PCIe", 19.5, 156, 312, 312),
        ("NVIDIA H100 80GB HBM3", 67, 495, 989, 989),
        ("NVIDIA H200", 67, 495, 989, 989),
        ("Tesla T4", 8.1, None, None, 65),
        ("Tesla V100-SXM2-32GB", 15.7, None, None, 125),
    ],
)
def test_known_cards(name, fp32, tf32, bf16, fp16):
    expected = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}
    for precision, tflops in expected.items():
        assert peak(name, precision) == (None if tflops is None else pytest.approx(tflops * 1e12)), precision


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce GTX 1080",
        "AMD Radeon RX 7900 XTX",
        "nvidia h200",
        "",
    ],
)
def test_another_card_has_no_peak(name):
    assert peak(name, "bf16") is None


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="fp32, tf32, bf16 or fp16, not 'fp8'"):
        peak("NVIDIA H200", "fp8")
