"""What ActivationCheckpointing counts: saved bytes against the theory of Chen et al. 2016, FLOPs against arithmetic."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_models import loader, quiet_trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_mp import AutocastPrecision
from lightning_mp.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_mp.training.activation_checkpointing.cost import RecomputeReport, StorageBytes

ROWS, WIDTH, BLOCKS = 32, 8, 16
B = ROWS * WIDTH * 4  # bytes of a block's input
A = 4 * B  # saved in a block: its input, and what sigmoid, tanh and exp put out


class ChainBlock(nn.Module):
    """Saves its input (for the weight) and the outputs of sigmoid, tanh and exp; sin asks for that of exp, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sigmoid().tanh().exp().sin()


class Chain(pl.LightningModule):
    """A chain of equal blocks, in segments; only blocks save anything."""

    def __init__(self, segments: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        length = BLOCKS // segments
        self.segments = nn.ModuleList(nn.Sequential(*(ChainBlock() for _ in range(length))) for _ in range(segments))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch + 0.0  # the first block's input is an activation, too
        for segment in self.segments:
            x = segment(x)
        return x.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(number: int = 2) -> Any:
    return loader(list(torch.randn(number, ROWS, WIDTH)))


def report_of(module: Any, *arguments: Any, data: Any = None, **keywords: Any) -> RecomputeReport:
    callback = ActivationCheckpointing(*arguments, **keywords)
    quiet_trainer(callbacks=[callback]).fit(module, batches() if data is None else data)
    assert callback.report is not None
    return callback.report


def held_and_peak(report: RecomputeReport) -> tuple[int, int]:
    return report.saved_bytes, report.saved_bytes + report.largest_recompute_bytes


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 16, 100])
def test_every_kth_block(k: int) -> None:
    r"""Held: inputs of :math:`n = \lceil L / k \rceil` blocks and all of the others, :math:`n b + (L - n) a`."""
    report = report_of(Chain(), ChainBlock, every=k)
    n = math.ceil(BLOCKS / k)
    assert report.saved_bytes_without == BLOCKS * A
    assert held_and_peak(report) == (n * B + (BLOCKS - n) * A, n * B + (BLOCKS - n) * A + (A - B))
    assert report.calls == n


