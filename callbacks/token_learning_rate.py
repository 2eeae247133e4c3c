"""The learning rate as a function of tokens: warmup, cosine, cooldown, over a budget."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_mp.callbacks._common import check_counts, micro_batches_left
from lightning_mp.callbacks._window_controller import join_window_controller
from lightning_mp.ground.core.arguments import whole_tokens
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.saved_state import AMOUNT, COUNT, checked_state, holding, listed_of
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.distributed.async_sum import AsyncAllReduce
from lightning_mp.training.lr_schedule.progress import LONGEST_COSINE, ScheduleRun, initial_rates, missed_end, set_rates
from lightning_mp.training.lr_schedule.schedules import TokenSchedule, WarmupStableDecay, check_schedule
from lightning_mp.training.optimizer_step.outcome import StepOutcomeSource
from lightning_mp.training.tokens.batch_tokens import no_tokens_in
from lightning_mp.training.tokens.loss_weighting import CountFunction, Weighting


class TokenLearningRate(SettingsRepr, Callback):
    """Sets the learning rate of every optimizer step from the number of tokens trained on before it.

    .. code-block:: text

        lr = initial_lr * schedule(tokens / horizon)

    ``initial_lr`` is each parameter group's own rate in ``configure_optimizers``, so groups keep their ratios.
    ``tokens`` are the target tokens of all earlier optimizer steps, counted exactly over all micro-batches and ranks.
    Those of a skipped step do not count, so the next step uses the rate that the skipped one had; with a stock
    precision plugin this needs ``OverflowMonitor``. ``horizon`` is the budget of ``ChinchillaBudget``, or ``tokens``.
    Where skipped tokens are spent (``on_waste="report"``), the rest of the schedule is shortened accordingly, so that
    it ends with the run.

    It replaces a learning-rate scheduler; do not return one from ``configure_optimizers``. The rate is set just before
    the step, when the tokens of the previous one have arrived, so that nothing waits: ``LearningRateMonitor``, which
    reads it at the start of a batch, shows the rate of the previous step. A parameter group added during the run uses
    its rate at that time as ``initial_lr``. The gradient of a window becomes the exact mean over its tokens, as with
    ``ChinchillaBudget``.

    Args:
        schedule: a function from the fraction of the horizon to a factor: :class:`WarmupStableDecay`,
            :class:`WarmupCosine`, or any other that returns finite numbers of 0 or more.
        tokens: the horizon, a whole number or a string such as "1.5B"; None uses the budget. Beyond it the rate stays
            where the schedule ends.
        count: a function that returns the number of tokens in a batch on this rank; None counts the labels other than
            -100.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: at set-up, without a horizon, with a learning-rate scheduler, or with an
            optimizer that has no rate; with the first batch, if tokens cannot be counted in it.

    References:
        Hoffmann et al., "Training Compute-Optimal Large Language Models", 2022, appendix B and figure A1,
        https://arxiv.org/abs/2203.15556: a schedule should end with the run.

    Example:
        >>> from lightning_mp import TokenLearningRate, WarmupStableDecay
        >>> TokenLearningRate(WarmupStableDecay(warmup=0.01, decay=0.2), tokens="1.5B").tokens
        1500000000
    """

    _controller: AccumulationController  # from `setup` on

    def __init__(
        self, schedule: TokenSchedule, *, tokens: float | str | None = None, count: CountFunction | None = None
    ) -> None:
        self.schedule = check_schedule(schedule)
        self.tokens = None if tokens is None else whole_tokens(tokens, "tokens", "TokenLearningRate")
        Weighting("auto", count)  # raises on a wrong argument now, not at set-up
        self.count = count
        self._run = ScheduleRun(schedule)
        self._request = CooldownRequest()
        self._cooldown = 0.0
        self._end_tokens = 0
        self._has_warned = False  # in this fit

    # -- how far the run is --------------------------------------------------------------------------------------------

    @property
    def horizon_tokens(self) -> int | None:
        """Tokens over which the schedule runs; None before training starts."""
        return self._run.horizon_tokens

    @property
    def factor(self) -> float:
        """The schedule's factor in the last optimizer step."""
        return self._run.factor

    @property
    def is_cooling_down(self) -> bool:
        """Whether a cooldown requested by :meth:`cooldown_now` has begun."""
        return self._run.cooldown is not None

    @property
    def _trained_tokens(self) -> int:
        """Tokens of all steps but the current one, whose window has just been closed or is open."""
        return self._controller.counter.tokens_before_last_window - self._controller.counter.skipped_tokens

    @property
    def _skips_are_compensated(self) -> bool:
        budget = self._controller.budget
        return budget is not None and budget.makes_up_for_skips

    def _advance(self, trained_tokens: int) -> float:
        shorten = (self.tokens is None or self.is_cooling_down) and not self._skips_are_compensated
        return self._run.advance(trained_tokens, self._controller.counter.skipped_tokens, skips_shorten=shorten)

    # -- cooldown ------------------------------------------------------------------------------------------------------

    def cooldown_now(self, tokens: float | str | None = None, *, fraction: float | None = None) -> None:
        """Starts a cooldown from the current rate and ends the run with it, for example before a preemption.

        From the next optimizer step on the rate falls to the schedule's ``final`` (0 for a function), in the shape of
        :class:`WarmupStableDecay`, or linearly for another schedule. Its end becomes the budget of the run, including
        that of ``ChinchillaBudget``, and remains so after a resume; a budget that ends earlier is kept. To cool down
        from a checkpoint, call this before ``fit(ckpt_path=...)``.

        It may be called at any time, on one rank or on all, even from a signal handler. All ranks apply it together,
        one optimizer step later. The last call applies.

        Args:
            tokens: length of the cooldown, a whole number or a string such as "1.5B".
            fraction: the same as a fraction of the whole run, cooldown included. If neither is given, the schedule's
                own ``decay`` is used, and the run ends as if planned that way.

        Raises:
            ValueError: if both are given, or neither and the schedule has no ``decay``, or one is not valid.
        """
        if tokens is None and fraction is None and isinstance(self.schedule, WarmupStableDecay):
            fraction = self.schedule.decay
        if (tokens is None) == (fraction is None):
            raise ValueError(
                "TokenLearningRate.cooldown_now needs one of tokens and fraction, for instance fraction=0.2; only"
                f" WarmupStableDecay has a default fraction, and this schedule is {self.schedule!r}."
            )
        if tokens is not None:
            self._request.amount = whole_tokens(tokens, "tokens", "TokenLearningRate.cooldown_now")
            return
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise ValueError(
                f"TokenLearningRate.cooldown_now(fraction={fraction!r}): it must be a number between 0 and 1, the share"
                " of the whole run, cooldown included."
            )
        self._request.amount = fraction

    def _begin_cooldown(self, trainer: "pl.Trainer") -> None:
        budget, trained = self._controller.budget, self._trained_tokens
        spent = trained + (0 if self._skips_are_compensated else self._controller.counter.skipped_tokens)
        length, self._cooldown = CooldownRequest.tokens(self._cooldown, trained), 0.0
        if budget is not None:
            length = max(1, min(length, budget.tokens - spent))
        self._run.cool_down(trained, length)
        self._end_tokens = spent + length
        self._controller.end_at(self._end_tokens)
        assert self._run.cooldown is not None
        rank_zero_info(
            f"TokenLearningRate: the cooldown begins after {trained:,} tokens; the learning rate falls from"
            f" {self._run.cooldown.start:.3g} to {self._run.cooldown.final:.3g} of its peak, over {length:,} tokens;"
            " the run ends there."
        )

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Joins the accumulation controller, which counts."""
        refuse_other_trainers(self, trainer)
        if stage == "fit":
            self._controller = join_window_controller(self, trainer, pl_module, self.count, weight_by=None)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Refuses anything else that sets the rate, and subscribes to the outcomes of steps."""
        schedulers = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
        if schedulers:
            raise MisconfigurationException(
                f"TokenLearningRate and {', '.join(schedulers)} both set the learning rate. Return the optimizer alone"
                " from configure_optimizers, or remove the callback."
            )
        for optimizer in trainer.optimizers:
            if any(group.get("lr") is None for group in optimizer.param_groups):
                raise MisconfigurationException(
                    f"TokenLearningRate cannot schedule {type(optimizer).__name__}, which has a parameter group without"
                    " a learning rate. Give it an lr, or remove the callback."
                )
            # As torch's schedulers do: a distributed checkpoint is read only into what is there.
            initial_rates(optimizer)
        self._controller.before_each_step(lambda: self._set_step_rates(trainer))
        self._controller.at_first_batch(lambda batch: self._inspect(trainer, batch))

    def check_setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> None:
        """Raises the errors of a fit before it starts; called by preflight.

        Raises:
            MisconfigurationException: as in the fit.
        """
        if not check_counts(self, trainer, pl_module, batch, needs_tokens=False).has_tokens(batch):
            raise no_tokens_in(batch, "TokenLearningRate")

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Finds the horizon, continues from a checkpoint, and sets the first rate."""
        budget, counter = self._controller.budget, self._controller.counter
        horizon = self.tokens if self.tokens is not None else budget.tokens if budget is not None else None
        if horizon is None:
            raise MisconfigurationException(
                "TokenLearningRate does not know how long the run is. Give tokens=, or add a ChinchillaBudget of"
                " tokens, tokens per parameter or flops; device_hours alone do not determine a number of tokens."
            )
        self._has_warned = bool(getattr(trainer, "fast_dev_run", False))
        if trainer.global_step and not counter.windows:
            rank_zero_warn(
                f"TokenLearningRate: no callback counted the tokens of the {trainer.global_step:,} steps before; the"
                " schedule begins at 0 tokens."
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None and StepOutcomeSource.of(trainer) is None:
            rank_zero_warn(
                f"TokenLearningRate: {type(trainer.precision_plugin).__name__} does not report which steps it skips, so"
                " their tokens count as trained on. Use a precision plugin of lightning_mp, or add OverflowMonitor()."
            )
        if not counter.windows:
            self._run = ScheduleRun(self.schedule)
        self._begin(trainer, horizon)
        if budget is not None and not self.is_cooling_down:
            self._warn_about_missed_end(budget.tokens, f"the budget has {budget.tokens:,} tokens")
        self._set_rates(trainer)

    def _begin(self, trainer: "pl.Trainer", horizon: int) -> None:
        counter, old_horizon = self._controller.counter, self.horizon_tokens
        trained = counter.tokens - counter.skipped_tokens
        before = self._advance(trained) if old_horizon is not None else None
        shorten = self.tokens is None and not self._skips_are_compensated
        self._run.begin(horizon, counter.skipped_tokens, skips_shorten=shorten)
        now = self._advance(trained)
        if before is not None and abs(now - before) > 0.01 * max(now, before):
            rank_zero_warn(
                f"TokenLearningRate: the horizon was {old_horizon:,} tokens and is now {horizon:,}, so the learning"
                f" rate jumps from {before:.3g} to {now:.3g} of its peak. Keep the old horizon with"
                f" tokens={old_horizon}, or resume from an earlier checkpoint."
            )
        if self.is_cooling_down:
            self._controller.end_at(self._end_tokens)
            if self._controller.state.budget_reached:
                trainer.should_stop = True
                rank_zero_warn(
                    "TokenLearningRate: this run has ended with its cooldown. To train on, resume from a checkpoint"
                    " before the cooldown."
                )

    # -- steps ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Lets ranks agree on a cooldown where a window opens."""
        if not self._controller.is_open:
            self._cooldown = self._request.agree(pl_module.device) or self._cooldown

    def _set_step_rates(self, trainer: "pl.Trainer") -> None:
        self._advance(self._trained_tokens)
        if self._cooldown:
            self._begin_cooldown(trainer)
        self._set_rates(trainer)

    def _set_rates(self, trainer: "pl.Trainer") -> None:
        for optimizer in trainer.optimizers:
            set_rates(optimizer, self.factor)

    # -- warnings ------------------------------------------------------------------------------------------------------

    def _inspect(self, trainer: "pl.Trainer", batch: Any) -> None:
        """Refuses a batch without tokens; warns if the run will end far from the schedule's end."""
        assert self._controller.weighting is not None
        if not self._controller.weighting.has_tokens(batch):
            raise no_tokens_in(batch, "TokenLearningRate")
        if self._controller.budget is not None:
            return
        left = micro_batches_left(trainer, self._controller.state.window.planned)
        if self._controller.settings.schedule is not None:  # the length of windows changes
            left.pop("max_steps", None)
        if left:
            tokens = self._controller.counter.tokens + min(left.values()) * self._controller.input_tokens(batch)
            # Padding is in it, and batches differ: only a horizon that is far too long can be detected now.
            if self.horizon_tokens is not None and self.horizon_tokens > LONGEST_COSINE * tokens:
                self._warn_about_missed_end(tokens, f"a run of batches like the first has about {tokens:,} tokens")

    def _warn_about_missed_end(self, run_tokens: int, run: str) -> None:
        assert self.horizon_tokens is not None
        fault = missed_end(self.schedule, self.horizon_tokens, run_tokens) if run_tokens > 0 else None
        if fault is not None and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"TokenLearningRate: the horizon is {self.horizon_tokens:,} tokens and {run}: {fault}. Give the run's"
                " own length, add a ChinchillaBudget and leave tokens= out, or call cooldown_now() before the end."
            )

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Warns if the run ended long before its schedule."""
        if self._controller.budget is None:
            trained = self._controller.counter.tokens - self._controller.counter.skipped_tokens
            self._warn_about_missed_end(trained, f"the run ended after {trained:,} tokens")

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position in the schedule, and a requested cooldown; tokens are in the controller's counter."""
        return self._run.state_dict() | {
            "end_tokens": self._end_tokens,
            "cooldown_agreed": self._cooldown,
            "cooldown_request": self._request.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a checkpoint; a cooldown that was requested meanwhile stays."""
        kinds = {"end_tokens": COUNT, "cooldown_agreed": AMOUNT, "cooldown_request": holding(COOLDOWN_KINDS)}
        state = checked_state(state_dict, kinds, "TokenLearningRate")
        self._run.load_state_dict(state)
        self._end_tokens = state["end_tokens"]
        self._cooldown = state["cooldown_agreed"]
        self._request.load_state_dict(state_dict["cooldown_request"])


#: What :meth:`CooldownRequest.state_dict` holds.
COOLDOWN_KINDS = {"amount": AMOUNT, "sums": listed_of(AMOUNT, 2)}


class CooldownRequest:
    """How long a cooldown is to be: a number of tokens from 1, or below 1 a fraction of the whole run.

    Ranks add up their requests when a window opens, and know their mean when the next one does.
    """

    def __init__(self) -> None:
        self.amount = 0.0
        self._asked = AsyncAllReduce(2)

    def agree(self, device: torch.device) -> float:
        """What ranks have requested; 0 for nothing. Call it on all ranks when a window opens."""
        asked, self.amount = self.amount, 0.0
        ranks, total = self._asked.add([float(asked > 0), asked], device)
        return total / ranks if ranks else 0.0

    @staticmethod
    def tokens(amount: float, trained_tokens: int) -> int:
        """The length of a cooldown that begins after n tokens."""
        if amount >= 1:
            return round(amount)
        return max(1, round(trained_tokens * amount / (1 - amount)))

    def state_dict(self) -> dict[str, Any]:
        """Requests that ranks have not agreed on yet."""
        return {"amount": self.amount, "sums": self._asked.arrived()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state; what was requested since then stays."""
        state = checked_state(state, COOLDOWN_KINDS, "a requested cooldown")
        self.amount = self.amount or state["amount"]
        self._asked.load(state["sums"])
