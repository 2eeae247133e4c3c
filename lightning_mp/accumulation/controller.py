"""The accumulation controller: which micro-batches make one optimizer step, what each weighs, and when the run ends."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.accumulation.accumulate_grad_batches import AccumulateGradBatches
from lightning_mp.accumulation.across_epochs import another_epoch_follows
from lightning_mp.accumulation.boundary import AccumulationBoundary, refuse_repeated_losses
from lightning_mp.accumulation.partial_state import PartialAccumulation, warn_of_a_lost_gradient
from lightning_mp.accumulation.settings import AccumulationSettings
from lightning_mp.accumulation.state import DataLayout, WindowState
from lightning_mp.core import private_api
from lightning_mp.distributed.data_ranks import data_rank, num_data_ranks
from lightning_mp.gradients import gradient_ops
from lightning_mp.optimizer_step.outcome import StepOutcome, StepOutcomeDispatcher
from lightning_mp.tokens import batch_tokens
from lightning_mp.tokens.budget import BudgetLimiter, OpenWindow, is_spent_already
from lightning_mp.tokens.counter import AccumulationTotals, TokenCounter
from lightning_mp.tokens.loss_weighting import Measure, WeightBy

__all__ = ["AccumulationController"]


class AccumulationController(Callback):
    r"""Opens and closes accumulation windows, weighs their micro-batches, and ends the run on its token budget.

    ``AccumulationScheduler`` and ``ChinchillaBudget`` tell it what they want; it puts itself first among the Trainer's
    callbacks, so their order never matters. For every micro-batch it trims, counts, opens or closes, and stops, in that
    order. The gradient of a window with micro-batches ``i`` on ranks ``r`` becomes the exact mean

    .. math:: g = \sum_{r,i} n_{r,i} \, \nabla L_{r,i} \Big/ \sum_{r,i} n_{r,i}

    where ``L`` is a micro-batch's mean loss and ``n`` its number of items. In steps:

    .. code-block:: text

        loss_i  <- loss_i / N * (n_i / n_ref)              Lightning divides by N = planned length; the rest in place
        g       <- sum_i grad(loss_i), then the mean over W ranks
        g       <- g * (W * n_ref * N / sum_{r,i} n_{r,i}) with the clip and unscale factor, or once before the step

    ``n_ref`` is the count of the run's first micro-batch on rank 0. Where all micro-batches are alike, every factor is
    exactly 1, and a full window equals Lightning's to the last bit.
    """

    def __init__(self, micro_batches: int = 1) -> None:
        self.requests = AccumulationSettings(micro_batches)
        self._spending: BudgetLimiter | None = None
        self._resolved = False
        self.counter = TokenCounter()
        self.state = WindowState()
        self._num_data_ranks = 1
        self._planned = 1
        self._position = 0
        self._is_open = False
        self._closes = False
        self._lands = False
        self._is_repeating = False
        self._measure: Measure | None = None
        self._totals: AccumulationTotals | None = None
        self._partial: PartialAccumulation | None = None
        self._holds: AccumulationBoundary | None = None

    # -- who asks for what ---------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> "AccumulationController | None":
        """The controller that is at work for this Trainer, if any."""
        return next((callback for callback in private_api.callbacks_of(trainer) if isinstance(callback, cls)), None)

    @classmethod
    def attach(cls, trainer: "pl.Trainer") -> "AccumulationController":
        """The Trainer's controller; a new one is put in front of its callbacks if there is none."""
        controller = cls.of(trainer)
        if controller is None:
            controller = cls(int(trainer.accumulate_grad_batches))
            # A new list: Lightning is walking through the old one while callbacks are set up.
            private_api.set_callbacks(trainer, [controller, *private_api.callbacks_of(trainer)])
        elif controller.requests.weighting is None:
            controller.requests.constant = int(trainer.accumulate_grad_batches)
        return controller

    @property
    def reference_items(self) -> float | None:
        """What the run's first micro-batch weighs on rank 0; None before it."""
        return self.state.reference_items

    @property
    def budget_reached(self) -> bool:
        """Whether the run has spent its budget of tokens."""
        return self.state.budget_reached

    @property
    def is_open(self) -> bool:
        """Whether the last micro-batch left its window open."""
        return self._is_open

    @property
    def planned_micro_batches(self) -> int:
        """Micro-batches of the window at hand."""
        return self._planned

    def presented_tokens(self, batch: Any) -> int:
        """Tokens that a batch like this presents over all ranks, padding included."""
        assert self.requests.weighting is not None
        return self._num_data_ranks * self.requests.weighting.size(batch, {"token"})[1]

    def end_at(self, tokens: int) -> None:
        """Ends the run on so many tokens, in place of its budget if it has one; from the next micro-batch on."""
        budget = self.requests.end_at(tokens)
        is_spent = is_spent_already(budget, self.counter, 0, None, had_ended=False)
        self.state = replace(self.state, budget_reached=is_spent)
        self._resolved = False

    def release(self, trainer: "pl.Trainer") -> None:
        """Ends a fit. The controller stays among the callbacks, so that a checkpoint written later holds its state."""
        trainer.accumulate_grad_batches = self.requests.at_rest()
        self._restore_labels()
        if self._holds is not None:
            self._holds.detach()
        self.requests.schedule = self.requests.weighting = self.requests.budget = self.requests.total_steps = None
        self._spending = self._holds = None
        self._resolved = self._is_open = False

    # -- one micro-batch -----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Refuses an optimizer that evaluates the loss several times in one step.

        Raises:
            MisconfigurationException: with LBFGS.
        """
        refuse_repeated_losses(trainer)
        if self.requests.weighting is not None:
            self._holds = AccumulationBoundary(
                trainer,
                pl_module,
                self.requests.sync,
                lambda: self._is_open,
                self._close_early,
                checkpoints_wait=not self.requests.saves_partial_gradients,
                straddles_epochs=self.requests.straddles_epochs,
            )

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Goes on inside a window that was saved open; ends a resumed run at once if its budget is spent."""
        if self._holds is None:
            return
        self._holds.start()
        before, layout = self.state.layout, DataLayout.of(trainer)
        growth = layout.ratio_to(before) if before not in (None, layout) else None
        self.state = self.state.in_layout(layout)
        partial, self._partial = self._partial, None
        budget, tokens = self.requests.budget, round(partial.totals[1]) if partial is not None else 0
        if budget is not None:
            is_spent = is_spent_already(budget, self.counter, tokens, growth, had_ended=self.state.budget_reached)
            self.state = replace(self.state, budget_reached=is_spent)
            trainer.should_stop = trainer.should_stop or is_spent
        if growth is not None:
            self.counter.forget_sizes()
        if partial is not None:
            if growth is not None and self.requests.schedule is not None and self.requests.schedule.has_target:
                partial = partial.resized(growth)
            partial.restore_gradients(trainer, pl_module)
            self._planned, self._position, self._is_open = partial.planned, partial.position, True
            self._totals = partial.totals_of_rank(is_global_zero=trainer.is_global_zero, same_layout=growth is None)

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Trims and counts the micro-batch and decides whether it opens or closes a window."""
        if self.requests.weighting is None:
            return
        self._restore_labels()
        self._resolve(trainer, pl_module, batch)
        opens = not self._is_open
        if opens:
            schedule, constant = self.requests.schedule, self.requests.constant
            self._planned = schedule.micro_batches(self.state.progress(trainer, self.counter)) if schedule else constant
            self._position = 0
            self._totals = AccumulationTotals()
        self._is_repeating = trainer.current_epoch > 0
        last_of_epoch = trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches
        self._lands = self._begin(trainer, pl_module.device, batch)
        last_of_all = last_of_epoch and not (self.requests.straddles_epochs and another_epoch_follows(trainer))
        self._closes = self._lands or last_of_all or self._position + 1 >= self._planned
        total = self.requests.total_steps
        trainer.accumulate_grad_batches = AccumulateGradBatches(
            self._planned, batch_idx=batch_idx, opens=opens, closes=self._closes, total=total
        )
        if self._holds is not None:
            self._holds.begin(closes=self._closes, last_of_epoch=last_of_epoch)

    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """Weighs the loss. A micro-batch without a loss never comes here and is not counted."""
        if self.requests.weighting is None:
            return
        assert self._measure is not None
        assert self._totals is not None
        measure = self._measure
        reference = self.state.reference_items
        if reference is None:
            # Once per run, so the wait does not matter.
            reference = float(trainer.strategy.broadcast(max(int(measure.items), 1)))
            self.state = replace(self.state, reference_items=reference)
        divisor = measure.items if measure.divisor is None else measure.divisor
        if isinstance(divisor, Tensor):
            loss.mul_((divisor / reference).to(loss.device))
        elif divisor != reference:
            loss.mul_(divisor / reference)
        self._totals.add(
            measure.items, measure.tokens, measure.presented_tokens, measure.samples, measure.nonpad_tokens
        )

    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        """With a stock precision plugin: normalises the gradient here. Ours has done it already."""
        totals = self.window_totals(pl_module.device)
        if totals is None:
            return
        factor = self.close_window(gradient_ops.sum_over_ranks_(totals))
        if factor is not None:
            parameters = gradient_ops.parameters_with_gradient(optimizer)
            gradient_ops.multiply_([gradient_ops.local_shard(p.grad) for p in parameters if p.grad is not None], factor)

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Books the tokens of a skipped step. Without our plugins and without OverflowMonitor nobody tells of one."""
        if outcome.skipped:
            self.counter.skip_last_window()

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves on to the next micro-batch, or ends the run."""
        if self.requests.weighting is None:
            return
        self._position += 1
        self._is_open = not self._closes
        if self._holds is not None:
            self._holds.end()
        if self._lands and self._is_spent(trainer):
            self.state = replace(self.state, budget_reached=True)
            trainer.should_stop = True

    def _close_early(self) -> None:
        self._is_open, self._totals = False, None

    def _is_spent(self, trainer: "pl.Trainer") -> bool:
        """Whether the budget is spent for good: if skipped tokens are to be made up for, the last step must count."""
        if self.requests.budget is None or not self.requests.budget.makes_up_for_skips:
            return True
        dispatcher = StepOutcomeDispatcher.of(trainer)
        if dispatcher is not None:
            dispatcher.settle()
        before = self.counter.skipped_tokens
        self.counter.settle()
        return self.counter.skipped_tokens == before

    def needs_gradients(self, step_index: int) -> bool:
        """Our precision plugins need not make true gradients for the controller: they normalise themselves."""
        return False

    @property
    def weight_by(self) -> WeightBy | None:
        """What micro-batches weigh; None where nobody weighs them."""
        return self.requests.weighting.weight_by if self.requests.weighting is not None else None

    @property
    def measure(self) -> Measure | None:
        """The micro-batch at hand; None where nobody weighs."""
        return self._measure if self.requests.weighting is not None else None

    # -- the end of a window, for precision plugins --------------------------------------------------------------------

    def window_totals(self, device: torch.device) -> Tensor | None:
        """This rank's totals of the window; None if there is nothing.

        They are :meth:`lightning_mp.tokens.counter.AccumulationTotals.tensor`; the caller adds them over all ranks and
        hands them to :meth:`close_window`.
        """
        return self._totals.tensor(device) if self._totals is not None and self._totals.micro_batches else None

    def close_window(self, totals: Tensor) -> Tensor | None:
        """Books a window.

        Args:
            totals: :meth:`window_totals` summed over all ranks.

        Returns:
            The factor that makes the gradient the exact mean, a scalar tensor; None if it is known to be 1.
        """
        local, self._totals = self._totals, None
        assert local is not None
        assert self.state.reference_items is not None
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        # Ranks that share their data (tensor parallel) have counted it once each.
        totals_once = totals / (num_ranks // self._num_data_ranks)
        self.counter.close_window(totals_once, local.micro_batches, repeated=self._is_repeating)
        expected_items = num_ranks * self.state.reference_items * self._planned
        if num_ranks == 1 and local.host_items == expected_items:
            return None
        return expected_items / totals[0].clamp(min=1.0)

    def _begin(self, trainer: "pl.Trainer", device: torch.device, batch: Any) -> bool:
        """Measures the micro-batch, trims it if the budget ends in it, and returns whether it does."""
        assert self.requests.weighting is not None
        assert self._totals is not None
        self._measure = self.requests.weighting.measure(batch)
        if self._spending is None:
            return False
        certain_tokens = self._measure.presented_tokens if self._num_data_ranks == 1 else 0
        if self._spending.is_far_from_the_end(self._position, certain_tokens):
            return False
        window = OpenWindow(self._totals, self._position, self._measure, data_rank(trainer), device)
        lands, self._measure = self._spending.begin_micro_batch(window, batch)
        return lands

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def _restore_labels(self) -> None:
        if self._spending is not None:
            self._spending.restore_labels()

    def _resolve(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> None:
        if self._resolved:
            return
        assert self.requests.weighting is not None
        if self.requests.schedule is not None and "sample" in self.requests.schedule.units:
            self.requests.weighting.counts_samples = True
        shifted = bool(trainer.strategy.broadcast(batch_tokens.shifts_labels_inside(pl_module, batch)))
        needs_tokens = self.requests.budget is not None or (
            self.requests.schedule is not None and "token" in self.requests.schedule.units
        )
        self.requests.weighting.resolve(batch, shifted=shifted, budgeted=needs_tokens)
        if self.requests.budget is not None:
            self._spending = BudgetLimiter(self.requests.budget, self.counter, self.requests.weighting)
        self._num_data_ranks = num_data_ranks(trainer)
        schedule = self.requests.schedule
        if schedule is not None and self.state.lacks_sizes(schedule.units):
            size = trainer.strategy.broadcast(self.requests.weighting.size(batch, schedule.units))
            self.state = self.state.measured(*(self._num_data_ranks * count for count in size))
        self._resolved = True

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Settles the counter."""
        self._restore_labels()
        self.counter.settle()

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Gives the Trainer its own setting back."""
        self.release(trainer)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Gives the Trainer its own setting back."""
        self.release(trainer)

    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Saves the gradient of an open window if asked to, else warns that it would be lost."""
        if not self._is_open or self._totals is None:
            return
        if self.requests.saves_partial_gradients:
            totals = self._totals.tensor(pl_module.device)
            PartialAccumulation.of(trainer, pl_module, self._planned, self._position, totals).save(checkpoint)
            return
        warn_of_a_lost_gradient(self._planned, self._position)

    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Remembers the gradient of a window that was saved open."""
        self._partial = PartialAccumulation.load(checkpoint, trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The counter and the run's own numbers."""
        if self._holds is not None:
            self._holds.settle_outcome()
        return {"counter": self.counter.state_dict()} | self.state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint.

        Raises:
            ValueError: if an entry is missing or cannot be; nothing is changed then.
        """
        state = WindowState.read(state_dict)
        self.counter.load_state_dict(state_dict.get("counter", {}))
        self.state = state