@pytest.mark.parametrize("segments", [1, 2, 4, 8, 16])
def test_segments(segments: int) -> None:
    r"""Held: inputs of the segments, :math:`s b`. Peak: what one of them saves besides, :math:`s b + (L/s) a - b`."""
    report = report_of(Chain(segments), "segments.*")
    assert report.saved_bytes_without == BLOCKS * A
    assert held_and_peak(report) == (segments * B, segments * B + BLOCKS // segments * A - B)


def test_the_peak_is_least_at_the_square_root_of_the_length() -> None:
    r"""Of :math:`s b + (L/s) a`, at :math:`s = \sqrt{L a / b} = \sqrt{64} = 8`: there it is :math:`2 \sqrt{L a b}`."""
    peaks = {segments: held_and_peak(report_of(Chain(segments), "segments.*"))[1] for segments in (1, 2, 4, 8, 16)}
    assert min(peaks, key=peaks.__getitem__) == 8
    assert peaks[8] == 2 * math.sqrt(BLOCKS * A * B) - B
    # sqrt(L) = 4 segments, for a = b as the paper simplifies it, need a third of what a run without checkpoints does.
    assert peaks[8] < peaks[16] == peaks[4] < BLOCKS * A / 3


def test_what_is_counted_is_what_torch_holds() -> None:
    """Independently of the callback: tensors that hooks outside of it see, alive at the end of the forward."""

    class Watch(Callback):
        def __init__(self) -> None:
            self.held = StorageBytes()
            self.known = StorageBytes()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            for parameter in pl_module.parameters():
                self.known.add(parameter)
            self.hooks = saved_tensors_hooks(self.pack, lambda tensor: tensor)
            if batch_idx == 1:
                self.hooks.__enter__()

        def pack(self, tensor: Tensor) -> Tensor:
            self.held.add(tensor)
            return tensor.detach()

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            if trainer.global_step == 1:
                self.hooks.__exit__()

    held = []
    callback = ActivationCheckpointing(ChainBlock, every=3)
    for callbacks in ([], [callback]):
        watch = Watch()
        quiet_trainer(callbacks=[*callbacks, watch]).fit(Chain(), batches())
        held.append((watch.held - watch.known).total_bytes)
    assert callback.report is not None
    assert held == [callback.report.saved_bytes_without, callback.report.saved_bytes]


PRODUCT = 2 * ROWS * WIDTH * WIDTH


def test_flops_of_the_second_run() -> None:
    """A block has one product forward and two backward, but for the first, whose input needs no gradient."""
    report = report_of(Chain(), ChainBlock, every=4)
    assert report.step_flops - report.recompute_flops == (3 * BLOCKS - 1) * PRODUCT
    assert report.recompute_flops == 4 * PRODUCT


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class FeedforwardChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.segments = nn.ModuleList(Feedforward() for _ in range(3))


def test_the_second_run_stops_early() -> None:
    """Backward needs nothing that the last product makes, so of two products one is made again: 1/6 more, not 1/3."""
    report = report_of(FeedforwardChain(), Feedforward)
    assert report.recompute_flops == 3 * 4 * PRODUCT
    plain_flops = report.step_flops - report.recompute_flops
    assert plain_flops == (3 * 3 * 2 - 1) * 4 * PRODUCT


def test_it_is_printed_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        report_of(Chain(), ChainBlock, data=batches(3))
    mine = [record.message for record in caplog.records if "ActivationCheckpointing" in record.message]
    assert mine == [
        "ActivationCheckpointing: 16 modules of class ChainBlock run again in backward: segments.0.0, segments.1.0,"
        " segments.2.0, segments.3.0, segments.4.0 and 11 more.",
        "ActivationCheckpointing, first micro-batch on this rank: 16 calls keep their inputs only. Saved for backward:"
        " 16 KiB instead of 64 KiB (-75%); up to 3 KiB more while one of them runs again. That adds 6.55e+04"
        " FLOPs to 1.93e+05 (+34%).",
    ]


def test_modules_that_save_nothing_are_reported() -> None:
    advice = "These modules save no memory: checkpoint larger ones."
    assert advice in str(RecomputeReport(2048, 1024, 8, 4, 100, 0))
    assert advice not in str(RecomputeReport(1024, 2048, 8, 4, 100, 25))
    assert advice not in str(RecomputeReport(0, 0, 0, 4, 100, 0))  # nothing was counted


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_micro_batch_without_a_loss_is_not_counted() -> None:
    class Skips(Chain):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 0 else loss

    assert report_of(Skips(), ChainBlock) == report_of(Chain(), ChainBlock)


def test_tensors_given_by_name_are_counted_as_kept() -> None:
    class Named(ChainBlock):
        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:  # type: ignore[override]
            return (x @ self.weight + shift).sigmoid()

    class Module(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.segments = nn.ModuleList([Named()])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = batch + 0.0
            return self.segments[0](x, shift=torch.ones(ROWS, WIDTH)).sum()

    report = report_of(Module(), Named)
    assert report.saved_bytes == 2 * B
    assert report.saved_bytes_without == 2 * B  # input and sigmoid: this checkpoint saves nothing, and says so
    assert "(-0%)" in str(report) or "(+0%)" in str(report)


def test_16_bit_halves_what_is_saved() -> None:
    callback = ActivationCheckpointing(Feedforward)
    plugin = AutocastPrecision("bf16-mixed")
    quiet_trainer(callbacks=[callback], plugins=[plugin]).fit(FeedforwardChain(), batches(1))
    reference = report_of(FeedforwardChain(), Feedforward)
    assert callback.report is not None
    assert callback.report.recompute_flops == reference.recompute_flops
    assert callback.report.saved_bytes < reference.saved_bytes
