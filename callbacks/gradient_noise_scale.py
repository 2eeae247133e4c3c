"""Monitor of the gradient noise scale, from norms that accumulation and data parallelism give almost for free."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_mp.callbacks._metrics import CallbackMetrics
from lightning_mp.ground.core import private_trainer_api
from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_optimizer_api import loss_scale_of
from lightning_mp.ground.core.ranks import sum_over_ranks_
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.core.trainer_ranks import is_pipelined, num_data_ranks
from lightning_mp.monitors.diagnostics.noise_scale import (
    ClosedNoiseWindow,
    NoiseScale,
    NoiseScaleAverage,
    NoiseWindow,
    on_device_of,
    square_share,
)
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.fused_optimizers import applies_grad_scale
from lightning_mp.training.gradients.replication import GradientReplication, gradient_replication
from lightning_mp.training.optimizer_step.gradient_observers import makes_true_gradients
from lightning_mp.training.optimizer_step.outcome import StepOutcome
from lightning_mp.training.tokens import batch_tokens
from lightning_mp.training.tokens.ragged_batches import RaggedBatches
from lightning_mp.training.tokens.run_counts import RunCounts

_COUNT = "Pass count=, a function from a batch to its number of samples."


@dataclass
class _Fit:
    """Facts about one fit, and its pending numbers."""

    trainer: "pl.Trainer"
    reports_norms: bool  # the precision plugin is of this package
    is_sharded: bool
    window: NoiseWindow | None = None
    closed: dict[int, ClosedNoiseWindow] = field(default_factory=dict)  # by step
    big_squares: dict[int, float] = field(default_factory=dict)  # by step, as its outcome has the norm
    handles: list[RemovableHandle] = field(default_factory=list)
    norms_in_backward: bool = False
    shifts_labels: bool | None = None  # None before the first batch
    tokens_are_samples: bool | None = None  # the same
    samples: int | None = 0  # of the current micro-batch; None if they cannot be counted
    is_booked: bool = False  # it is in the window
    tokens: float | Tensor = 0.0
    has_reported: bool = False  # why there is no estimate

    def disarm(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class GradientNoiseScale(SettingsRepr, Callback):
    r"""Estimates the gradient noise scale during training: the batch size beyond which returns diminish.

    :math:`B_{simple} = \operatorname{tr}(\Sigma) / |G|^2` (McCandlish et al. 2018, "An Empirical Model of Large-Batch
    Training", eq. 2.9) follows from the norms of two gradients of different batch size. The large one is that of the
    optimizer step. The small one is that of the window's first micro-batch:

    - single device and DDP: each rank's own gradient, before it is accumulated and reduced. Needs two micro-batches per
      step or two ranks.
    - FSDP2: the gradient of all ranks' first micro-batches, after its reduction. Needs two micro-batches per step.

    Both are true gradients of the optimizer's parameters: the loss scale is divided out, and so are the weights of
    :class:`~lightning_mp.AccumulationScheduler`. Skipped steps are left out, and so is a window that a resumed run
    continues. Noise is measured per *sample* (a sequence), because the tokens of a sequence are not independent. With
    micro-batches weighted by tokens, the gradient is a mean over tokens, and the batch size is still counted in
    samples. ``mp/noise_scale`` is in samples, and ``mp/noise_scale_tokens`` is that times the mean target tokens of a
    sample.

    It only monitors. The estimate rests on a model of training; measured best batch sizes can differ by a factor of two
    or more, especially early in a run (Merrill et al. 2025, "Critical Batch Size Revisited").

    Per step: one norm over the gradients after the first backward (during it, parameter by parameter, where DDP reduces
    them immediately: windows of one micro-batch) and one reduction of ten numbers; with Lightning's own precision
    plugins one more pass before the step. Nothing waits for the device: numbers are read one step late.

    Args:
        average_steps: time constant of the averages, in optimizer steps. One step's estimate is mostly noise.
        count: a function that returns the number of samples in a batch on this rank; None uses the first dimension of
            its tensors, or, for a batch without tensors, the ``count=`` of
            :class:`~lightning_mp.AccumulationScheduler`.

    Raises:
        ValueError: if ``average_steps`` is not a whole number of 2 or more, or ``count`` is not a function.
        MisconfigurationException: at set-up, with manual optimization or DeepSpeed.

    Example:
        >>> from lightning_mp import GradientNoiseScale
        >>> GradientNoiseScale(average_steps=200).estimate is None
        True
    """

    def __init__(self, average_steps: int = 500, *, count: Callable[[Any], int] | None = None) -> None:
        unit, hint = "optimizer steps", "A steady value needs some hundreds."
        self.average_steps = whole_number(
            average_steps, "average_steps", "GradientNoiseScale", minimum=2, unit=unit, hint=hint
        )
        if count is not None and not callable(count):
            raise ValueError(f"GradientNoiseScale(count={count!r}): it must be a function from a batch to its samples.")
        self.count = count
        self.average = NoiseScaleAverage(average_steps)
        self._fit: _Fit | None = None
        self._ragged = RaggedBatches("GradientNoiseScale counts in them, which may be wrong.", _COUNT)

    @property
    def estimate(self) -> NoiseScale | None:
        """The estimate so far, with its uncertainty; None before there is one."""
        return self.average.estimate()

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks Trainer and module."""
        refuse_other_trainers(self, trainer)
        self.check_setup(trainer, pl_module)
        if stage == "fit":
            CallbackMetrics.attach(trainer).add(self._metrics)

    def check_setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any = None) -> None:
        """Refuses Trainers and modules in which the gradients of micro-batches cannot be separated.

        Raises:
            MisconfigurationException: says why.
        """
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                "GradientNoiseScale needs automatic optimization; with automatic_optimization=False it is not known"
                " which micro-batches make a step. Remove the callback or turn automatic optimization on."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "GradientNoiseScale cannot be used with DeepSpeed, which does not expose its gradients. Use DDP or"
                " ModelParallelStrategy."
            )
        if is_pipelined(trainer):
            raise MisconfigurationException(
                "GradientNoiseScale cannot be used with PipelineParallelStrategy, whose stages have no gradient of a"
                " single micro-batch of the whole model. Measure it with DDP or ModelParallelStrategy; it depends on"
                " the model and the data, not on the strategy."
            )

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Determines where gradients and outcomes come from."""
        self._fit = _Fit(
            trainer,
            reports_norms=makes_true_gradients(trainer.precision_plugin),
            is_sharded=any(isinstance(parameter, DTensor) for parameter in pl_module.parameters()),
        )
        Patches.of(trainer).at_end(self._end)

    # -- one micro-batch -----------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Counts its samples and tokens."""
        assert self._fit is not None
        self._fit.is_booked = False
        self._fit.samples = self._count_samples(self._fit, batch)
        self._fit.tokens = self._count_tokens(self._fit, pl_module, batch)

    def _count_samples(self, fit: _Fit, batch: Any) -> int | None:
        if self.count is not None:
            return int(self.count(batch))
        try:
            samples = batch_tokens.count_samples(batch, _COUNT)
            if batch_tokens.find_labels(batch) is None:
                self._ragged.look(batch)
            return samples
        except ValueError as error:
            counts = RunCounts.of(fit.trainer)
            if counts is not None and counts.measure is not None and counts.measure.input_tokens:
                return counts.measure.input_tokens  # by a user's function, as there is no tensor
            _report(fit, str(error))
            return None

    def _count_tokens(self, fit: _Fit, pl_module: "pl.LightningModule", batch: Any) -> float | Tensor:
        counts = RunCounts.of(fit.trainer)
        if counts is not None and counts.measure is not None:
            if fit.tokens_are_samples is None:
                weighting = counts.weighting
                is_counted = weighting is not None and (weighting.count or weighting.input_count) is not None
                fit.tokens_are_samples = is_counted and counts.measure.most_tokens == fit.samples
            return 0.0 if fit.tokens_are_samples else counts.measure.tokens
        labels = batch_tokens.find_labels(batch)
        if labels is None:
            return 0.0
        if fit.shifts_labels is None:
            fit.shifts_labels = batch_tokens.shifts_labels_inside(pl_module, batch)
        return batch_tokens.loss_bearing(labels, shifted=fit.shifts_labels).sum()

    @override
    def on_before_zero_grad(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer) -> None:
        """A window opens."""
        assert self._fit is not None
        self._fit.window = NoiseWindow(trainer.global_step)

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """Records the micro-batch; in the first one of a window its gradients will be read."""
        fit = self._fit
        assert fit is not None
        window = fit.window
        if window is None or fit.samples == 0:
            return
        if fit.is_booked:  # a part of a split micro-batch after the first, or of an earlier one that is done again
            if fit.norms_in_backward and window.micro_batches == 1:
                window.is_countable = False
                _report(fit, "the only micro-batch of a step is split, and its gradient is reduced over ranks at once.")
            return
        fit.is_booked = True
        window.is_countable &= fit.samples is not None
        if not window.micro_batches and _is_available(fit):
            stepped = _stepped(trainer)
            is_own_afterwards = fit.is_sharded or _accumulates_locally(trainer)
            fit.norms_in_backward = not is_own_afterwards or any(p.grad is not None for p in stepped)
            if fit.norms_in_backward:
                fit.handles = [p.register_hook(window.add_norm) for p in stepped if p.requires_grad]
        window.add(fit.samples or 1, fit.tokens)

    @override
    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Takes the small norm."""
        fit = self._fit
        assert fit is not None
        fit.disarm()
        window = fit.window
        if window is None or window.micro_batches != 1 or window.small_square is not None or not _is_available(fit):
            return
        window.first_weight = _weight(trainer)
        seen = [parameter for parameter in _stepped(trainer) if parameter.grad is not None]
        if fit.is_sharded and not seen:
            _report(
                fit,
                "sharded gradients are reduced at the end of a window only, so there is no gradient of the first"
                " micro-batch alone. Use AccumulationScheduler(..., sync='micro_batch').",
            )
        if fit.norms_in_backward:
            square = window.take_norms()
        else:
            ranks = gradient_replication(trainer) if fit.is_sharded else GradientReplication(None, 1, 1)
            square = square_share(seen, ranks) if seen else None
        if square is None:
            return
        # The loss was divided by the planned length of the window and multiplied by the loss scale.
        window.small_square = square * float(trainer.accumulate_grad_batches) ** 2 / _square_scale(trainer, square)
        if not fit.is_sharded:
            window.small_square = window.small_square / on_device_of(square, window.first_weight).square()

    # -- the end of a window -------------------------------------------------------------------------------------------

    def needs_gradients(self, step_index: int) -> bool:
        """The precision plugins of this package report the norm of the step themselves."""
        return False

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        """With a stock precision plugin: takes the large norm here."""
        assert self._fit is not None
        window = self._fit.window
        if self._fit.reports_norms or window is None or window.small_square is None:
            return
        square = square_share(gradient_ops.parameters_with_gradient(optimizer), gradient_replication(trainer))
        # Lightning has unscaled gradients here, unless the optimizer does it in its own kernel.
        window.big_square = square / (_square_scale(trainer, square) if applies_grad_scale(optimizer) else 1.0)

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """With our precision plugins: the large norm comes from the outcome. A skipped step has no norm."""
        fit = self._fit
        if fit is not None and fit.reports_norms:
            known = outcome.stepped and outcome.grad_norm is not None
            fit.big_squares[outcome.step_index] = (outcome.grad_norm or 0.0) ** 2 if known else torch.nan

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Closes a window whose step was taken, and reads earlier ones."""
        fit = self._fit
        assert fit is not None
        window = fit.window
        if window is None or trainer.global_step <= window.step_index:
            return
        fit.window = None
        self._read(fit)
        if window.small_square is not None:
            fit.closed[window.step_index] = _closed(fit, window)
        fit.big_squares = {index: big for index, big in fit.big_squares.items() if index >= window.step_index}

    def _metrics(self) -> dict[str, float]:
        estimate = self.estimate
        if estimate is None:
            return {}
        tokens = {"mp/noise_scale_tokens": estimate.tokens} if estimate.tokens else {}
        return {"mp/noise_scale": estimate.samples, **tokens}

    def _read(self, fit: _Fit) -> None:
        """Adds the windows whose numbers have all arrived."""
        for step_index in [index for index in fit.closed if not fit.reports_norms or index in fit.big_squares]:
            numbers = fit.closed.pop(step_index).read(fit.big_squares.pop(step_index, None))
            if numbers is not None:
                *inputs, tokens_per_sample = numbers
                self.average.add(*inputs, tokens_per_sample=tokens_per_sample)

    def _flush_pending(self) -> None:
        if self._fit is not None:
            RunState.of(self._fit.trainer).flush()
            self._read(self._fit)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Logs the estimate."""
        self._flush_pending()
        if self.average.windows:
            rank_zero_info(f"GradientNoiseScale: {self.estimate or 'no estimate yet: the noise hides the gradient.'}")

    def _end(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.disarm()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """The averages, settled."""
        self._flush_pending()
        return self.average.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from saved averages."""
        self.average.load_state_dict(state_dict)


