"""Why a step was skipped: which parameters, and with a replay which micro-batch, module and tensor, and the cause."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_mp.callbacks._report_folder import report_folder
from lightning_mp.ground.core import private_trainer_api
from lightning_mp.ground.core.arguments import folder_or_none, true_or_false, whole_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.messages import lightning_logger
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.random_state import RandomState
from lightning_mp.ground.core.ranks import all_gathered
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.saved_state import ANY_NUMBER, checked_state, listed_of, or_none
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.core.trainer_ranks import is_pipelined
from lightning_mp.ground.modules.names import parameter_names
from lightning_mp.ground.modules.stage_placeholder import full_model
from lightning_mp.monitors.diagnostics.overflow.observations import take_reading
from lightning_mp.monitors.diagnostics.overflow.replay import MicroBatch, Replay
from lightning_mp.monitors.diagnostics.overflow.report import (
    NOT_REPLAYED,
    KnownByRank,
    OverflowReport,
    ReportTally,
    join_ranks,
)
from lightning_mp.monitors.diagnostics.overflow.search import SearchResult, search_overflow
from lightning_mp.monitors.diagnostics.overflow.weight_growth import WeightGrowth, largest_growth, weight_rms
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.replication import gradient_replication
from lightning_mp.training.optimizer_step.gradient_observers import makes_true_gradients
from lightning_mp.training.optimizer_step.outcome import StepOutcome, StepOutcomeSource

_STATE_KINDS = {"rms_at_start": or_none(listed_of(ANY_NUMBER))}


@dataclass
class _Fit:
    """What one fit keeps for its replays; once it is over, no batches."""

    windows: dict[int, list[MicroBatch]] = field(default_factory=dict)  # by step, until its outcome is known
    postponed: tuple[StepOutcome, list[int]] | None = None  # a skip whose replay waits, with its parameters
    can_replay_now: bool = False  # a batch is under way, not a validation or a checkpoint
    replays: int = 0
    tally: ReportTally = field(default_factory=ReportTally)
    is_over: bool = False

    def end(self) -> None:
        """Releases the batches."""
        self.windows.clear()
        self.postponed, self.can_replay_now, self.is_over = None, False, True


class OverflowPostMortem(SettingsRepr, Callback):
    """Reports why a step was skipped, in the log and in ``overflow_step_<step_index>.json``.

    The same verdict in the same module is reported once, then counted; a summary follows after 10, 100, 1000, ...
    skipped steps and at the end. The files and ``reports`` contain every skipped step.

    Each report names the parameters whose gradients were not finite. The precision plugins of this package know them
    from the norms that they compute anyway; with Lightning's own plugins, which also need an
    :class:`~lightning_mp.OverflowMonitor`, the gradients are read once. Until a step is skipped,
    the only cost is one pass over the weights at the start of the run: weights that grow to 100 times their size mean
    divergence.

    With ``replay=True`` the micro-batches of the skipped window run again, with the same random numbers and with hooks
    on all modules. The report then says which micro-batch on which rank overflowed, in which module and tensor, in the
    forward, the loss or the backward, and why: the loss scale (finite at a smaller one), the range of 16-bit numbers
    (finite in fp32 only), the model (not finite at scale 1), the data, the weights, or a run that has diverged. The run
    then continues as if there had been no replay.

    Cost of ``replay=True`` on healthy steps: batches are kept until the outcome of their step is known, with a fused
    optimizer those of two windows; per micro-batch the random generators' states are copied, about 10 kB on the host.
    No wait for the device, no pass over gradients, no hook. On a skip: up to one forward and backward per micro-batch
    of the window, then up to seven of one micro-batch, and memory for a second set of gradients.

    A replay cannot undo what ``training_step`` does outside the module (files, loggers) or to weights. It cannot repeat
    batches that ``training_step`` changed in place, or random numbers from generators in objects of other classes. A
    batch that ``MicroBatchOnOOM`` has split is replayed whole; where that does not fit, the report says so.

    Args:
        replay: rerun the batches of a skipped step.
        dirpath: folder for the JSON files; None puts them next to the checkpoints, or into ``trainer.default_root_dir``
            where none are written.
        max_replays: at most this many skipped steps per fit are replayed; later ones are reported without a replay.

    Raises:
        ValueError: if ``max_replays`` is not a positive whole number.
        MisconfigurationException: at set-up, if nothing reports outcomes, or, with ``replay=True``, if a training step
            cannot be rerun (manual optimization, LBFGS, ``dataloader_iter``, DeepSpeed) or ranks may decide
            differently.

    Example:
        >>> from lightning_mp import OverflowPostMortem
        >>> OverflowPostMortem(replay=True).reports
        []
    """

    def __init__(self, replay: bool = False, dirpath: str | Path | None = None, *, max_replays: int = 10) -> None:
        self.replay = true_or_false(replay, "replay", "OverflowPostMortem")
        self.dirpath = folder_or_none(dirpath, "dirpath", "OverflowPostMortem")
        self.max_replays = whole_number(
            max_replays,
            "max_replays",
            "OverflowPostMortem",
            unit="skipped steps",
            hint="To replay none, leave replay out.",
        )
        self.reports: list[OverflowReport] = []
        self._rms_at_start: Tensor | None = None
        self._saved_rms: list[float] | None = None
        self._fit = _Fit(is_over=True)

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)
        if stage == "fit" and self.replay:
            _refuse_what_cannot_be_replayed(trainer, pl_module)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Resets the state of an earlier run."""
        _check_skips_are_reported(trainer)
        if self.replay and any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise MisconfigurationException(
                "OverflowPostMortem(replay=True) cannot be used with LBFGS, which evaluates the loss several times in"
                " one step. Use another optimizer, or leave replay out."
            )
        saved, self._saved_rms = self._saved_rms, None
        rms = weight_rms(pl_module)
        # Of the first rank only: under a pipeline the others hold other parameters.
        same = saved is not None and len(saved) == len(rms) and not is_pipelined(trainer)
        self._rms_at_start = torch.tensor(saved) if same else rms
        self._fit = fit = _Fit()
        Patches.of(trainer).at_end(fit.end)

    # -- healthy steps -------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Keeps the batch and the state of the random generators."""
        if not self.replay:
            return
        self._make_up(trainer, pl_module)
        state = RandomState.capture(pl_module.device)
        micro_batch = MicroBatch(batch, batch_idx, state, int(trainer.accumulate_grad_batches))
        self._fit.windows.setdefault(trainer.global_step, []).append(micro_batch)
        self._fit.can_replay_now = True

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """Keeps the scaled and weighted loss, on its device."""
        window = self._fit.windows.get(trainer.global_step)
        if window is not None:
            window[-1].scaled_loss = loss.detach()

    # -- a skipped step ------------------------------------------------------------------------------------------------

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Reports a skip; releases the batches of a step that was taken."""
        fit = self._fit
        if outcome.overflowed:
            parameters = _nonfinite_parameters(trainer, pl_module, outcome)
            # Nothing is run again once an exception has ended the run.
            if self.replay and not (fit.can_replay_now or fit.is_over or trainer.interrupted):
                fit.postponed = outcome, parameters
                return
            self._examine(trainer, pl_module, outcome, parameters)
        fit.windows.pop(outcome.step_index, None)

    def _make_up(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        postponed, self._fit.postponed = self._fit.postponed, None
        if postponed is not None:
            self._examine(trainer, pl_module, *postponed)
            self._fit.windows.pop(postponed[0].step_index, None)

    def _examine(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outcome: StepOutcome, parameters: list[int]
    ) -> None:
        """Replays the window if requested, gathers the findings of all ranks, and writes the report."""
        result, note = SearchResult(None), ""
        if self.replay:
            note = self._why_no_replay(trainer, outcome)
            if not note:
                self._fit.replays += 1
                result = self._replay_window(trainer, pl_module, outcome)
        known = KnownByRank(
            trainer.global_rank, parameters, _nonfinite_buffers(pl_module), result, self._growth(pl_module)
        )
        report = join_ranks(
            outcome.step_index,
            outcome.loss_scale,
            # Only what this rank knows, where ranks may not all come here.
            [known] if _ranks_may_disagree(trainer) else all_gathered(known, gradient_replication(trainer).group),
            _names_as_written(pl_module),
            note,
            expects_finding=self.replay and not note,
        )
        self._publish(trainer, report)

    def _growth(self, pl_module: "pl.LightningModule") -> WeightGrowth | None:
        """Growth of this rank's weights; None if it is no sign of divergence."""
        now = weight_rms(pl_module).tolist()
        at_start = self._rms_at_start.tolist() if self._rms_at_start is not None else now
        return largest_growth(parameter_names(pl_module), at_start, now) if len(at_start) == len(now) else None

    def _why_no_replay(self, trainer: "pl.Trainer", outcome: StepOutcome) -> str:
        """A sentence for the report; empty if there can be a replay. The same on all ranks."""
        fit = self._fit
        if fit.replays >= self.max_replays:
            return f"{NOT_REPLAYED}the limit of max_replays={self.max_replays} is reached."
        if trainer.interrupted or outcome.step_index not in fit.windows:
            return f"{NOT_REPLAYED}the run ended before the outcome of the step was known."
        sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        if sharded and not fit.can_replay_now and trainer.global_step in fit.windows:
            return f"{NOT_REPLAYED}the next window had begun, and its sharded gradients cannot be set aside."
        return ""

    def _replay_window(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outcome: StepOutcome
    ) -> SearchResult:
        ranks = gradient_replication(trainer)

        def any_rank(condition: bool) -> bool:
            return bool(ranks.sum_(torch.tensor([float(condition)], device=pl_module.device)).item())

        replay = Replay(trainer, pl_module, outcome.loss_scale)
        with replay.state_restored():
            return search_overflow(
                replay,
                self._fit.windows[outcome.step_index],
                outcome.loss_scale,
                rank=trainer.global_rank,
                any_rank=any_rank,
            )

    def _publish(self, trainer: "pl.Trainer", report: OverflowReport) -> None:
        self.reports.append(report)
        if trainer.is_global_zero:
            folder = self.dirpath if self.dirpath is not None else report_folder(trainer)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"overflow_step_{report.step_index}.json"
            path.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
            if self._fit.tally.is_new(report):
                lightning_logger().warning(str(report))
            if self._fit.tally.is_summary_due():
                lightning_logger().warning(self._fit.tally.summary())

    # -- the end of a batch, an epoch and the run ----------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """From here to the next batch there may be a validation or a checkpoint: replays wait."""
        self._fit.can_replay_now = False

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Makes a replay that could not be made when its outcome was reported."""
        self._make_up(trainer, pl_module)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reads the last outcome while its batch can still be rerun; logs a summary."""
        RunState.of(trainer).flush()
        self._make_up(trainer, pl_module)
        self._fit.end()
        if self._fit.tally.has_unreported and trainer.is_global_zero:
            lightning_logger().warning(self._fit.tally.summary())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """The size of the weights when the run began."""
        return {"rms_at_start": self._rms_at_start.tolist() if self._rms_at_start is not None else None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A resumed run compares with the beginning of the first one."""
        self._saved_rms = checked_state(state_dict, _STATE_KINDS, "OverflowPostMortem")["rms_at_start"]


def _nonfinite_parameters(trainer: "pl.Trainer", pl_module: "pl.LightningModule", outcome: StepOutcome) -> list[int]:
    """Positions, among the module's parameters, of those whose gradient on this rank was not finite."""
    with full_model(pl_module):
        named = list(pl_module.named_parameters())
    known = set(outcome.nonfinite_parameters())
    if not known and trainer.global_step == outcome.step_index:
        # The plugin keeps no norms, and the gradients are still those of that step.
        held = [(name, gradient_ops.local_shard(p.grad)) for name, p in named if p.grad is not None]
        filled = [(name, shard) for name, shard in held if shard.numel()]
        if filled:
            finite = gradient_ops.shard_norms([shard for _, shard in filled]).isfinite().tolist()
            known = {name for (name, _), is_finite in zip(filled, finite, strict=True) if not is_finite}
    return [index for index, (name, _) in enumerate(named) if name in known]


def _names_as_written(pl_module: "pl.LightningModule") -> list[str]:
    """Names of all parameters; stages of a pipeline count positions in the whole model."""
    with full_model(pl_module):
        return parameter_names(pl_module)


def _nonfinite_buffers(pl_module: "pl.LightningModule") -> list[str]:
    """Buffers with nan or +inf; -inf is what masks are made of."""
    readings = [(name, take_reading(buffer)) for name, buffer in pl_module.named_buffers()]
    return [name for name, reading in readings if reading is not None and bool(reading[:2].any())]


def _ranks_may_disagree(trainer: "pl.Trainer") -> bool:
    """torch's own GradScaler on DTensors of several layouts may skip on one rank and step on another."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return (
        isinstance(trainer.strategy, ModelParallelStrategy)
        and not makes_true_gradients(trainer.precision_plugin)
        and scaler is not None
        and not getattr(scaler, "decides_on_all_ranks", False)
    )


def _check_skips_are_reported(trainer: "pl.Trainer") -> None:
    """Of Lightning's own plugins only those with a loss scale skip steps, and none reports them."""
    plugin = trainer.precision_plugin
    if makes_true_gradients(plugin):
        return
    scales = getattr(plugin, "scaler", None) is not None
    call = "OverflowMonitor()" if scales else "OverflowMonitor(guard=True)"
    if StepOutcomeSource.of(trainer) is None:
        raise MisconfigurationException(
            "OverflowPostMortem gets skipped steps from the precision plugins of lightning_mp. With"
            f" {type(plugin).__name__} add lightning_mp.{call} to the callbacks."
        )
    if not scales and not any(getattr(each, "guard", False) for each in private_trainer_api.callbacks_of(trainer)):
        rank_zero_info(
            f"OverflowPostMortem will see nothing: {type(plugin).__name__} has no loss scale and skips no step. Use"
            f" lightning_mp.{call}, which skips steps with non-finite gradients, or a plugin of lightning_mp."
        )


def _refuse_what_cannot_be_replayed(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
    reason = ""
    if not pl_module.automatic_optimization:
        reason = "automatic_optimization=False, whose training step makes optimizer steps"
    elif isinstance(trainer.strategy, DeepSpeedStrategy):
        reason = "DeepSpeed, which makes its steps itself"
    elif _ranks_may_disagree(trainer):
        reason = (
            f"{type(trainer.precision_plugin).__name__} and torch's GradScaler under ModelParallelStrategy, where one"
            " rank may skip a step that another makes; use AutocastPrecision, or give the plugin a"
            " lightning_mp.LossScaler"
        )
    elif is_pipelined(trainer):
        reason = "PipelineParallelStrategy, whose stages run forwards and backwards of a batch in one"
    elif is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        reason = "a training_step(dataloader_iter), which draws its batches itself"
    if reason:
        raise MisconfigurationException(
            f"OverflowPostMortem(replay=True) cannot run a training step again with {reason}. Leave replay out: the"
            " parameters are named without it."
        )
