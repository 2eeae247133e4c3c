"""Tokens per second, MFU, HFU and goodput of a run, measured without waiting for the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_mp.callbacks._common import CountUse, check_counts, run_counts
from lightning_mp.callbacks._metrics import CallbackMetrics
from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.arguments import positive_number, whole_number
from lightning_mp.ground.core.devices import accumulation_dtype
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.known_words import refuse_unknown
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.quantities import format_quantity
from lightning_mp.ground.core.ranks import sum_over_ranks_
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.core.trainer_ranks import is_pipelined, num_data_ranks
from lightning_mp.ground.flops.conventions import CONVENTIONS
from lightning_mp.ground.flops.flop_tally import FlopCount, FlopTally
from lightning_mp.ground.flops.hardware import device_peak
from lightning_mp.ground.flops.throughput import Rates, Throughput, Work
from lightning_mp.training.tokens import batch_tokens
from lightning_mp.training.tokens.batch_tokens import no_tokens_in
from lightning_mp.training.tokens.count_unit import CountUnit, counted_unit, samples_of
from lightning_mp.training.tokens.loss_weighting import CountFunction, Weighting
from lightning_mp.training.tokens.run_counts import RunCounts, TokenCounterDeltas


@dataclass
class _Fit:
    """The pending readings of one fit; the monitor keeps what was measured."""

    trainer: "pl.Trainer"
    uncounted_batches: int  # that come before the one whose operations are counted
    tally: FlopTally | None = None  # while they are
    was_repeated: bool = False  # an attempt at that micro-batch ran out of memory on this rank
    is_settled: bool = False  # it is known what a token costs
    is_warm: bool = False  # the first optimizer step is over
    changes: TokenCounterDeltas | None = None  # from the start of training on
    validation_began: float | None = None

    def stop_counting(self) -> None:
        """Leaves the mode that counts operations."""
        tally, self.tally = self.tally, None
        if tally is not None:
            tally.__exit__(None, None, None)


class MFUMonitor(SettingsRepr, Callback):
    """Logs the throughput of a run and its share of the hardware's peak.

    Logged over the last ``window`` optimizer steps and all devices together:

    ===========================  ========================================================================
    mp/tokens_per_second         tokens through the model, padding included
    mp/nonpad_tokens_per_second  without what ``batch["attention_mask"]`` hides
    mp/mfu                       operations that the model needs, over the dense peak of the devices
    mp/hfu                       the same with what activation checkpoints and fused attention recompute
    mp/goodput                   tokens that are neither padding nor in a skipped step, over all tokens
    ===========================  ========================================================================

    If samples are counted (``unit``), ``mp/samples_per_second`` replaces the first two, and every figure is per sample.

    MFU and HFU count all tokens, because devices multiply padding as well; multiplied by goodput they give the share of
    the peak that was spent on training. The same figures of the whole run are in :attr:`total` and printed at its end.
    The sums behind them are in the checkpoint, so they survive a resume, also on other devices.

    *Time.* Nothing waits for the device. Token counts of an optimizer step reach the host when the device has finished
    its backward, one step late, and the clock is read then. If the device is slower than the host, a reading is exact;
    otherwise it is less than one optimizer step off, and errors do not add up. The first step of a fit is warm-up and
    is left out. Validation is timed separately (``totals.validation_seconds``): when it begins, the host waits for the
    device once. Reading data and writing checkpoints is part of the time.

    *Operations.* In the first micro-batch of a fit every matrix product, convolution and attention is counted as it
    runs, forward, backward and recomputation, on all ranks; see :mod:`lightning_mp.ground.flops.flop_tally`. This cost
    per token is used for the whole run; if lengths vary, attention is counted as in the first micro-batch. The peak is
    that of the format in which most of these products ran, regardless of the precision plugin. Work that several
    tensor-parallel ranks repeat on plain tensors counts on each of them.

    Skipped steps are known with the precision plugins of this package, or with ``OverflowMonitor``.

    Args:
        flops_per_token: "exact" counts; a name of :data:`~lightning_mp.ground.flops.conventions.CONVENTIONS` ("6N",
            "palm", "megatron") uses its formula, with layers and width from a Hugging Face configuration; a number is
            used as given, for forward and backward.
        peak_flops: dense peak of one device in FLOP/s, for devices that
            :func:`~lightning_mp.ground.flops.hardware.peak_flops` does not know. Without one no MFU is logged, and a
            message says so once.
        window: optimizer steps that the logged rates cover.
        count: a function that returns the number of tokens, or of samples, in a batch on this rank; None counts what
            the labels or the attention mask show.
        unit: what ``count`` counts. "auto" means samples if the count of the first batch is the size of its first
            dimension, else tokens. "sample" counts samples without a ``count``, whatever the labels are, as for images.
            "token" is for batches whose first dimension is tokens.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: at the start of a fit, if "exact" is used with compiled code, which cannot be
            counted; with the first batch, if it has no tokens, or if ``count`` gives a number that is neither the
            tokens nor the samples of the batch.

    References:
        Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311 (MFU, HFU)

    Example:
        >>> monitor = MFUMonitor()
        >>> monitor.total.mfu is None
        True
    """

    _count_use: ClassVar[CountUse] = "inputs"
    _counts: RunCounts  # from `setup` on

    def __init__(
        self,
        flops_per_token: float | str = "exact",
        *,
        peak_flops: float | None = None,
        window: int = 20,
        count: CountFunction | None = None,
        unit: CountUnit = "auto",
    ) -> None:
        names = ("exact", *CONVENTIONS)
        if isinstance(flops_per_token, str):
            if flops_per_token not in names:
                raise ValueError(
                    f"MFUMonitor(flops_per_token={flops_per_token!r}): it must be a number or one of {names}."
                )
        else:
            positive_number(flops_per_token, "flops_per_token", "MFUMonitor")
        if peak_flops is not None:
            positive_number(peak_flops, "peak_flops", "MFUMonitor")
        whole_number(window, "window", "MFUMonitor", unit="optimizer steps")
        Weighting("auto", count)
        refuse_unknown(unit, "unit", "MFUMonitor", get_args(CountUnit))
        if unit == "sample" and flops_per_token in CONVENTIONS:
            raise ValueError(_of_tokens(flops_per_token))
        self.unit: CountUnit = unit
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._window = window
        self.count = count if count is not None or unit != "sample" else samples_of
        self._counted: Literal["token", "sample"] = "sample" if unit == "sample" else "token"
        self.throughput = Throughput(window)
        self.flop_count: FlopCount | None = None
        self._clock: Callable[[], float] = time.monotonic
        self._fit: _Fit | None = None

    @property
    def total(self) -> Rates:
        """Rates of the whole run."""
        return self.throughput.total

    @property
    def window(self) -> Rates:
        """Rates over the last optimizer steps."""
        return self.throughput.window

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Has micro-batches counted by the accumulation controller, which counts tokens once over all ranks."""
        refuse_other_trainers(self, trainer)
        if stage == "fit":
            self._counts = run_counts(self, trainer, pl_module, self.count)
            CallbackMetrics.attach(trainer).add(self._metrics, self._on_bar)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Refuses modules that cannot be counted."""
        Patches.of(trainer).at_end(self._end)
        self._refuse_compiled(pl_module)
        # The first micro-batch of a pipeline goes through the stages once more, to show them shapes.
        self._fit = _Fit(
            trainer,
            uncounted_batches=1 if is_pipelined(trainer) else 0,
        )
        self.flop_count = None
        self._counts.at_first_batch(self._check_count)

    def check_setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> None:
        """Raises the errors of a fit before it starts; called by preflight.

        Raises:
            MisconfigurationException: as in the fit.
        """
        self._refuse_compiled(pl_module)
        weighting = check_counts(self, trainer, pl_module, batch, needs_tokens=False)
        self._count_in(weighting, weighting.measure(batch).input_tokens, batch)

    def _refuse_compiled(self, pl_module: "pl.LightningModule") -> None:
        if self.flops_per_token == "exact" and _is_compiled(pl_module):
            convention = "" if self.unit == "sample" else f", or name a convention: {', '.join(CONVENTIONS)}"
            raise MisconfigurationException(
                "MFUMonitor(flops_per_token='exact') cannot see into code compiled by torch.compile. Count before"
                " compiling with lightning_mp.ground.flops.flop_counter.count_flops, MFUMonitor(flops_per_token="
                f"count_flops(model, batch).model / {self._counted}s){convention}."
            )

    def _count_in(self, weighting: Weighting, input_tokens: int, batch: Any) -> None:
        """Determines what the numbers of the first batch count."""
        if not weighting.counts_tokens:
            raise no_tokens_in(batch, "MFUMonitor", ", or unit='sample' to have all figures per sample")
        self._counted = counted_unit(self.unit, input_tokens, batch, is_counted=weighting.inputs_are_counted(batch))
        if self._counted == "sample" and self.flops_per_token in CONVENTIONS:
            raise MisconfigurationException(_of_tokens(self.flops_per_token))

    def _check_count(self, batch: Any) -> None:
        weighting, measure = self._counts.weighting, self._counts.measure
        assert weighting is not None
        assert measure is not None
        self._count_in(weighting, measure.input_tokens, batch)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Continues from the counter as it was loaded; the clock starts after the first optimizer step."""
        assert self._fit is not None
        self._fit.changes = TokenCounterDeltas(self._counts.counter)

    # -- operations per token ------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Begins to count in the first micro-batch."""
        fit = self._fit
        assert fit is not None
        if fit.uncounted_batches == 0 and not fit.is_settled and not _is_compiled(pl_module):
            fit.stop_counting()  # of a micro-batch that was declined
            fit.tally = FlopTally().__enter__()

    @override
    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """The first micro-batch is counted, unless attempts that failed are among its operations on this rank."""
        if self._fit is not None and self._fit.tally is not None:
            self._fit.was_repeated = RunState.of(trainer).is_repeating
            self.flop_count = None if self._fit.was_repeated else self._fit.tally.count
            self._fit.stop_counting()

    def _determine_work(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> None:
        """Operations per token over all ranks, and the peak of the devices; once per fit, with one wait."""
        measure = self._counts.measure
        assert measure is not None
        model, again, counted_model = None, None, None
        counted, fit = self.flop_count, self._fit
        assert fit is not None
        if counted is not None or fit.was_repeated:
            numbers = [0.0, 0.0, 0.0]  # ranks that could not count leave it to the others
            if counted is not None:
                numbers = [float(counted.model), float(counted.recompute), float(measure.input_tokens)]
            dtype = accumulation_dtype(pl_module.device)
            sums = sum_over_ranks_(torch.tensor(numbers, dtype=dtype, device=pl_module.device)).tolist()
            if sums[2] == 0.0:
                fit.is_settled = False  # the next micro-batch will do
                return
            tokens_once = sums[2] / (trainer.world_size // num_data_ranks(trainer))
            counted_model, again = sums[0] / tokens_once, sums[1] / tokens_once
        if self.flops_per_token == "exact":
            model = counted_model or None
        elif isinstance(self.flops_per_token, str):
            from lightning_mp.ground.flops.model_shape import (  # conventions only
                far_above_count,
                module_flops_per_token,
            )

            labels = batch_tokens.find_labels(batch)
            context_tokens = labels.shape[1] if labels is not None else measure.input_tokens
            wrapped = trainer.strategy.model or pl_module
            model = float(module_flops_per_token(wrapped, self.flops_per_token, context_tokens))
            if counted_model and (too_high := far_above_count(self.flops_per_token, model, counted_model)):
                rank_zero_warn(f"MFUMonitor: {too_high}")
        else:
            model = float(self.flops_per_token)
        hardware = model + again if model is not None and again is not None else None
        counted_format = self.flop_count.main_format if self.flop_count is not None else None
        peak, device = device_peak(
            trainer.strategy.root_device, str(trainer.precision), counted_format, given=self.peak_flops
        )
        self.throughput.work = Work(model, hardware, peak * trainer.world_size if peak is not None else None)
        self._report(trainer, self.throughput.work, again, device)

    def _report(self, trainer: "pl.Trainer", work: Work, again: float | None, device: str) -> None:
        if work.model_flops_per_token is None:
            rank_zero_warn(
                "MFUMonitor logs no MFU: it can count no operation of the first micro-batch. Give"
                " flops_per_token= as a number."
            )
            return
        convention = self.flops_per_token if isinstance(self.flops_per_token, str) else "as given"
        operations = format_quantity(work.model_flops_per_token)
        rank_zero_info(
            f"MFUMonitor: {operations} FLOPs per {self._counted} ({convention})."
            + ("" if again is not None else " No HFU: compiled code cannot be counted.")
        )
        if self.flop_count is not None and self.flop_count.unknown:
            rank_zero_warn(
                f"MFUMonitor has no FLOP formula for {', '.join(self.flop_count.unknown)}: they count as 0. Register"
                " one with torch.utils.flop_counter.register_flop_formula, or flops_per_token= as a number."
            )
        if work.peak_flops_per_second is None:
            say = rank_zero_info if trainer.strategy.root_device.type == "cpu" else rank_zero_warn
            say(f"MFUMonitor logs {self._counted}s per second and goodput, but neither MFU nor HFU: {device}")
            return
        peak = work.peak_flops_per_second / trainer.world_size
        rank_zero_info(f"MFUMonitor: the peak is {trainer.world_size} x {peak / 1e12:.4g} TFLOP/s ({device}).")

    # -- readings ------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reads the clock when the totals of an optimizer step have arrived."""
        fit = self._fit
        assert fit is not None
        if not fit.is_settled:
            was_trained_on = fit.tally is None  # without a loss there is no backward
            fit.stop_counting()
            if was_trained_on and fit.uncounted_batches == 0:
                fit.is_settled = True
                self._determine_work(trainer, pl_module, batch)
            fit.uncounted_batches = max(0, fit.uncounted_batches - 1)
        if self._counts.is_open:
            return
        if fit.changes is not None and fit.changes.any:
            self._read(fit, fit.changes)

    def _metrics(self) -> dict[str, float]:
        return {f"mp/{name}": value for name, value in self.window.by_name(self._counted).items() if value is not None}

    def _on_bar(self) -> dict[str, float]:
        return {} if self.window.mfu is None else {"mp/mfu": self.window.mfu}

    @override
    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Waits for the device and stops the clock."""
        if self._fit is not None and self._fit.changes is not None:
            self._flush_and_read()
            self._fit.validation_began = self._clock()
            self.throughput.stop_clock()

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the clock again."""
        fit = self._fit
        if fit is not None and fit.validation_began is not None:
            now = self._clock()
            self.throughput.validated(now - fit.validation_began)
            fit.validation_began = None
            if fit.is_warm:
                self.throughput.start_clock(now)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Takes the last reading and prints the rates of the run."""
        self._flush_and_read()
        self._end()
        if self.total.tokens_per_second is not None:
            rank_zero_info(f"MFUMonitor, whole run: {self.total.summary(self._counted)}.")

    def _end(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.stop_counting()
            self.throughput.stop_clock()

    def _flush_and_read(self) -> None:
        fit = self._fit
        if fit is not None and fit.changes is not None:
            RunState.of(fit.trainer).flush()
            self._counts.counter.flush_pending()
            self._read(fit, fit.changes)

    def _read(self, fit: _Fit, changes: TokenCounterDeltas) -> None:
        now, change = self._clock(), changes.take()
        self.throughput.read(
            now,
            input_tokens=change.input_tokens,
            nonpad_tokens=change.nonpad_tokens,
            useful_tokens=change.useful_tokens,
        )
        if not fit.is_warm and change.windows:
            fit.is_warm = True
            self.throughput.start_clock(now)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """The totals, settled."""
        self._flush_and_read()
        return self.throughput.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from saved totals."""
        self.throughput.load_state_dict(state_dict)


def _is_compiled(module: pl.LightningModule) -> bool:
    return private_dispatch_api.is_compiled(module) or any(
        private_dispatch_api.holds_compiled_code(part) for part in module.modules()
    )


def _of_tokens(convention: object) -> str:
    return (
        f"MFUMonitor(flops_per_token={convention!r}): this convention counts per token, and samples are counted here."
        " Use 'exact', or a number of FLOPs per sample."
    )
