"""`tui3090 doctor` on machines with and without cards, drivers, torch and compilers; NVML is a stand-in."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from tests.meters.conftest import GIB, FakeCard, FakeNvml
from tui3090 import cli, doctor
from tui3090.doctor import Finding, findings, lines


@pytest.fixture
def machine(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """One RTX 3090, asked by the doctor too."""
    monkeypatch.setattr(doctor, "pynvml", fake_nvml)
    fake_nvml.cards = [FakeCard("GPU-bbbb")]
    return fake_nvml


def fake_torch(monkeypatch: pytest.MonkeyPatch, cuda: str | None = "12.8", sees: bool = True, *targets: str) -> None:
    """A torch built for CUDA `cuda`, with kernels for `targets`."""
    torch = ModuleType("torch")
    torch.__version__ = "2.11.0"  # type: ignore[attr-defined]
    torch.version = SimpleNamespace(cuda=cuda)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: sees, get_arch_list=lambda: list(targets or ("sm_80", "sm_86", "sm_90"))
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor, "_missing_compiler", lambda device: f"compile unavailable: nothing for a {device}.")


def found(name: str) -> Finding:
    """The last finding of that name."""
    return [finding for finding in findings() if finding.name.strip() == name][-1]


class TestCards:
    def test_a_3090(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch)
        monkeypatch.setattr(doctor, "DRIVER_PARAMETERS", Path("/nowhere/params"))
        machine.cards[0].processes = [(os.getpid(), 1 * GIB), (1001, 8 * GIB)]
        machine.cards[0].used = 9 * GIB
        assert found("driver") == Finding("driver", "NVIDIA 580.159, runs CUDA up to 12.8")
        user = f"user{os.getpid() % 10}"
        card = found("cuda:0")
        assert card.text.startswith("NVIDIA GeForce RTX 3090, 15 GiB of 24 GiB free, held by user1 ")
        assert user in card.text
        assert card.cost == ""
        assert found("precision").text == "compute capability 8.6: bf16, fp16 and TF32 on the Tensor Cores"
        cores = found("Tensor Cores")
        assert cores.text == "by kernels by the profiler (r), counted FLOPs; MFU against 71 TFLOPS"
        assert cores.cost == (
            "no GPM counters (H100 or newer): how busy the Tensor Cores are is an estimate from kernels and FLOPs; "
            "run --counters samples CUPTI's (not yet verified on hardware)"
        )
        assert found("torch") == Finding("torch", "2.11.0, built for CUDA 12.8")
        assert machine.open == 0

    def test_what_older_and_newer_cards_offer(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch)
        machine.cards = [FakeCard("GPU-t", "Tesla T4", capability=(7, 5))]
        assert found("precision").cost == "no bf16, no TF32: use --amp fp16"
        machine.cards = [FakeCard("GPU-p", "NVIDIA GeForce GTX 1080", capability=(6, 1))]
        assert found("precision").text == "compute capability 6.1: no Tensor Cores"
        assert "peak is not known" in found("Tensor Cores").cost
        machine.cards = [FakeCard("GPU-h", "NVIDIA H200", capability=(9, 0), gpm={})]
        assert found("Tensor Cores") == Finding(
            "  Tensor Cores", "by GPM counters, kernels by the profiler (r), counted FLOPs; MFU against 989 TFLOPS"
        )

    def test_counters_that_the_driver_keeps_for_root(
        self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        fake_torch(monkeypatch)
        parameters = tmp_path / "params"
        parameters.write_text("EnableMSI: 1\nRmProfilingAdminOnly: 1\n")
        monkeypatch.setattr(doctor, "DRIVER_PARAMETERS", parameters)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert found("Tensor Cores").cost.endswith(
            "but the driver keeps counters for root (NVreg_RestrictProfilingToAdminUsers)"
        )
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert found("Tensor Cores").cost.endswith("(not yet verified on hardware)")

    def test_a_hidden_card(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert found("card 0").cost == "CUDA_VISIBLE_DEVICES='' hides every card: unset it to train on one."
        machine.cards.append(FakeCard("GPU-cccc"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert found("card 0").cost == "CUDA_VISIBLE_DEVICES hides it"
        assert found("cuda:0").cost == ""

    def test_what_the_driver_does_not_tell(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch)
        machine.unsupported = {"nvmlDeviceGetCudaComputeCapability", "nvmlGpmQueryDeviceSupport"}
        assert found("precision").text == "the driver does not tell the compute capability"

    def test_no_driver(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch)
        machine.init_error = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        assert found("driver") == Finding(
            "driver", "No NVIDIA driver here: libnvidia-ml was not found.", "training runs on the CPU"
        )
        assert found("torch").cost == "without a driver it trains on the CPU"

    def test_no_card(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch)
        machine.cards = []
        assert found("cards") == Finding("cards", "none", "training runs on the CPU")

    def test_a_lost_card(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch)
        machine.broken = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        assert "the card is lost" in found("driver").text


class TestTorch:
    def test_a_build_without_cuda_costs_the_cards(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch, cuda=None)
        assert found("torch").cost == "the cards above stay idle: install a CUDA build of torch (pytorch.org)"
        assert found("torch.compile") == Finding("torch.compile", "nothing for a cpu.", "the key k is refused")
        machine.cards = []
        assert found("torch").cost == ""

    def test_what_compiling_lacks(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch)
        assert found("torch.compile").text == "nothing for a cuda."
        monkeypatch.setattr(doctor, "_missing_compiler", lambda device: "")
        assert found("torch.compile") == Finding("torch.compile", "can compile")

    def test_it_asks_the_technique(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        assert doctor._compiler("cpu").text == "no compiler (g++ is not on the PATH; apt install g++)."

    def test_a_driver_that_is_too_old(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch, cuda="13.0", sees=False)
        assert found("torch").cost == "the driver runs CUDA up to 12.8: update it, or install a torch built for CUDA 12"

    def test_no_kernels_for_the_card(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch)
        machine.cards[0].capability = (12, 0)
        assert found("").text == "NVIDIA GeForce RTX 3090: torch has no kernels for sm_120"

    @pytest.mark.parametrize(
        ("built", "capability", "runs"),
        [
            (["sm_80", "sm_90"], (8, 6), True),
            (["sm_86"], (8, 0), False),
            (["sm_90"], (8, 6), False),
            (["sm_80", "compute_80"], (12, 0), True),
            (["sm_90a", "compute_120"], (9, 0), True),
            ([], (8, 6), True),
        ],
    )
    def test_kernels(self, built: list[str], capability: tuple[int, int], runs: bool) -> None:
        assert doctor._has_kernels(built, capability) is runs

    def test_one_that_sees_no_card(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_torch(monkeypatch, sees=False)
        assert found("torch").cost.startswith("torch sees no card: python -c")

    def test_one_that_can_not_be_imported(self, machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        finding = found("torch")
        assert finding.text.startswith("can't be imported: ModuleNotFoundError")
        assert finding.cost == "nothing can be trained: install it anew in this Python"
        monkeypatch.setattr(doctor, "_version", lambda name: "")
        assert found("torch") == Finding("torch", "not installed", "nothing can be trained: pip install torch")


class TestHost:
    def test_a_small_shared_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20, free=64 << 20))
        *_, shm = doctor._host()
        assert shm.text == "0.1 GiB of 0.1 GiB free"
        assert "--shm-size=8g" in shm.cost

    def test_no_shared_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "SHM", Path("/nowhere/shm"))
        *_, shm = doctor._host()
        assert shm.text == "not there"

    def test_one_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "CORES", 1)
        host, *_ = doctor._host()
        assert host.cost == "loader workers (w) share the one core with training"

    def test_libraries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "_version", lambda name: "1.2" if name == "peft" else "")
        finding = doctor._libraries()
        assert finding.text == "peft 1.2"
        assert "bitsandbytes (8-bit optimizers, 4-bit models)" in finding.cost

    @pytest.mark.parametrize(("size", "cost"), [((160, 50), ""), ((70, 20), "some panels find no room below 80 x 24")])
    def test_terminals(self, size: tuple[int, int], cost: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "isatty", lambda descriptor: True)
        monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size(size))
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding="utf-8"))
        monkeypatch.setenv("TERM", "xterm-256color")
        finding = doctor._terminal()
        assert finding.text == f"xterm-256color, {size[0]} x {size[1]}, utf8"
        assert finding.cost.startswith(cost)
        assert bool(finding.cost) is bool(cost)
        monkeypatch.setenv("TERM", "dumb")
        assert doctor._terminal().text == "none to draw on"


def test_lines_fit_and_hostile_names_are_harmless() -> None:
    printed = lines(Finding("cuda:0", "a card \x1b[31m" + "named " * 20, "it costs " * 15), 60)
    assert all(len(line) <= 60 and line.isprintable() for line in printed)
    assert printed[0].startswith("cuda:0        a card")
    assert sum(line.startswith(" " * 14 + "→ ") for line in printed) == 1


@pytest.mark.parametrize("count", [1, 8])
def test_one_screen_says_it_all(
    machine: FakeNvml, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Of 80 x 24, with a line left for the prompt: a card on which much is missing, or eight of a kind."""
    fake_torch(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    if count == 1:
        machine.cards[0].processes = [(1001, 8 * GIB)]
        monkeypatch.setattr(doctor, "_version", lambda name: "2.11.0" if name == "torch" else "")
    else:
        machine.cards = [FakeCard(f"GPU-{number}", "NVIDIA H200", gpm={}) for number in range(count)]
        monkeypatch.setattr(doctor, "_version", lambda name: "1.0.0")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 80
    assert len(out) <= 23
    for number in range(count):
        assert any(line.startswith(f"cuda:{number}        NVIDIA") for line in out)
    assert sum("Tensor Cores by" in line for line in out) == 1


def test_cards_of_several_kinds_are_told_apart(machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch)
    machine.cards = [FakeCard("GPU-a"), FakeCard("GPU-b", "Tesla T4", capability=(7, 5)), FakeCard("GPU-c")]
    told = [finding for finding in findings() if finding.name == "  precision"]
    assert [finding.text.split(": ")[0] for finding in told] == ["NVIDIA GeForce RTX 3090", "Tesla T4"]
    assert told[1].cost == "no bf16, no TF32: use --amp fp16"
