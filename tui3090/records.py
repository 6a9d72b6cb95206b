"""Every record that crosses a thread or lands in the log.

Records are frozen dataclasses of plain numbers and strings, never a tensor or an exception. Names say their unit:
`_s` seconds, `_w` watts, `_c` degrees Celsius, `_mhz`; memory is in bytes, shares are fractions of 1, `time` is seconds
since the epoch. None means unknown. A record's `type` is the key under which it stands in records.jsonl.

This module is neutral: it imports neither torch nor textual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tui3090.settings import Value

STATES = ("loading", "training", "paused", "evaluating", "stopping", "finished", "stopped", "failed")
OVER = ("finished", "stopped", "failed")
"""The states from which a run does not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What all records share."""

    type: ClassVar[str]
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Record):
    """One line of the start-up checklist: torch, train.py, model, data, device, first step."""

    type: ClassVar[str] = "stage"
    name: str
    seconds: float | None = None
    """How long it took; None: it has begun."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Record):
    """What is trained on what, known before the first step."""

    type: ClassVar[str] = "started"
    model: str
    """The model's class."""
    parameters: int
    trainable: int
    weights_dtype: str
    """The dtype of the trainable weights."""
    rows: int | None
    """Training samples; None: an iterable dataset without a length."""
    eval_rows: int | None
    batch_size: int
    epochs: int
    device: str
    """cpu or cuda:0."""
    device_name: str
    device_uuid: str
    """NVML's identifier with its GPU- prefix; empty on the CPU."""
    memory: int
    """Bytes: the card's memory, or the host's on the CPU."""
    unit: str
    """What throughput is counted in: tokens or samples."""
    torch: str
    """torch's version."""
    settings: str
    """`Settings.short()` at the start."""
    memory_cap: int | None = None
    """Bytes of the card's memory that torch may take; None: all."""
    cards: int | None = None
    """How many cards CUDA sees here; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Available(Record):
    """Whether a technique can be used on this machine with these settings."""

    type: ClassVar[str] = "available"
    technique: str
    reason: str = ""
    """Why not, a sentence; empty: it can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Record):
    """What the run is doing, one of `STATES`."""

    type: ClassVar[str] = "state"
    state: str
    detail: str = ""
    """Why, a sentence: of a failure what happened and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Record):
    """One window: an optimizer step, or one that was skipped; after thinning the means over `steps` of them."""

    type: ClassVar[str] = "step"
    step: int
    """Optimizer steps taken up to and with this window."""
    planned_steps: int | None
    """Optimizer steps in the whole run, as planned now; None: unknown."""
    epoch: float
    """Epochs gone through, e.g. 1.25."""
    micro_batches: int
    """Run in this window; those without any label are left out."""
    loss: float
    """The weighted mean over what the window held; nan when it was not finite or the window had no label."""
    lr: float
    """Learning rate of the first parameter group, scaled, as this step used it."""
    grad_norm: float | None
    """Before clipping, after unscaling."""
    samples: int
    tokens: int
    """Non-padding tokens; 0 where the data has none."""
    seconds: float
    """From the window's fetch to the next one's, by the host's clock."""
    wait_s: float
    """The host's wait for the loader."""
    stall_s: float
    """Time in which the device had nothing to do because the batch was not there."""
    padding: int = 0
    """Tokens of padding that ran beside them."""
    skipped: str = ""
    """Why no update was made: 'overflow' (the scaler's), 'not finite', 'no labels'; empty: it was made."""
    loss_scale: float | None = None
    """GradScaler's, with fp16."""
    flops: float | None = None
    """Model FLOPs of the window, recomputation left out; None until counted."""
    hardware_flops: float | None = None
    """Executed FLOPs: with the recomputation of checkpointing."""
    peak_flops_s: float | None = None
    """The card's dense peak for the precision in force; None where it is not known."""
    precision: str = "fp32"
    """What the matmuls ran in: fp32, tf32, bf16 or fp16."""
    replayed: bool = False
    """Whether every micro-batch of the window ran by graph replay."""
    compiled: bool = False
    """Whether torch.compile compiled something in the window: its time is no step's."""
    loader_start: bool = False
    """The first window of a loader whose workers had to start, at the run's start, a change of workers, or an epoch's
    start where they can't go on: its wait and stall are told apart."""
    settings: str = ""
    steps: int = 1
    """How many windows this line stands for."""

    @property
    def uncounted(self) -> bool:
        """Whether its FLOPs are not known."""
        return self.flops is None

    @property
    def unexecuted(self) -> bool:
        """Whether its FLOPs are known, but not those that were executed."""
        return self.hardware_flops is None and self.flops is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases(Record):
    """Where the time of one window went: by events on the device's time line, on the CPU by the clock."""

    type: ClassVar[str] = "phases"
    step: int
    seconds: float
    """The whole: from the end of the window before to the end of this one."""
    data_s: float = 0.0
    """The data stall."""
    copy_s: float = 0.0
    """The batch on its way to the device, where it was not prefetched."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    graph_s: float = 0.0
    """Micro-batches that ran by graph replay: forward and backward can't be told apart there."""
    optimizer_s: float = 0.0
    """Unscaling, clipping, the optimizer's step."""

    @property
    def other_s(self) -> float:
        """What is in none of them: zeroing gradients, gaps between launches."""
        named = self.data_s + self.copy_s + self.forward_s + self.backward_s + self.graph_s + self.optimizer_s
        return max(0.0, self.seconds - named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled(Record):
    """One window under torch's profiler: which kernels ran, and on what."""

    type: ClassVar[str] = "profiled"
    step: int
    tensor_core_share: float | None
    """Share of the kernels' time in kernels that use the Tensor Cores, by their names; None: no kernel was seen."""
    unknown_share: float | None
    """In kernels whose names don't tell: Triton's."""
    fp32_share: float | None
    """In matmuls that could use the Tensor Cores and run in fp32 beside them."""
    busy_share: float | None
    """Share of the time from the first kernel to the end of the last in which one ran; the rest is gaps between
    launches, which the profiler makes longer."""
    kernels: int
    """How many ran."""
    kernel_s: float
    """Their time, added up."""
    with_tensor_cores: str = ""
    """The longest of them, 'nvjet_tst 61.2 %, flash_fwd 8.1 %': shares of all kernels' time."""
    without: str = ""
    unknown: str = ""
    off_by_8: str = ""
    """Layers with a dimension that 8 does not divide, 'classifier [2 × 1024]'."""
    replayed: bool = False
    """Whether the kernels were those of a replayed graph."""
    seconds: float = 0.0
    """What this look cost training; it is in no step's time."""
    missing: str = ""
    """Why nothing was seen, a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations(Record):
    """What one micro-batch's forward keeps for its backward, by layer."""

    type: ClassVar[str] = "activations"
    step: int
    total: int
    """Bytes, each piece of memory once; parameters and the batch are not counted."""
    layers: str
    """The ten that keep most, a line each: bytes, a space, the layer's name; 'blocks.*.up × 12' is one layer of twelve
    equal blocks, with their bytes added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Record):
    """One look at the allocator, the card and the host."""

    type: ClassVar[str] = "reading"
    # torch's allocator (its own counters)
    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    """Since the last change of a technique."""
    peak_steady: int | None = None
    """Since windows are steady after it, and what captured graphs keep: warm-up, capture and compilation left out."""
    peak_reserved: int | None = None
    weights: int | None = None
    gradients: int | None = None
    optimizer_state: int | None = None
    graph_pools: int | None = None
    """What captured graphs keep for their activations: reserved, but no tensor's."""
    retries: int | None = None
    """Times the allocator had to give its cache back to satisfy a request."""
    # the card (NVML)
    card_missing: str = ""
    """Why the card's figures are not there, a sentence; empty: they are."""
    card_total: int | None = None
    card_used: int | None = None
    """By everybody, as nvidia-smi shows it."""
    others: int | None = None
    """Held by other processes."""
    holders: str = ""
    """Who holds it: 'user1 1.1 GiB'."""
    own: int | None = None
    """Held by this process on the card, CUDA context included."""
    util: float | None = None
    """NVML's utilisation: share of the time in which a kernel was running."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    fan: float | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    held_back: str = ""
    """Why the clock is below its maximum, NVML's words in short; empty: it is not, or unknown."""
    pcie_in_s: float | None = None
    """Bytes per second to the card."""
    pcie_out_s: float | None = None
    # Tensor Cores
    tensor_core: float | None = None
    """Share of the time in which the Tensor Cores were busy, by hardware counters."""
    tensor_core_source: str = ""
    """Where that figure comes from, or why there is none."""
    tensor_core_time: float | None = None
    """When that figure was read."""
    sm_util: float | None = None
    dram_util: float | None = None
    # the host (psutil)
    cpu: float | None = None
    """CPU time of the process over the wall clock: 1.0 is one core."""
    worker_count: int = 0
    worker_cpu: float | None = None
    """The workers' mean."""
    rss: int | None = None
    """Memory of the process."""
    worker_rss: int | None = None
    host_total: int | None = None
    host_available: int | None = None
    # ourselves
    ui_share: float | None = None
    """CPU time of our threads other than the trainer's, over the wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(Record):
    """A technique's new value is in force from `step` on."""

    type: ClassVar[str] = "changed"
    step: int
    """The first optimizer step under the new value."""
    technique: str
    old: Value
    new: Value
    origin: str = "key"
    """Who asked: key, or the trainer itself and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain(Record):
    """What a change brought, from equal work before and after it in steady state (gains.py): medians of samples, but
    of stall and FLOPs the totals."""

    type: ClassVar[str] = "gain"
    step: int
    """As in its `Changed`."""
    technique: str
    old: Value
    new: Value
    verdict: str
    """Of the throughput: faster, slower, same, or noisy: too noisy to tell."""
    noise: float
    """How far the change of throughput may be off, a share."""
    windows_before: int
    windows_after: int
    unit: str
    """What throughput is counted in: tokens or samples."""
    rate_before: float
    """Throughput per second."""
    rate_after: float
    step_s_before: float
    """Seconds a step."""
    step_s_after: float
    peak_before: int | None
    """Bytes allocated at the most in steady windows before the change, what captured graphs keep included."""
    peak_after: int | None
    """The same after it."""
    stall_before: float
    """Data stall over the time."""
    stall_after: float
    flops_s_before: float | None
    """Model FLOPs per second."""
    flops_s_after: float | None
    mfu_before: float | None
    mfu_after: float | None
    tensor_core_before: float | None
    """By the hardware counters."""
    tensor_core_after: float | None
    loss: str
    """Whether it stayed on its course: same, higher, not finite; empty: it can't be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Record):
    """A change that was asked for and can't be had."""

    type: ClassVar[str] = "refused"
    technique: str
    value: Value
    reason: str
    """A sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Record):
    """One evaluation."""

    type: ClassVar[str] = "evaluated"
    step: int
    loss: float | None
    """The weighted mean over the eval data; None: no batch had a label."""
    metrics: str = ""
    """The recipe's own figures: 'accuracy 0.862'."""
    text: str = ""
    """What the model wrote, where the recipe asks it to."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Record):
    """A save is whole on the disk."""

    type: ClassVar[str] = "saved"
    step: int
    name: str
    """Its folder's, under saves/."""
    reason: str
    """Who asked: key s, the clock, the end …"""
    seconds: float
    """How long writing took, beside training."""
    waited_s: float
    """How long training waited for the copy to host memory."""
    bytes: int
    eval_loss: float | None = None
    """Of the evaluation it was made after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Record):
    """Training goes on from a save: what came after that step is no part of the run any more."""

    type: ClassVar[str] = "resumed"
    step: int
    name: str
    """The save's folder, under saves/."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Record):
    """A sentence for the log."""

    type: ClassVar[str] = "event"
    level: str
    """info, warning or error."""
    source: str
    """train, key, eval, data, graph, run …"""
    text: str


RECORD_TYPES: dict[str, type[Record]] = {
    cls.type: cls
    for cls in (
        Stage,
        Started,
        Available,
        State,
        StepRecord,
        Phases,
        Profiled,
        Activations,
        Reading,
        Changed,
        Gain,
        Refused,
        Evaluated,
        Saved,
        Resumed,
        Event,
    )
}
