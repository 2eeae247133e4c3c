"""The accumulation controller: which micro-batches make one optimizer step, what each weighs, and when the run ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.ranks import sum_over_ranks_, world_size
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.saved_state import MAPPING, POSITIVE, checked_state, or_none
from lightning_mp.ground.core.trainer_ranks import data_rank, is_pipelined, num_data_ranks
from lightning_mp.training.accumulation import windows
from lightning_mp.training.accumulation.accumulate_grad_batches import AccumulateGradBatches
from lightning_mp.training.accumulation.boundary import AccumulationBoundary, another_epoch_follows, repeated_losses
from lightning_mp.training.accumulation.lost_gradient import lost_gradient_message
from lightning_mp.training.accumulation.partial_state import PartialAccumulation
from lightning_mp.training.accumulation.schedule import TargetBatch
from lightning_mp.training.accumulation.settings import AccumulationSettings, refuse_counts_of_unseen_batches
from lightning_mp.training.accumulation.windows import AccumulationState, DataLayout, MicroBatch, Part
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.sync import reduce_first_backward
from lightning_mp.training.optimizer_step.gradient_observers import overrides
from lightning_mp.training.optimizer_step.outcome import StepOutcome, StepOutcomeSource
from lightning_mp.training.optimizer_step.scheduler_frequency import LearningRateFrequency
from lightning_mp.training.optimizers.evaluations import requires_closure
from lightning_mp.training.tokens import batch_tokens
from lightning_mp.training.tokens.budget import BudgetLimiter, TokenBudget, is_spent_already
from lightning_mp.training.tokens.counter import TokenCounter
from lightning_mp.training.tokens.loss_weighting import Measure, WeightBy, Weighting
from lightning_mp.training.tokens.ragged_batches import RaggedBatches
from lightning_mp.training.tokens.run_counts import RunCounts

if TYPE_CHECKING:
    from lightning_mp.training.accumulation.weighing import MicroBatchWeighing
    from lightning_mp.training.tokens.loss_weights import LossWeights


@dataclass
class _Fit:
    """What one fit has settled, and what is under way in it."""

    weighting: Weighting | None = None  # from the first batch on, if micro-batches are counted or weighed
    ragged: RaggedBatches | None = None  # the same, if rows may be samples
    schedule_counts: bool = False  # the same, if the schedule is in samples or tokens
    limiter: BudgetLimiter | None = None  # from the first batch of a run on a budget
    weighing: "MicroBatchWeighing | None" = None  # from the start of the fit on, if micro-batches are weighed
    run: RunState | None = None  # while it lasts
    boundary: AccumulationBoundary | None = None
    before_steps: list[Callable[[], object]] = field(default_factory=list)
    at_first_batch: list[Callable[[Any], None]] = field(default_factory=list)
    takes_iterator: bool = False  # `training_step(dataloader_iter)` fetches batches, which hooks do not see before
    step_has_window: bool = False  # the last step had a window; a step without any loss has none


class AccumulationController(RunCounts):
    r"""Opens and closes accumulation windows, weighs their micro-batches, and ends the run on its token budget.

    ``AccumulationScheduler`` and ``ChinchillaBudget`` give it their settings; it puts itself first among the Trainer's
    callbacks, so their order never matters. For every micro-batch it trims, counts, opens or closes, and stops, in that
    order. The gradient of a window with micro-batches ``i`` on ranks ``r`` becomes the exact mean

    .. math:: g = \sum_{r,i} n_{r,i} \, \nabla L_{r,i} \Big/ \sum_{r,i} n_{r,i}

    where ``L`` is a micro-batch's mean loss and ``n`` its number of items. In steps:

    .. code-block:: text

        loss_i  <- loss_i / N * (n_i / n_ref)              Lightning divides by N = planned length; the rest in place
        g       <- sum_i grad(loss_i), then the mean over W ranks
        g       <- g * (W * n_ref * N / sum_{r,i} n_{r,i}) with the clip and unscale factor, or once before the step

    ``n_ref`` is the count of the run's first micro-batch on rank 0. If all micro-batches have the same count, or a step
    is one micro-batch, every factor is exactly 1, and a full window equals Lightning's to the last bit.

    The pure functions of ``lightning_mp.training.accumulation.windows`` decide. The controller calls them from
    Lightning's hooks and keeps what they return. Others read it, and call its methods; they never write to it.
    """

    #: Our precision plugins need not make true gradients for the controller: they normalise themselves.
    needs_gradients = False

    def __init__(self, micro_batches: int = 1) -> None:
        self.settings = AccumulationSettings(micro_batches)
        self.state = AccumulationState()
        self.counter = TokenCounter()
        self.losses = _nothing_known()
        self._fit = _Fit()
        self._has_fitted = False
        # Of a checkpoint, until training starts.
        self._saved_window: PartialAccumulation | None = None

    # -- what callbacks need -------------------------------------------------------------------------------------------

    @classmethod
    def attach(cls, trainer: "pl.Trainer") -> "AccumulationController":
        """The Trainer's controller; a new one is put in front of its callbacks if there is none."""
        controller = cls.of(trainer)
        if controller is None:
            controller = cls(int(trainer.accumulate_grad_batches))
            RunState.of(trainer).place_callback(controller)
        elif controller.settings.weighting is None:
            controller.settings.constant = int(trainer.accumulate_grad_batches)
        if controller._has_fitted:  # another fit: what it knows of losses it learns anew, and says so
            controller._has_fitted, controller.losses = False, _nothing_known()
            controller.settings.follows_trainer = False
            controller.state = replace(controller.state, reference_items=None)
        # After all callbacks' hooks: one of them may write a checkpoint of an open window on an exception.
        Patches.of(trainer).at_end(lambda: controller.release(trainer))
        return controller

    @classmethod
    def weigh_by_loss(cls, trainer: "pl.Trainer") -> "AccumulationController":
        """For precision plugins: weights micro-batches by what their loss averages over, in Lightning's own windows.

        If callbacks have requested windows or weights, these apply instead.
        """
        controller = cls.of(trainer)
        if controller is None or controller.settings.weighting is None:
            controller = cls.attach(trainer)
            # A pipeline's loss is on its last stage only: there the batch says what the loss averages over.
            controller.settings.weighting = Weighting("auto" if is_pipelined(trainer) else None)
            controller.settings.follows_trainer = True
        controller.settings.weigh_losses()
        return controller

    # -- what others read ----------------------------------------------------------------------------------------------

    @property
    def budget(self) -> TokenBudget | None:
        """Where the run ends as planned now; None without a budget."""
        return self.state.budget(self.settings.budget)

    @property
    @override
    def is_open(self) -> bool:
        """Whether the last micro-batch left its window open."""
        return self.state.window.is_open

    @property
    @override
    def weighting(self) -> Weighting | None:
        """How micro-batches are measured, settled by the first batch; None where they are not weighted."""
        return self._fit.weighting or self.settings.weighting

    @property
    @override
    def weight_by(self) -> WeightBy | None:
        """How micro-batches are weighted; None where Lightning's division gives them equal weights."""
        weighing = self._fit.weighing
        if weighing is None or weighing.source is None or weighing.is_equal:
            return None
        return "token" if weighing.source == "loss" else self.weighting.weight_by if self.weighting else None

    @property
    @override
    def measure(self) -> Measure | None:
        """The current micro-batch; None where micro-batches are not weighted."""
        return self.state.micro_batch.measure if self._fit.weighing is not None else None

    @property
    @override
    def loss_factor(self) -> float | Tensor:
        """Factor of the current micro-batch's loss, in addition to Lightning's division."""
        return self.state.micro_batch.factor

    def input_tokens(self, batch: Any) -> int:
        """Tokens of a batch like this over all ranks: with padding, or those of ``count``."""
        assert self.weighting is not None
        return self._num_data_ranks * self.weighting.size(batch, {"token"})[1]

    def weigh_equally(self, why: str) -> None:
        """Gives micro-batches equal weights for the rest of the fit, as in Lightning; call it on all ranks."""
        if self._fit.weighing is not None:
            self._fit.weighing.weigh_equally(why)

    def before_each_step(self, function: Callable[[], object]) -> None:
        """Calls ``function`` in this fit before each optimizer step, also one that is skipped.

        The step's window is closed and counted by then. It may be called more than once for a step.
        """
        self._fit.before_steps.append(function)

    @override
    def at_first_batch(self, function: Callable[[Any], None]) -> None:
        """Calls ``function`` in this fit with its first micro-batch, once that is measured and its window is open."""
        self._fit.at_first_batch.append(function)

    # -- a fit ---------------------------------------------------------------------------------------------------------

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Refuses an optimizer that evaluates the loss several times in one step; says where weights must be equal."""
        from lightning_mp.training.accumulation.missing_losses import replace_missing_losses
        from lightning_mp.training.accumulation.weighing import MicroBatchWeighing

        settings, fit = self.settings, self._fit
        self.state = replace(self.state, end_tokens=None)
        fit.takes_iterator = is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True)
        if settings.weighting is None:
            return
        again = [optimizer for optimizer in trainer.optimizers if requires_closure(optimizer)]
        if again and not settings.follows_trainer:
            raise repeated_losses(again)
        if fit.takes_iterator:
            refuse_counts_of_unseen_batches(settings)
        fit.weighing = MicroBatchWeighing(trainer, settings, self.losses)
        reduce_first_backward(trainer, fit.weighing.forget_gradients)
        replace_missing_losses(trainer, lambda: self.begin_part(windows.NOTHING))
        if overrides(pl_module, pl.LightningModule, "backward"):
            self.weigh_equally(f"{type(pl_module).__name__}.backward may write gradients of other losses")
        elif again:
            self.weigh_equally(f"{type(again[0]).__name__} evaluates the loss again inside of a step")
        if not settings.follows_trainer:
            fit.run = RunState.of(trainer)
            fit.boundary = AccumulationBoundary(trainer, pl_module, settings, lambda: self.is_open, self._close_early)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Continues a window that was saved open; ends a resumed run immediately if its budget is spent."""
        before, layout = self.state.layout, DataLayout.of(trainer)
        self.state = self.state.in_layout(layout)
        if self._fit.boundary is None:
            return
        if StepOutcomeSource.of(trainer) is None:
            # Skipped steps are not known. Before each step: a fit may have been given other schedulers since the last.
            self.before_each_step(LearningRateFrequency(trainer, lambda: 0).attach().attach)
        growth = layout.ratio_to(before) if before not in (None, layout) else None
        saved, self._saved_window = self._saved_window, None
        budget, tokens = self.settings.budget, round(saved.totals[1]) if saved is not None else 0
        if budget is not None:
            is_spent = is_spent_already(budget, self.counter, tokens, growth, had_ended=self.state.budget_reached)
            self.state = replace(self.state, budget_reached=is_spent)
            trainer.should_stop = trainer.should_stop or is_spent
        if growth is not None:
            self.counter.forget_sizes()
        if saved is not None:
            if growth is not None and isinstance(self.settings.schedule, TargetBatch):
                saved = saved.resized(growth)
            saved.restore_gradients(trainer, pl_module)
            totals = saved.totals_of_rank(is_global_zero=trainer.is_global_zero, same_layout=growth is None)
            self.state = windows.resume_window(self.state, saved.planned, saved.position, totals)

    def end_at(self, tokens: int) -> None:
        """Ends this fit on n tokens, in place of its budget if it has one; from the next micro-batch on."""
        self.state = replace(self.state, end_tokens=tokens)
        assert self.budget is not None
        is_spent = is_spent_already(self.budget, self.counter, 0, None, had_ended=False)
        self.state = replace(self.state, budget_reached=is_spent)

    # -- one micro-batch -----------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Trims and counts the micro-batch and decides whether it opens or closes a window."""
        settings, fit = self.settings, self._fit
        if fit.weighing is None:
            return
        if fit.limiter is not None:
            fit.limiter.restore_labels()
        index = trainer.fit_loop.epoch_loop.batch_idx if fit.takes_iterator else batch_idx
        if settings.follows_trainer and (
            index % int(trainer.accumulate_grad_batches) == 0 or self.state.window.totals is None
        ):
            self._close_early()
        is_first = fit.weighting is None and not fit.takes_iterator
        if is_first and not (settings.follows_trainer and fit.weighing.is_only_counted):
            self._inspect_first_batch(trainer, pl_module, batch)
        opens, ends_run = not self.state.window.is_open, False
        if fit.weighting is None:
            measure = Measure(divisor=batch_tokens.declared_divisor(batch))
        else:
            measure = fit.weighting.measure(batch)
            if fit.ragged is not None and fit.weighting.takes_rows(batch):
                fit.ragged.look(batch)
            budget = None if settings.budget is None and self.state.end_tokens is None else self.budget
            if budget is not None:
                if fit.limiter is None:
                    ranks = data_rank(trainer), num_data_ranks(trainer)
                    fit.limiter = BudgetLimiter(self.counter, fit.weighting, *ranks, pl_module.device)
                totals = self.state.window.totals if self.state.window.is_open else None
                measure, ends_run = fit.limiter.limit(budget, totals, self.state.window.position, measure, batch)
        ends_epoch = trainer.is_last_batch or index + 1 >= trainer.num_training_batches
        closes = ends_epoch and not (settings.carries_over and another_epoch_follows(trainer))
        micro_batch = MicroBatch(measure, ends_run, closes, is_repeated=trainer.current_epoch > 0)
        if opens:
            planned = int(trainer.accumulate_grad_batches) if settings.follows_trainer else settings.constant
            if settings.schedule is not None:
                counter = self.counter if fit.schedule_counts else None
                progress = self.state.progress(trainer.current_epoch, trainer.global_step, counter)
                planned = settings.schedule.micro_batches(progress)
            self.state = windows.open_window(self.state, planned)
            if is_first and isinstance(settings.schedule, TargetBatch):
                self._report_target(settings.schedule.counted)
        self.state = windows.begin_micro_batch(self.state, micro_batch)
        fit.weighing.may_meet = True
        self._set_lightnings_window(trainer, batch_idx, opens=opens, ends_epoch=ends_epoch)
        if is_first:
            for function in fit.at_first_batch:
                function(batch)

    def _set_lightnings_window(self, trainer: "pl.Trainer", batch_idx: int, *, opens: bool, ends_epoch: bool) -> None:
        """Has Lightning clear gradients where the window opens, and step where it closes."""
        settings, fit, window = self.settings, self._fit, self.state.window
        num_ready = trainer.fit_loop.epoch_loop.batch_idx + 1 if fit.takes_iterator else batch_idx + 1
        planned, closes = window.planned, window.closes
        if settings.follows_trainer:
            if not fit.takes_iterator:
                return
            planned = int(trainer.accumulate_grad_batches)
            closes = num_ready % planned == 0
        elif fit.boundary is not None:
            fit.boundary.begin(closes=closes, last_of_epoch=ends_epoch)
        # In a `training_step(dataloader_iter)` Lightning 2.6 finds out with the index of the previous batch whether the
        # window opens, and so clears the gradient of its first micro-batch; with `num_ready` whether it closes.
        remainders = {num_ready: int(not closes), batch_idx: int(not opens)}
        trainer.accumulate_grad_batches = AccumulateGradBatches(planned, remainders, settings.total_steps)

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """Weighs the loss. A micro-batch without a loss never comes here and is not counted."""
        weighing = self._fit.weighing
        if weighing is None:
            return
        if self.state.window.totals is None:
            if self.settings.follows_trainer:  # an optimizer's own evaluation, or a module's
                return
            raise repeated_losses(trainer.optimizers)
        if weighing.source is not None and not windows.is_single_micro_batch_step(self.state):
            self.state = weighing.weigh(self.state, loss)
            factor = self.state.micro_batch.factor
            share = int(trainer.accumulate_grad_batches) / self.state.window.planned
            factor = factor if share == 1.0 else factor * share  # the number was set inside a window
            if isinstance(factor, Tensor):
                loss.mul_(factor.to(loss.device))
            elif factor != 1.0:
                loss.mul_(factor)
        self.state = windows.add_micro_batch(self.state)

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        """With a stock precision plugin: normalises the gradient here. Ours has done it already."""
        totals = self.window_totals(pl_module.device)
        factor = self.close_window(sum_over_ranks_(totals) if totals is not None else None)
        if factor is not None:
            parameters = gradient_ops.parameters_with_gradient(optimizer)
            gradient_ops.multiply_([gradient_ops.local_shard(p.grad) for p in parameters if p.grad is not None], factor)

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Records the tokens of a skipped step, which only plugins of this package and OverflowMonitor report."""
        has_window, self._fit.step_has_window = self._fit.step_has_window, False
        if has_window and not outcome.stepped:
            self.counter.skip_last_window()

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves on to the next micro-batch, or ends the run."""
        if self._fit.weighing is None:
            return
        self.state = windows.end_micro_batch(self.state)
        if self.settings.follows_trainer:  # Lightning decides where a window ends
            window = self.state.window
            self.state = replace(self.state, window=replace(window, is_open=window.totals is not None))
            if isinstance(trainer.accumulate_grad_batches, AccumulateGradBatches):
                trainer.accumulate_grad_batches = int(trainer.accumulate_grad_batches)
        if self._fit.weighing.gradient_versions is not None and self.state.window.is_open:
            self._fit.weighing.watch_gradients(pl_module.parameters())
        if self._fit.boundary is not None and self._fit.boundary.acts_at_ends:
            self._fit.boundary.end()
        if self.state.micro_batch.ends_run and self._is_spent(trainer):
            self.state = replace(self.state, budget_reached=True)
            trainer.should_stop = True

    # -- the end of a fit ----------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Settles the counter."""
        self.counter.flush_pending()
        if self._fit.weighing is not None:
            self.state = self._fit.weighing.settle_window(self.state)

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Gives the Trainer its own setting back, by which Lightning decides what to log; the window stays open."""
        if not self.settings.follows_trainer:
            trainer.accumulate_grad_batches = self.settings.idle_value()

    def release(self, trainer: "pl.Trainer") -> None:
        """Ends a fit. The controller stays among the callbacks, so that a checkpoint written later holds its state."""
        if not self.settings.follows_trainer:
            trainer.accumulate_grad_batches = self.settings.idle_value()
        if self._fit.limiter is not None:
            self._fit.limiter.restore_labels()
        self.settings = AccumulationSettings(self.settings.constant, follows_trainer=self.settings.follows_trainer)
        self._fit, self._has_fitted = _Fit(), True
        self.state = replace(windows.close_early(self.state), micro_batch=MicroBatch())

    # -- a micro-batch that runs in parts ------------------------------------------------------------------------------

    def begin_part(self, part: Part) -> None:
        """A part of the current micro-batch begins in its place.

        Its loss goes through :meth:`on_before_backward` as that of a micro-batch does, and weighs its own items, or its
        share where weights are equal. Its tokens are counted once, with those of the whole.
        """
        self.state = windows.begin_part(self.state, part)

    def parts_of(self, batches: Sequence[Any], samples: Sequence[int], *, losses_add_up: bool) -> list[Part]:
        """What is known of the parts of the current micro-batch before they run.

        Args:
            batches: the parts.
            samples: how many each of them has.
            losses_add_up: the loss of the whole is the sum of theirs, not their mean.
        """
        whole = self.state.micro_batch.measure
        counted: list[float | Tensor] = [whole.items * number / sum(samples) for number in samples]
        if self._by_hand is not None:
            own = [self._by_hand.measure(batch).items for batch in batches]
            # A function that does not count samples or tokens counts no part either.
            if any(isinstance(items, Tensor) for items in (*own, whole.items)) or sum(own) == whole.items:
                counted = own
        if losses_add_up:
            counted = [whole.items] * len(batches)
        return [
            Part(items, batch_tokens.declared_divisor(batch), number / sum(samples), losses_add_up)
            for items, batch, number in zip(counted, batches, samples, strict=True)
        ]

    def end_parts(self, whole: MicroBatch) -> None:
        """All parts of a micro-batch are over: what is known of it is that of the whole again."""
        micro_batch = self.state.micro_batch
        micro_batch = replace(micro_batch, measure=whole.measure, factor=micro_batch.parts_factor)
        self.state = replace(self.state, micro_batch=micro_batch)

    def return_to(self, state: AccumulationState, *, carries_totals: bool = False) -> None:
        """A micro-batch is done again from where it began; what is known of losses stays known.

        Args:
            state: when it began.
            carries_totals: earlier micro-batches of its window were done again, so the window has their new totals.
        """
        window = replace(state.window, totals=self.state.window.totals) if carries_totals else state.window
        self.state = replace(state, window=window, reference_items=self.state.reference_items)
        if self._fit.weighing is not None:
            self._fit.weighing.forget_gradients()

    @property
    def part_weight(self) -> float | Tensor:
        """What the part weighs in the mean of its micro-batch, relative to the others; known in its backward."""
        micro_batch, part = self.state.micro_batch, self.state.micro_batch.part
        return 1.0 if part is windows.WHOLE else part.share if part.losses_add_up else micro_batch.factor

    def count_of_part(self, part: Any, loss: Tensor) -> float | None:
        """What a part would weigh in the mean of its micro-batch; None if its samples. Waits for the device."""
        weighing = self._fit.weighing
        if self._by_hand is not None:
            return float(self._by_hand.measure(part).items)
        return weighing.count(loss) if weighing is not None and weighing.source == "loss" else None

    @property
    def _by_hand(self) -> Weighting | None:
        """What counts the items of a batch, if losses do not."""
        is_by_hand = self._fit.weighing is not None and self._fit.weighing.source == "batch"
        return self._fit.weighting if is_by_hand and self.weight_by in ("token", "sample") else None

    # -- the end of a window, for precision plugins --------------------------------------------------------------------

    def window_totals(self, device: torch.device) -> Tensor | None:
        """This rank's totals of the window; None if there is nothing.

        They are :meth:`lightning_mp.training.tokens.counter.AccumulationTotals.tensor`; the caller adds them over all
        ranks and hands them to :meth:`close_window`.
        """
        totals = self.state.window.totals
        if totals is None or (totals.micro_batches == 0 and world_size() == 1):
            return None
        return totals.tensor(device)

    def close_window(self, totals: Tensor | None) -> Tensor | None:
        """Books a window, if there is one, before an optimizer steps or skips its step."""
        factor = None
        local = self.state.window.totals
        if totals is not None:
            assert local is not None
            self._fit.step_has_window = True
            num_ranks, weighing = world_size(), self._fit.weighing
            # Ranks that share their data (tensor parallel) have counted it once each.
            totals_once = totals / (num_ranks // self._num_data_ranks)
            if weighing is not None:
                factor = weighing.normalisation(self.state, totals, num_ranks)
            self.state = windows.take_totals(self.state)
            is_repeated = self.state.micro_batch.is_repeated
            copy = self.counter.close_window(totals_once, local.micro_batches, repeated=is_repeated)
            if weighing is not None:
                self.state = weighing.close_window(self.state, copy)
        for function in self._fit.before_steps:
            function()
        return factor

    def _close_early(self) -> None:
        self.state = windows.close_early(self.state)

    # -- what a micro-batch needs of its Trainer -----------------------------------------------------------------------

    @property
    def _num_data_ranks(self) -> int:
        return self.state.layout.data_ranks if self.state.layout is not None else 1

    def _inspect_first_batch(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> None:
        """Settles how all micro-batches are measured."""
        settings, fit = self.settings, self._fit
        assert settings.weighting is not None
        fit.weighting = weighting = settings.weighting.resolved(
            batch,
            by_loss=fit.weighing is not None and fit.weighing.source == "loss",
            shifted=bool(trainer.strategy.broadcast(batch_tokens.shifts_labels_inside(pl_module, batch))),
            tokens_for=settings.tokens_for,
            needs_samples="sample" in settings.units,
        )
        if weighting.counts_samples or weighting.input_count is not None:
            fit.ragged = RaggedBatches(
                "accumulation weighs micro-batches, or counts samples, by them.",
                "If the loss is a mean over something else, pass count=, a function from a batch to the number that its"
                " loss is a mean over, or put a tensor with one row per sample first.",
            )
        fit.schedule_counts = bool(settings.units & {"sample", "token"})
        if self.state.lacks_sizes(settings.units):
            samples, tokens = trainer.strategy.broadcast(weighting.size(batch, settings.units))
            ranks = self._num_data_ranks
            self.state = replace(self.state, micro_batch_samples=ranks * samples, micro_batch_tokens=ranks * tokens)

    def _report_target(self, counted: str) -> None:
        size = self.state.micro_batch_tokens if counted == "token" else self.state.micro_batch_samples
        rank_zero_info(
            f"AccumulationScheduler: {self.state.window.planned} micro-batches per step, calculated from the first one"
            f" of the run, which has {size:,} {counted}s over all ranks."
        )

    def _is_spent(self, trainer: "pl.Trainer") -> bool:
        """Whether the budget is spent for good: if skipped tokens are to be made up for, the last step must count."""
        if self.budget is None or not self.budget.makes_up_for_skips:
            return True
        RunState.of(trainer).flush()
        self.counter.flush_pending()
        return not self.counter.last_window_was_skipped

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """The token counter and how far the run is; nothing where a plugin alone has it weigh, which saves that."""
        if self.settings.follows_trainer:
            return {}
        if self._fit.run is not None:
            self._fit.run.flush()
        return {"counter": self.counter.state_dict()} | self.state.state_dict() | self.weights_state()

    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Saves the gradient of an open window if asked to, else warns that it would be lost."""
        window = self.state.window
        if self.lost_window is not None:
            rank_zero_warn(lost_gradient_message(*self.lost_window))
        elif window.is_open and window.totals is not None and not self.settings.follows_trainer:
            checkpoint.update(PartialAccumulation.of(trainer, pl_module, window))

    @property
    def lost_window(self) -> tuple[int, int] | None:
        """How many micro-batches are planned and done, of a window whose gradient a checkpoint of now would lose."""
        window = self.state.window
        if not window.is_open or window.totals is None or self.settings.follows_trainer:
            return None
        # A micro-batch that is interrupted after its loss is done again, and may have added to the gradient already.
        is_kept = self.settings.saves_partial_gradients and not self.state.micro_batch.is_counted
        return None if is_kept else (window.planned, window.position)

    def weights_state(self, *, settle: bool = True) -> dict[str, Any]:
        """What is known of the run's losses, for a checkpoint; to ``settle`` the last window call it on all ranks."""
        if settle and self._fit.weighing is not None:
            self.state = self._fit.weighing.settle_window(self.state)
        return {"reference_items": self.state.reference_items, "losses": self.losses.state_dict()}

    def continue_from(self, saved: Any) -> None:
        """Weighs as the run did whose checkpoint a precision plugin has read."""
        if self.state.reference_items is None:
            kinds = {"reference_items": or_none(POSITIVE), "losses": MAPPING}
            state = checked_state(saved, kinds, "the weights of micro-batches")
            self.losses.load_state_dict(state["losses"])
            self.state = replace(self.state, reference_items=state["reference_items"])

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        state = AccumulationState.read(state_dict)
        _nothing_known().load_state_dict(state_dict.get("losses"))  # raises before anything is changed
        self.counter.load_state_dict(state_dict.get("counter", {}))
        self.losses.load_state_dict(state_dict["losses"])
        self.state = state

    @override
    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Remembers the gradient of a window that was saved open."""
        self._saved_window = PartialAccumulation.load(checkpoint, trainer, pl_module)


def _nothing_known() -> "LossWeights":
    """Imported here, so that code that only monitors a run does not depend on the weighing of losses."""
    from lightning_mp.training.tokens.loss_weights import LossWeights

    return LossWeights()
