"""What only a GPU can show beside throughput: waits for it, its memory beside the estimate, a real out-of-memory.

Each fills one part of the report. On a CPU all of them run, so that they can be tested, and what a CPU cannot tell is
"not measured".
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from all_callbacks import all_callbacks
from bench_cells import Batches, BenchmarkModule, LossModel, Workload, fit, free_device, our_plugin, stock_plugin
from bench_schedule import NOT_REACHED, Budget, Part, describe
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_mp import MasterWeightsPrecision, MicroBatchOnOOM, estimate_memory

WARM_UP_STEPS = 10
"""Optimizer states, loaded kernels and the first observations of monitors."""
PLUGINS: dict[str, Callable[[str], Precision | None]] = {
    "32-true": lambda device: None,
    "bf16-mixed": lambda device: our_plugin("bf16-mixed", device),
    "bf16-true, fp32 masters": lambda device: MasterWeightsPrecision("bf16-true"),
    "bf16-true, remainder": lambda device: MasterWeightsPrecision("bf16-true", storage="remainder"),
}
"""Plugins whose memory is compared with its estimate, by device type."""


def make_module(workload: Workload, model: Callable[..., LossModel] = LossModel, seed: int = 0) -> BenchmarkModule:
    """The same weights each time, made on the device."""
    torch.manual_seed(seed)
    with workload.device:
        return BenchmarkModule(model(workload.config), fused=True)


def train(
    module: BenchmarkModule,
    workload: Workload,
    plugin: Precision | None,
    batches: Iterable[list[Tensor]],
    callbacks: Sequence[L.Callback] = (),
    **arguments: Any,
) -> None:
    """One epoch on the batches; the module is on the CPU afterwards, and the device holds nothing of the run."""
    try:
        fit(module, workload, plugin, batches, callbacks, **arguments)
    finally:
        module.zero_grad(set_to_none=True)
        module.cpu()


# -- waits -------------------------------------------------------------------------------------------------------------


class SyncDebug(L.Callback):
    """Sets torch's sync debug mode from step `WARM_UP_STEPS` until step `last` begins, and counts its warnings.

    It must be the first callback: after an error the hooks of the others may wait, which the mode "error" would refuse.
    """

    def __init__(self, mode: str, last: int) -> None:
        self.mode, self.last = mode, last
        self.waits = self.steps = 0
        self._recorder: warnings.catch_warnings[list[warnings.WarningMessage]] | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == WARM_UP_STEPS:
            self._recorder = warnings.catch_warnings(record=True)
            self._recorded = self._recorder.__enter__()
            warnings.simplefilter("always")
            _set_sync_debug_mode(self.mode)
        elif batch_idx == self.last:
            self.stop()

    def on_train_batch_end(self, *arguments: object) -> None:
        self.steps += self._recorder is not None

    def on_exception(self, *arguments: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Sets the mode back; once is enough."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            _set_sync_debug_mode("default")
            recorder.__exit__(None, None, None)
            self.waits = sum("called a synchronizing CUDA operation" in str(w.message) for w in self._recorded)


def _set_sync_debug_mode(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def waits(workload: Workload, seconds: float, steps: int) -> Part:
    """Ours with all callbacks and a logger, then stock with the logger alone."""
    return Part(
        "Waits for the device",
        seconds,
        f"Found by torch.cuda.set_sync_debug_mode over {steps} healthy steps of 2 sequences, forward and backward "
        "included; every tenth is logged with a CSVLogger. In mode error the first wait ends the run and is listed in "
        "the table; in mode warn waits are counted. torch says that this mode does not see every wait.",
        ("precision", "way", "mode", "steps", "waits"),
        partial(_measure_waits, workload=replace(workload, batch_size=2), steps=steps),
    )


def _measure_waits(part: Part, budget: Budget, *, workload: Workload, steps: int) -> None:
    last, device = WARM_UP_STEPS + steps, workload.device.type
    for way, mode in (("ours, all callbacks", "error"), ("stock", "warn"), ("ours, all callbacks", "warn")):
        for precision in ("bf16-mixed", "16-mixed"):
            if not budget.allows():
                part.rows.append([precision, way, mode, "-", NOT_REACHED])
                continue
            debug, callbacks = SyncDebug(mode, last), [] if way == "stock" else list(all_callbacks().values())
            plugin = (stock_plugin if way == "stock" else our_plugin)(precision, device)
            batches = Batches(workload, last + 1)
            with TemporaryDirectory() as folder:
                logging = {"logger": CSVLogger(folder), "log_every_n_steps": 10}
                try:
                    train(make_module(workload), workload, plugin, batches, [debug, *callbacks], **logging)
                    found = str(debug.waits) if device == "cuda" else "not measured"
                except RuntimeError as error:
                    found = describe(error)
                finally:
                    debug.stop()
            part.rows.append([precision, way, mode, str(debug.steps), found])


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(workload: Workload, seconds: float) -> Part:
    """What `estimate_memory` says beside what the allocator had."""
    return Part(
        "Memory beside its estimate",
        seconds,
        f"estimate_memory for {workload.batch_size} sequences, beside the allocator's peaks over three steps.",
        ("precision", "estimated peak", "allocated", "error", "estimated need", "reserved"),
        partial(_measure_memory, workload=workload),
    )


def _measure_memory(part: Part, budget: Budget, *, workload: Workload) -> None:
    device = workload.device
    estimated_module = BenchmarkModule(LossModel(workload.config), fused=True)
    for name, make_plugin in PLUGINS.items():
        if not budget.allows():
            part.rows.append([name, NOT_REACHED, *["-"] * 4])
            continue
        precision = make_plugin(device.type) or "32-true"
        [batch] = workload.batches(1)
        estimate = estimate_memory(estimated_module, batch, precision=precision, device_type=device.type)
        allocated_before = free_device(device)
        train(make_module(workload), workload, make_plugin(device.type), Batches(workload, 3))
        allocated = error = reserved = "not measured"
        if device.type == "cuda":
            allocated_bytes = torch.cuda.max_memory_allocated(device) - allocated_before
            allocated, error = _mib(allocated_bytes), f"{estimate.peak_bytes / allocated_bytes - 1:+.1%}"
            reserved = _mib(torch.cuda.max_memory_reserved(device))
        need = " to ".join(map(_mib, estimate.reserved_bytes))
        part.rows.append([name, _mib(estimate.peak_bytes), allocated, error, need, reserved])


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


# -- out of memory -----------------------------------------------------------------------------------------------------


class LossModelOutOfMemory(LossModel):
    """On a CPU, raises what a GPU raises when a graph of more than one sequence at a time is kept."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if ids.device.type == "cpu" and len(ids) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. (raised on a CPU by the benchmark)")
        return super().forward(ids, labels)


