"""The loss that each precision reaches in the same number of seconds, on real text."""

import math
import time
from collections.abc import Callable
from functools import partial

import lightning as L
import torch
from bench_cells import Workload, our_plugin, stock_plugin
from bench_checks import Check, make_module, train
from bench_schedule import NOT_REACHED, Budget, describe
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_mp import Float8Precision, MasterWeightsPrecision
from lightning_mp.language_model import HeldOutBatches, TextBatches, load_standard_library

PLUGINS: dict[str, Callable[[str], Precision | None]] = {
    "stock, bf16-mixed": lambda device: stock_plugin("bf16-mixed", device),
    "ours, bf16-mixed": lambda device: our_plugin("bf16-mixed", device),
    "ours, 16-mixed": lambda device: our_plugin("16-mixed", device),
    "ours, bf16-true, fp32 masters": lambda device: MasterWeightsPrecision("bf16-true"),
    "ours, fp8 rowwise": lambda device: Float8Precision("rowwise"),
    "ours, fp8 tensorwise": lambda device: Float8Precision("tensorwise"),
    "stock, 32-true": lambda device: None,
}
PACE_STEPS = 10
"""Timed to learn how many steps the given seconds allow."""
HELD_OUT_BATCHES, HELD_OUT_ROWS = 8, 8


class UntilTime(L.Callback):
    """Stops after the number of steps that fit in so many seconds; waits for the device three times only.

    The clock starts after `settle_steps`. The pace of the next `PACE_STEPS` tells how many steps fit; at least those
    are made.
    """

    def __init__(self, device: torch.device, settle_steps: int, seconds: float) -> None:
        self.device, self.settle_steps, self.wanted_seconds = device, settle_steps, seconds
        self.pace_measured_at = settle_steps + PACE_STEPS
        self.steps, self.last, self.seconds = 0, -1, math.nan

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: object) -> None:
        self.steps += 1
        if self.steps == self.settle_steps:
            self._begin = self._now()
        if self.steps == self.pace_measured_at:
            seconds_per_step = (self._now() - self._begin) / PACE_STEPS
            self.last = max(self.steps, self.settle_steps + round(self.wanted_seconds / seconds_per_step))
        if self.steps == self.last:
            self.seconds = self._now() - self._begin
            trainer.should_stop = True

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def loss_in_time(workload: Workload, seconds: float) -> Check:
    """Each precision for the same time."""
    return Check(
        "Loss after equal time",
        f"{seconds:g} s of training, {workload.batch_size} x {workload.config.block_tokens} bytes of the Python "
        "standard library's source a step, eager, AdamW at a constant learning rate; all begin with the same weights "
        "and see the same order. The loss is that of held-out source in nats per byte, computed in fp32 with the "
        "weights of the forward pass. One run each: small differences say nothing.",
        ("way", "steps", "seconds", "loss"),
        partial(_measure, workload=workload, seconds=seconds),
    )


def _measure(check: Check, budget: Budget, *, workload: Workload, seconds: float) -> None:
    corpus, vocab = load_standard_library(max_bytes=2**23), workload.config.vocab
    # The toy's vocabulary is smaller than the number of bytes.
    training_text, held_out_text = (text % vocab if vocab < 256 else text for text in (corpus.train, corpus.validation))
    block_tokens, device = workload.config.block_tokens, workload.device
    held_out = HeldOutBatches(
        held_out_text, batch_size=HELD_OUT_ROWS, block_tokens=block_tokens, max_batches=HELD_OUT_BATCHES
    )
    for name, make_plugin in PLUGINS.items():
        if not budget.allows(seconds):
            check.rows.append([name, "-", "-", NOT_REACHED])
            continue
        batches = TextBatches(
            training_text, batch_size=workload.batch_size, block_tokens=block_tokens, num_batches=100_000
        )
        until = UntilTime(device, workload.settle_steps, seconds)
        module = make_module(workload)
        try:
            train(module, workload, make_plugin(device.type), batches, [until])
        except Exception as error:
            check.rows.append([name, "-", "-", describe(error)])
            continue
        loss = _held_out_loss(module.model.float().to(device).eval(), held_out, device)
        check.rows.append([name, str(until.steps), f"{until.seconds:.2f}", f"{loss:.4f}"])


@torch.no_grad()
def _held_out_loss(model: torch.nn.Module, held_out: HeldOutBatches, device: torch.device) -> float:
    losses: list[Tensor] = [model(ids.to(device), labels.to(device)) for ids, labels in held_out]
    return torch.stack(losses).mean().item()
