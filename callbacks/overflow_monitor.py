"""Logs and counts skipped steps and the loss scale, and ends a run that skips too many."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.callbacks._metrics import CallbackMetrics
from lightning_mp.callbacks._report_folder import report_folder
from lightning_mp.ground.core import private_trainer_api
from lightning_mp.ground.core.arguments import true_or_false, whole_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.saved_state import COUNT, checked_state
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.training.optimizer_step.outcome import StepOutcome, StepOutcomeSource
from lightning_mp.training.optimizer_step.stock_plugin_observer import StockPluginObserver


class OverflowMonitor(SettingsRepr, Callback):
    """Logs the outcome of every optimizer step, without waiting for the device.

    Logged once the first outcome is known: ``mp/loss_scale`` (in runs that have one) and ``mp/skipped_steps``, both
    also on the progress bar, the latter from the first skip on; ``mp/skip_streak`` (steps skipped in a row);
    ``mp/overflow_rate`` (skipped over attempted steps) and ``mp/grad_norm`` (true norm before clipping; with the
    plugins of this package, or with ``guard``). Totals are saved in the checkpoint.

    A run that only skips steps is stopped, see ``stop_after_skips``. A warning at the end of a fit reports skips if
    they are all steps (3 or more), at least half of them (10 or more), or more than a tenth (more than the 48 that a
    falling loss scale explains).

    The precision plugins of this package keep learning-rate schedulers and averaged weights from advancing on a skipped
    step. With Lightning's own plugins, this callback does so.

    ``trainer.global_step`` counts attempted steps, as usual in Lightning, so that logs and checkpoints share one step
    count.

    Args:
        count_real_steps: let ``Trainer(max_steps=n)`` end the run after n steps that were taken, not after n attempts.
            With a fused optimizer the host waits for the device once, shortly before the limit.
        stop_after_skips: stop the run after this many skips in a row: a checkpoint is saved, and a warning gives the
            reason, which is also in ``stop_reason``. "auto" is 100, or twice the skips that a loss scale with a slower
            ``backoff_factor`` may need. In a healthy run a streak ends once the scale has fallen far enough: from 2^24
            to 2^-24 takes 48 skips, and ``hysteresis`` adds one less than its value. Without a loss scale only the
            batch changes between two skips, and 100 in a row are more than a few bad batches. None never stops.
        guard: on Lightning's own plugins without a loss scaler (``"bf16-mixed"``, ``"32-true"``, ``"bf16-true"``) also
            skip steps with non-finite gradients. This costs one pass over the gradients and, unless the optimizer is
            fused, one wait for the device per step. The plugins of this package always do this, without the extra pass.

    Raises:
        ValueError: if ``stop_after_skips`` is not "auto", None or a positive whole number.
        MisconfigurationException: at set-up, if ``count_real_steps`` is used without ``max_steps``, or ``guard`` with
            something that takes its own steps (DeepSpeed, LBFGS).

    Example:
        >>> from lightning_mp import OverflowMonitor
        >>> monitor = OverflowMonitor(stop_after_skips=50)
        >>> monitor.skipped_steps, monitor.overflow_rate, monitor.stop_reason
        (0, 0.0, None)
    """

    def __init__(
        self,
        *,
        count_real_steps: bool = False,
        stop_after_skips: int | Literal["auto"] | None = "auto",
        guard: bool = False,
    ) -> None:
        if stop_after_skips not in (None, "auto"):
            whole_number(
                stop_after_skips,
                "stop_after_skips",
                "OverflowMonitor",
                unit="skipped steps in a row",
                hint="'auto' is the default, and None never stops.",
            )
        self.count_real_steps = true_or_false(count_real_steps, "count_real_steps", "OverflowMonitor")
        self.stop_after_skips = stop_after_skips
        self.guard = true_or_false(guard, "guard", "OverflowMonitor")
        self.attempted_steps = 0
        self.skipped_steps = 0
        self.skip_streak = 0
        self.loss_scale: float | None = None
        self.grad_norm: float | None = None
        self.stop_reason: str | None = None
        self._fit: _Fit | None = None

    @property
    def overflow_rate(self) -> float:
        """Skipped over attempted steps."""
        return self.skipped_steps / self.attempted_steps if self.attempted_steps else 0.0

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "OverflowMonitor cannot be used with DeepSpeed, which steps its own optimizer: skipped steps are not"
                " seen, and no schedule can be held. DeepSpeed logs its own skips; or use strategy='ddp' or 'fsdp'."
            )
        if stage == "fit" and self.count_real_steps and trainer.max_steps == -1:
            raise MisconfigurationException(
                "OverflowMonitor(count_real_steps=True) needs Trainer(max_steps=...), which is not set here: give"
                " max_steps, or leave count_real_steps out."
            )
        if stage == "fit":
            CallbackMetrics.attach(trainer).add(self._metrics, self._on_bar)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Watches the steps of a stock precision plugin; those of this package report outcomes themselves."""
        patches = Patches.of(trainer)
        patches.at_end(self._end)
        self.stop_reason = None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._fit = fit = _Fit(
            trainer,
            has_scale=scaler is not None and scaler.is_enabled(),
            most_skips=_unhealthy_streak(scaler) if self.stop_after_skips == "auto" else self.stop_after_skips,
        )
        if StepOutcomeSource.of(trainer) is None:
            fit.observer = StockPluginObserver(trainer, pl_module, guard=self.guard).attach()
        if self.count_real_steps:
            fit.limit = RealStepLimit(trainer)
            patches.at_end(fit.limit.detach)
        self._pass_on_skips()

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Continues from the totals of a checkpoint."""
        assert self._fit is not None
        self._fit.attempted_before = self.attempted_steps

    # -- steps ---------------------------------------------------------------------------------------------------------

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Counts an outcome."""
        self.attempted_steps += 1
        self.loss_scale = outcome.loss_scale
        self.grad_norm = outcome.grad_norm
        if outcome.stepped:
            self.skip_streak = 0
            return
        self.skipped_steps += 1
        self.skip_streak += outcome.overflowed
        fit = self._fit
        if fit is None:
            return
        fit.overflows += outcome.overflowed
        if fit.limit is not None:
            fit.limit.allow_for(self.skipped_steps)
        if fit.most_skips is not None and self.skip_streak >= fit.most_skips:
            fit.must_stop = True
            self.stop_reason = self._reason(fit, outcome)

    def _reason(self, fit: "_Fit", outcome: StepOutcome) -> str:
        names = outcome.nonfinite_parameters()
        where = f" Non-finite gradients, last layer first: {listed(names)}." if names else ""
        scale = f", at loss scale {outcome.loss_scale:.10g}" if fit.has_scale else ""
        return (
            f"{self.skip_streak} optimizer steps in a row were skipped, up to step {outcome.step_index}{scale}.{where}"
        )

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the run after too many skipped steps."""
        fit = self._fit
        assert fit is not None
        if fit.limit is not None and fit.limit.is_reached():
            self._flush_pending()
        if fit.must_stop:
            self._stop(fit)

    def _metrics(self) -> dict[str, float]:
        if not self.attempted_steps or self._fit is None:
            return {}
        known = {"mp/loss_scale": self.loss_scale if self._fit.has_scale else None, "mp/grad_norm": self.grad_norm}
        return {
            "mp/skipped_steps": self.skipped_steps,
            "mp/skip_streak": self.skip_streak,
            "mp/overflow_rate": self.overflow_rate,
            **{name: number for name, number in known.items() if number is not None},
        }

    def _on_bar(self) -> dict[str, float]:
        shown = {"mp/skipped_steps": float(self.skipped_steps)} if self.skipped_steps else {}
        has_scale = self._fit is not None and self._fit.has_scale
        return shown | ({"mp/loss_scale": self.loss_scale} if has_scale and self.loss_scale is not None else {})

    def _stop(self, fit: "_Fit") -> None:
        trainer, fit.must_stop = fit.trainer, False
        # The run that resumes from this checkpoint has its own N skips to go.
        self.skip_streak = 0
        path = report_folder(trainer) / f"stopped_after_skips-step-{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        trainer.should_stop = True
        rank_zero_warn(
            f"OverflowMonitor(stop_after_skips={self.stop_after_skips!r}) ends the run: {self.stop_reason} Saved"
            f" {path}.{self._advice(fit)}",
            category=RuntimeWarning,
        )

    def _flush_pending(self) -> None:
        if self._fit is not None:
            RunState.of(self._fit.trainer).flush()

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reads the last outcome, so that the totals are final; warns if too many steps were skipped."""
        fit = self._fit
        assert fit is not None
        self._flush_pending()
        attempts, skips = self.attempted_steps - fit.attempted_before, fit.overflows
        if self.stop_reason is None and _are_many(skips, attempts):
            rank_zero_warn(
                f"OverflowMonitor: {skips:,} of {attempts:,} optimizer steps were skipped because gradients were not"
                f" finite; the weights were trained by the other {attempts - skips:,} alone.{self._advice(fit)}",
                category=RuntimeWarning,
            )

    def _advice(self, fit: "_Fit") -> str:
        """What to do about skips."""
        if not fit.has_scale:
            return (
                " Without a loss scale, the cause is the loss or the weights: lower the learning rate, clip gradients,"
                " and look for bad batches and log or division of 0."
            )
        return (
            f" The loss scale is {self.loss_scale:.10g}. If it only had to come down, use LossScaler(init_scale=...);"
            " otherwise look at the last losses and learning rates. OverflowPostMortem(replay=True) tells the two"
            " apart."
        )

    def _end(self) -> None:
        self._fit = None

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """The totals, settled."""
        self._flush_pending()
        return {name: getattr(self, name) for name in _TOTALS}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from saved totals."""
        state = checked_state(state_dict, dict.fromkeys(_TOTALS, COUNT), "OverflowMonitor")
        for name in _TOTALS:
            setattr(self, name, state[name])
        # FSDP strategies load after `on_fit_start`.
        self._pass_on_skips()

    def _pass_on_skips(self) -> None:
        if self._fit is not None and self._fit.limit is not None:
            self._fit.limit.allow_for(self.skipped_steps)
        if self._fit is not None and self._fit.observer is not None:
            self._fit.observer.skipped_before(self.skipped_steps)


def _unhealthy_streak(scaler: object) -> int:
    """More skips in a row than any healthy run has: about twice as many as the scale needs to fall all the way.

    >>> import torch
    >>> _unhealthy_streak(None)
    100
    >>> _unhealthy_streak(torch.amp.GradScaler("cpu", backoff_factor=0.9))
    632
    """
    backoff = scaler.get_backoff_factor() if isinstance(scaler, torch.amp.GradScaler) else 0.5
    halvings = _SKIPS_OF_A_FALLING_SCALE / -math.log2(backoff) if 0.0 < backoff < 1.0 else 0.0
    return max(100, 2 * math.ceil(halvings))


def _are_many(skips: int, attempts: int) -> bool:
    """Whether so many skipped steps are worth a warning.

    >>> _are_many(10, 10), _are_many(15, 30), _are_many(48, 200)
    (True, True, False)
    """
    if skips == attempts:
        return skips >= _FEWEST_STEPS
    return skips >= max(_FEWEST_SKIPS, attempts / 2) or skips > max(_SKIPS_OF_A_FALLING_SCALE, attempts / 10)


class RealStepLimit:
    """Raises the Trainer's ``max_steps`` by one for every skipped step, and restores the user's number at the end.

    Lightning compares ``max_steps`` with ``trainer.global_step``, which counts attempts. A run with ``max_steps=1000``
    and 30 skips makes 970 steps there, and 1000 with this.

    >>> import lightning.pytorch as pl
    >>> trainer = pl.Trainer(max_steps=10, accelerator="cpu", logger=False, enable_checkpointing=False)
    >>> limit = RealStepLimit(trainer)
    >>> limit.allow_for(skipped_steps=1)
    >>> trainer.max_steps
    11
    >>> limit.detach()
    >>> trainer.max_steps
    10
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        self._asked_max_steps = trainer.max_steps

    def allow_for(self, skipped_steps: int) -> None:
        """Raises the limit by the number of skipped steps of the run."""
        if self._asked_max_steps != -1:
            private_trainer_api.set_max_steps(self._trainer, self._asked_max_steps + skipped_steps)

    def is_reached(self) -> bool:
        """Whether Lightning would stop now, if no skip is still pending."""
        return self._trainer.max_steps != -1 and self._trainer.global_step >= self._trainer.max_steps

    def detach(self) -> None:
        """Gives the Trainer the number that the user requested."""
        private_trainer_api.set_max_steps(self._trainer, self._asked_max_steps)


@dataclass
class _Fit:
    """The state of one fit; the monitor keeps the totals."""

    trainer: "pl.Trainer"
    has_scale: bool
    most_skips: int | None  # in a row, until the run is ended
    observer: StockPluginObserver | None = None  # of a stock precision plugin
    limit: RealStepLimit | None = None
    attempted_before: int = 0  # steps of the runs that it resumes
    overflows: int = 0
    must_stop: bool = False


#: What a checkpoint holds.
_TOTALS = ("attempted_steps", "skipped_steps", "skip_streak")
#: From LossScaler's largest to its smallest scale, by half on each skip.
_SKIPS_OF_A_FALLING_SCALE = 48
#: A run of a few steps, a trial, says nothing about the one that follows.
_FEWEST_SKIPS = 10
_FEWEST_STEPS = 3