class FirstLoss(L.Callback):
    """Keeps the loss of the first step, before weights differ."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.value = float(outputs["loss"])


def limit_between(quarter_bytes: int, whole_bytes: int) -> int:
    """Bytes that a quarter of the batch fits in and the whole batch does not."""
    if quarter_bytes >= whole_bytes:
        raise ValueError(
            f"A quarter of the batch takes {_mib(quarter_bytes)} and all of it {_mib(whole_bytes)}: no limit lies "
            "between them. Give a larger --batch-size."
        )
    return (quarter_bytes + whole_bytes) // 2


@contextmanager
def _limited_memory(device: torch.device, limit_bytes: int) -> Iterator[None]:
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def out_of_memory(workload: Workload, seconds: float) -> Part:
    """The same batch without a limit, with one, and with one and `MicroBatchOnOOM`."""
    return Part(
        "A real out-of-memory",
        seconds,
        "torch may allocate the mean of what a quarter of the batch reserves and what all of it allocates, in "
        "bf16-mixed. Every row begins with the same weights and the same batch. (On a CPU the model raises the error "
        "by itself.)",
        ("way", "sequences per step", "limit", "size found", "loss of the first step"),
        partial(_measure_out_of_memory, workload=workload),
    )


def _measure_out_of_memory(part: Part, budget: Budget, *, workload: Workload) -> None:
    device, sequences = workload.device, workload.batch_size
    on_gpu = device.type == "cuda"

    def first_loss(model: type[LossModel], rows: int, *callbacks: L.Callback) -> str:
        loss = FirstLoss()
        free_device(device)
        batches = Batches(workload, 3, rows)
        train(
            make_module(workload, model), workload, our_plugin("bf16-mixed", device.type), batches, [*callbacks, loss]
        )
        return f"{loss.value:.5f}"

    first_loss(LossModel, max(1, sequences // 4))
    quarter_bytes = torch.cuda.max_memory_reserved(device) if on_gpu else 0
    whole = first_loss(LossModel, sequences)
    part.rows.append(["no limit", str(sequences), "-", "-", whole])
    limit: AbstractContextManager[None] = nullcontext()
    limit_text = "not measured"
    if on_gpu:
        limit_bytes = limit_between(quarter_bytes, torch.cuda.max_memory_allocated(device))
        limit, limit_text = _limited_memory(device, limit_bytes), _mib(limit_bytes)
    free_device(device)  # what is in the allocator's cache counts towards the limit
    with limit:
        try:
            without = first_loss(LossModelOutOfMemory, sequences)
        except torch.OutOfMemoryError as error:
            without = describe(error)
        part.rows.append(["limited", str(sequences), limit_text, "-", without])
        splitting = MicroBatchOnOOM()
        split = first_loss(LossModelOutOfMemory, sequences, splitting)
        part.rows.append(["limited, MicroBatchOnOOM", str(sequences), limit_text, str(splitting.size), split])
