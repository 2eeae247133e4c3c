"""The final loss and remaining time of a run, forecast while it trains."""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_mp.callbacks._metrics import CallbackMetrics
from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.saved_state import AMOUNT, ANY_NUMBER, COUNT, POSITIVE_COUNT, checked_state, listed_of
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.monitors.diagnostics.forecast import LossForecast, SecondsForecast, forecast_loss, forecast_seconds
from lightning_mp.training.tokens.run_counts import RunBudget, RunCounts

_MOST_POINTS = 2_000
_RECENT_POINTS = 200


@dataclass
class _Fit:
    """What one fit forecasts from; the callback keeps the points of the run."""

    budget: RunBudget
    counts: RunCounts
    recent: list[tuple[float, float]] = field(default_factory=list)  # seconds and tokens
    on_its_way: HostCopy | None = None  # the loss of the last window
    last_logged: torch.Tensor | None = None  # kept, so that its memory is not that of a later one
    has_warned: bool = False  # that there is no loss
    no_forecast: str = ""  # why


class BudgetForecast(SettingsRepr, Callback):
    """Forecasts the loss at the end of the budget, with a confidence band, and the time remaining.

    Needs a :class:`ChinchillaBudget` in tokens or FLOPs. At the end of every accumulation window the logged loss is
    recorded, one window late so that nothing waits for the device. Every ``every_n_steps`` the law of
    :func:`lightning_mp.monitors.diagnostics.forecast.forecast_loss` is fitted to the run so far (0.1 to 0.2 s on a CPU
    core), printed, and logged as ``mp/forecast_loss`` and ``mp/forecast_seconds``. The law does not model a learning
    rate that has yet to decay: such a run ends somewhat below the forecast. The points are saved in the checkpoint.

    Args:
        metric: name under which the module logs its training loss, with ``on_step=True``.
        every_n_steps: optimizer steps from one forecast to the next.
        confidence: confidence level of the band, between 0 and 1.

    Attributes:
        loss: the last forecast; None until there are enough points (20, over a factor of 3 in tokens).
        time: the last forecast of the remaining seconds.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: at the start of a fit, if there is no such budget.

    Example:
        >>> BudgetForecast("train/loss").loss is None
        True
    """

    def __init__(self, metric: str, *, every_n_steps: int = 100, confidence: float = 0.9) -> None:
        if not isinstance(confidence, int | float) or not 0 < confidence < 1:
            raise ValueError(f"BudgetForecast(confidence={confidence!r}): it must be a number between 0 and 1.")
        if not isinstance(metric, str) or not metric:
            raise ValueError(
                f"BudgetForecast(metric={metric!r}): it must be the name under which the module logs its training loss,"
                " such as 'train/loss'."
            )
        self.metric = metric
        self.every_n_steps = whole_number(every_n_steps, "every_n_steps", "BudgetForecast", unit="optimizer steps")
        self.confidence = confidence
        self.loss: LossForecast | None = None
        self.time: SecondsForecast | None = None
        self.tokens: list[float] = []
        self.losses: list[float] = []
        self._stride, self._windows = 1, 0
        self._fit: _Fit | None = None

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)
        if stage == "fit":
            CallbackMetrics.attach(trainer).add(self._metrics)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Finds the budget."""
        budget, counts = RunState.of(trainer).callback(RunBudget), RunCounts.of(trainer)
        if counts is None or budget is None or budget.budget_tokens is None:
            raise MisconfigurationException(
                "BudgetForecast forecasts the end of a ChinchillaBudget in tokens or FLOPs, and there is none. Add"
                " ChinchillaBudget(tokens=...) to the callbacks, or remove BudgetForecast."
            )
        self._fit = _Fit(budget, counts)
        Patches.of(trainer).at_end(self._end)

    def _end(self) -> None:
        self._fit = None

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records the loss of a window, and forecasts every ``every_n_steps``."""
        fit = self._fit
        assert fit is not None
        if fit.counts.is_open:
            return
        tokens = float(fit.counts.counter.tokens_before_last_window)
        if tokens:
            fit.recent = [*fit.recent[-_RECENT_POINTS:], (time.monotonic(), tokens)]
        self._read(fit, tokens)
        logged = trainer.callback_metrics.get(self.metric)
        if isinstance(logged, torch.Tensor) and not _is_same_value(logged, fit.last_logged):
            fit.last_logged, fit.on_its_way = logged, HostCopy(logged.detach().reshape(1))
        if trainer.global_step % self.every_n_steps == 0:
            if not self._windows and fit.on_its_way is None:
                self._warn_once(trainer, fit)
            self._forecast(fit)

    def _warn_once(self, trainer: "pl.Trainer", fit: _Fit) -> None:
        """Warns at the first forecast that is due, not when the budget is spent."""
        if fit.has_warned:
            return
        fit.has_warned = True
        rank_zero_warn(
            f"BudgetForecast({self.metric!r}) sees no loss: the module logs"
            f" {', '.join(sorted(trainer.callback_metrics)) or 'nothing'}. Give the name under which it logs its"
            " training loss, with on_step=True."
        )

    def _note(self, tokens: float, loss: float) -> None:
        self._windows += 1
        if self._windows % self._stride == 0:
            self.tokens.append(tokens)
            self.losses.append(loss)
        if len(self.tokens) > _MOST_POINTS:
            self.tokens, self.losses, self._stride = self.tokens[::2], self.losses[::2], 2 * self._stride

    def _read(self, fit: _Fit, tokens: float) -> None:
        """Records the loss that is on its way, as that after so many tokens."""
        copy, fit.on_its_way = fit.on_its_way, None
        if copy is not None:
            self._note(tokens, copy.read()[0])

    def _flush_pending(self) -> None:
        if self._fit is not None:
            counter = self._fit.counts.counter
            counter.flush_pending()
            self._read(self._fit, float(counter.tokens))

    def _metrics(self) -> dict[str, float]:
        if self.loss is None or self.time is None:
            return {}
        return {"mp/forecast_loss": self.loss.loss, "mp/forecast_seconds": self.time.seconds}

    def _forecast(self, fit: _Fit) -> None:
        assert fit.budget.budget_tokens is not None
        end = max(float(fit.budget.budget_tokens), *self.tokens[-1:], 1.0)
        try:
            self.loss = forecast_loss(self.tokens, self.losses, end, confidence=self.confidence)
            seconds, tokens = zip(*fit.recent, strict=True)
            self.time = forecast_seconds(seconds, tokens, end)
        except ValueError as error:  # too few points yet
            fit.no_forecast = str(error)
            return
        low, middle, high = (
            timedelta(seconds=round(each)) for each in (self.time.low, self.time.seconds, self.time.high)
        )
        rank_zero_info(f"BudgetForecast: {self.loss}. The budget ends in {middle} ({low} to {high}).")

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Records the last loss; says why there was no forecast."""
        fit = self._fit
        assert fit is not None
        self._flush_pending()
        if not self._windows and trainer.global_step > 1:
            self._warn_once(trainer, fit)
        elif self.loss is None and fit.no_forecast:
            rank_zero_info(f"BudgetForecast({self.metric!r}) made no forecast. {fit.no_forecast}")

    @override
    def state_dict(self) -> dict[str, Any]:
        """The points, that of the last window included."""
        self._flush_pending()
        return {"tokens": self.tokens, "losses": self.losses, "stride": self._stride, "windows": self._windows}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        kinds = {"tokens": listed_of(AMOUNT), "stride": POSITIVE_COUNT, "windows": COUNT}
        state = checked_state(state_dict, kinds, "BudgetForecast")
        kinds = {"losses": listed_of(ANY_NUMBER, len(state["tokens"]))}
        checked_state(state, kinds, "BudgetForecast")
        self.tokens, self.losses = list(state["tokens"]), list(state["losses"])
        self._stride, self._windows = state["stride"], state["windows"]


def _is_same_value(logged: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Whether it was not logged again: ``callback_metrics`` keeps old values, in new tensors of the same memory."""
    return before is not None and logged.data_ptr() == before.data_ptr()