def _is_available(fit: _Fit) -> bool:
    """Whether this window can have a small gradient; logs once why not."""
    trainer, reason = fit.trainer, ""
    if isinstance(trainer.strategy, FSDPStrategy):
        reason = "FSDP1 does not expose gradients of single micro-batches. Use ModelParallelStrategy (FSDP2) or DDP."
    elif int(trainer.accumulate_grad_batches) == 1 and (fit.is_sharded or trainer.world_size == 1):
        where = "are sharded" if fit.is_sharded else "come from one process"
        reason = (
            f"a step is one micro-batch and its gradients {where}, so there are no two batch sizes to compare. Use two"
            " or more micro-batches per step: AccumulationScheduler({0: 2}) or Trainer(accumulate_grad_batches=2), with"
            " smaller batches. The estimate starts with the first longer window."
        )
    if reason:
        _report(fit, reason)
    return not reason


def _report(fit: _Fit, reason: str) -> None:
    if not fit.has_reported:
        fit.has_reported = True
        rank_zero_warn(f"GradientNoiseScale has no estimate for now: {reason}")


def _closed(fit: _Fit, window: NoiseWindow) -> ClosedNoiseWindow:
    counts = RunCounts.of(fit.trainer)
    weight_by = counts.weight_by if counts is not None else None
    return ClosedNoiseWindow(
        HostCopy(sum_over_ranks_(window.numbers(fit.trainer.strategy.root_device))),
        # Lightning divides by the planned length also where a window is shorter; the controller puts that right.
        big_factor=1.0 if weight_by else (int(fit.trainer.accumulate_grad_batches) / window.micro_batches) ** 2,
        equal_weights=weight_by in (None, "batch"),
        sharded=fit.is_sharded,
        data_ranks=num_data_ranks(fit.trainer),
    )


def _stepped(trainer: "pl.Trainer") -> list[Tensor]:
    """The optimizers' parameters: the large norm is that of the step, in which other gradients have no part."""
    return [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]


def _accumulates_locally(trainer: "pl.Trainer") -> bool:
    """Whether the gradients of this micro-batch are this rank's own after its backward, not reduced over ranks."""
    model = trainer.strategy.model
    is_ddp = isinstance(model, DistributedDataParallel)
    return trainer.world_size == 1 or (is_ddp and private_trainer_api.is_accumulating(trainer))


def _weight(trainer: "pl.Trainer") -> float | Tensor:
    """What the controller multiplies this micro-batch's loss by."""
    counts = RunCounts.of(trainer)
    return counts.loss_factor if counts is not None else 1.0


def _square_scale(trainer: "pl.Trainer", like: Tensor) -> Tensor:
    scale = loss_scale_of(trainer)
    return on_device_of(like, 1.0 if scale is None else scale).square()
