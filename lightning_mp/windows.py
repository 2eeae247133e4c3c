"""The window keeper: which micro-batches make one optimizer step, what each weighs, and when the run ends."""

from collections.abc import Callable
from typing import Any, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_mp import batch_counts, gradients, seams
from lightning_mp.landing import TokenBudget
from lightning_mp.ledger import TokenLedger, WindowTotals
from lightning_mp.spending import OpenWindow, Spending
from lightning_mp.weighting import CountFunction, Measure, WeightBy, Weighting

__all__ = ["Window", "WindowKeeper"]


class Window(int):
    """The value of ``trainer.accumulate_grad_batches`` for one micro-batch.

    Lightning asks it two questions by modulo: ``batch_idx % N == 0`` (set the gradients to zero?) and
    ``(batch_idx + 1) % N == 0`` (make the optimizer step?). Python lets the right operand answer if its class is a
    subclass of the left one's, so the answers come from the keeper. For everything else it is the plain number ``N``,
    by which Lightning divides the loss.

    Example:
        >>> window = Window(4, batch_idx=6, opens=True, closes=False)
        >>> 6 % window, 7 % window, 12 / window
        (0, 1, 3.0)
    """

    _batch_idx: int
    _opens: bool
    _closes: bool

    def __new__(cls, micro_batches: int, *, batch_idx: int, opens: bool, closes: bool) -> Self:
        """Makes the number; an ``int`` is complete before ``__init__`` could see it."""
        window = super().__new__(cls, micro_batches)
        window._batch_idx = batch_idx
        window._opens = opens
        window._closes = closes
        return window

    def __rmod__(self, value: int) -> int:
        if value == self._batch_idx:
            return int(not self._opens)
        if value == self._batch_idx + 1:
            return int(not self._closes)
        return value % int(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class WindowKeeper(Callback):
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
        self._constant = micro_batches
        self._schedule: Callable[[pl.Trainer], int] | None = None
        self._weighting: Weighting | None = None
        self._budget: TokenBudget | None = None
        self._spending: Spending | None = None
        self._resolved = False
        self.ledger = TokenLedger()
        self.reference_items: float | None = None
        self.budget_reached = False
        self._num_data_ranks = 1
        self._planned = 1
        self._position = 0
        self._is_open = False
        self._closes = False
        self._lands = False
        self._measure: Measure | None = None
        self._totals: WindowTotals | None = None

    # -- who asks for what ---------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> "WindowKeeper | None":
        """The keeper that is at work for this Trainer, if any."""
        return next((callback for callback in seams.callbacks_of(trainer) if isinstance(callback, cls)), None)

    @classmethod
    def attach(cls, trainer: "pl.Trainer") -> "WindowKeeper":
        """The Trainer's keeper; a new one is put in front of its callbacks if there is none."""
        keeper = cls.of(trainer)
        if keeper is None:
            keeper = cls(trainer.accumulate_grad_batches)
            # A new list: Lightning is walking through the old one while callbacks are set up.
            seams.set_callbacks(trainer, [keeper, *seams.callbacks_of(trainer)])
        elif keeper._weighting is None:
            keeper._constant = trainer.accumulate_grad_batches
        return keeper

    def release(self, trainer: "pl.Trainer") -> None:
        """Ends a fit. The keeper stays among the callbacks, so that a checkpoint written later holds its state."""
        trainer.accumulate_grad_batches = self._constant
        self._restore_labels()
        self._schedule = self._weighting = self._budget = self._spending = None
        self._resolved = self._is_open = False

    def follow(self, schedule: Callable[["pl.Trainer"], int]) -> None:
        """Window lengths come from ``schedule``, asked once when a window opens.

        Raises:
            MisconfigurationException: if the Trainer or another callback sets them already.
        """
        if self._constant != 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={self._constant}) and an AccumulationScheduler both set the number of"
                " micro-batches per optimizer step. Leave accumulate_grad_batches out, or remove the callback."
            )
        if self._schedule is not None:
            raise MisconfigurationException("There are two AccumulationSchedulers; merge them into one schedule.")
        self._schedule = schedule

    def weigh(self, weight_by: WeightBy, count: CountFunction | None) -> None:
        """Micro-batches weigh what ``weight_by`` says; ``count`` overrides the labels.

        Raises:
            MisconfigurationException: if two callbacks count tokens in two ways.
        """
        known = self._weighting
        if known is None:
            self._weighting = Weighting(weight_by, count)
            return
        if count is not None and known.count is not None and known.count is not count:
            raise MisconfigurationException("Two callbacks count tokens with different count= functions; use one.")
        chosen = known.weight_by if known.weight_by != "auto" else weight_by
        self._weighting = Weighting(chosen, known.count if known.count is not None else count)

    def spend(self, budget: TokenBudget) -> None:
        """The run ends on ``budget``.

        Raises:
            MisconfigurationException: if there is a budget already.
        """
        if self._budget is not None:
            raise MisconfigurationException(
                "There are two ChinchillaBudgets; a run has one budget. Remove one of them."
            )
        self._budget = budget

    # -- one micro-batch -----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Refuses an optimizer that evaluates the loss several times in one step.

        Raises:
            MisconfigurationException: with LBFGS.
        """
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise MisconfigurationException(
                "AccumulationScheduler and ChinchillaBudget cannot be used with LBFGS, which evaluates the loss several"
                " times in one step: tokens and windows would be counted more than once. Use another optimizer, or"
                " remove the callbacks."
            )

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Ends a resumed run at once if its budget is spent."""
        if self.budget_reached and self._budget is not None:
            trainer.should_stop = True

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Trims and counts the micro-batch and decides whether it opens or closes a window."""
        if self._weighting is None:
            return
        self._restore_labels()
        self._resolve(trainer, pl_module, batch)
        opens = not self._is_open
        if opens:
            self._planned = self._schedule(trainer) if self._schedule is not None else self._constant
            self._position = 0
            self._totals = WindowTotals()
        last_of_epoch = trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches
        self._lands = self._begin(trainer, pl_module.device, batch)
        self._closes = self._lands or last_of_epoch or self._position + 1 >= self._planned
        trainer.accumulate_grad_batches = Window(self._planned, batch_idx=batch_idx, opens=opens, closes=self._closes)

    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """Weighs the loss. A micro-batch without a loss never comes here and is not counted."""
        if self._weighting is None:
            return
        assert self._measure is not None
        assert self._totals is not None
        items = self._measure.items
        if self.reference_items is None:
            # Once per run, so the wait does not matter.
            self.reference_items = float(trainer.strategy.broadcast(max(int(items), 1)))
        if isinstance(items, Tensor):
            loss.mul_((items / self.reference_items).to(loss.device))
        elif items != self.reference_items:
            loss.mul_(items / self.reference_items)
        self._totals.add(items, self._measure.tokens, self._measure.presented_tokens)

    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        """With a stock precision plugin: normalises the gradient here. Ours has done it already."""
        totals = self.window_totals(pl_module.device)
        if totals is None:
            return
        factor = self.close_window(gradients.sum_over_ranks_(totals))
        if factor is not None:
            parameters = gradients.parameters_with_gradient(optimizer)
            gradients.multiply_([gradients.local_shard(p.grad) for p in parameters if p.grad is not None], factor)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves on to the next micro-batch, or ends the run."""
        if self._weighting is None:
            return
        self._position += 1
        self._is_open = not self._closes
        if self._lands:
            self.budget_reached = True
            trainer.should_stop = True

    def needs_gradients(self, step_index: int) -> bool:
        """Our precision plugins need not make true gradients for the keeper: they normalise themselves."""
        return False

    # -- the end of a window, for precision plugins --------------------------------------------------------------------

    def window_totals(self, device: torch.device) -> Tensor | None:
        """Items, tokens and presented tokens of the open window on this rank, shape ``[4]``; None if there are none.

        The caller adds them over all ranks and hands them to :meth:`close_window`.
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
        assert self.reference_items is not None
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        # Ranks that share their data (tensor parallel) have counted it once each.
        self.ledger.close_window(totals / (num_ranks // self._num_data_ranks), local.micro_batches)
        expected_items = num_ranks * self.reference_items * self._planned
        if num_ranks == 1 and local.host_items == expected_items:
            return None
        return expected_items / totals[0].clamp(min=1.0)

    def _begin(self, trainer: "pl.Trainer", device: torch.device, batch: Any) -> bool:
        """Measures the micro-batch, trims it if the budget ends in it, and returns whether it does."""
        assert self._weighting is not None
        assert self._totals is not None
        self._measure = self._weighting.measure(batch)
        if self._spending is None:
            return False
        certain_tokens = self._measure.presented_tokens if self._num_data_ranks == 1 else 0
        if self._spending.is_far_from_the_end(self._position, certain_tokens):
            return False
        window = OpenWindow(self._totals, self._position, self._measure, _data_parallel(trainer).get("rank", 0), device)
        lands, self._measure = self._spending.begin_micro_batch(window, batch)
        return lands

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def _restore_labels(self) -> None:
        if self._spending is not None:
            self._spending.restore_labels()

    def _resolve(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> None:
        if self._resolved:
            return
        assert self._weighting is not None
        shifted = bool(trainer.strategy.broadcast(batch_counts.shifts_labels_inside(pl_module, batch)))
        self._weighting.resolve(batch, shifted=shifted, budgeted=self._budget is not None)
        if self._budget is not None:
            self._spending = Spending(self._budget, self.ledger, self._weighting)
        self._num_data_ranks = _data_parallel(trainer).get("num_replicas", 1)
        self._resolved = True

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Settles the ledger."""
        self._restore_labels()
        self.ledger.settle()

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Gives the Trainer its own setting back."""
        self.release(trainer)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Gives the Trainer its own setting back."""
        self.release(trainer)

    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Warns when a partial gradient would be lost."""
        if self._is_open:
            rank_zero_warn(
                f"This checkpoint is written inside an accumulation window: the gradient of its first {self._position}"
                f" of {self._planned} micro-batches is not saved, and a run that resumes from it loses them. Save every"
                " n optimizer steps (ModelCheckpoint(every_n_train_steps=n)) or validate at window ends."
            )

    def state_dict(self) -> dict[str, Any]:
        """The ledger and the reference count."""
        return {
            "ledger": self.ledger.state_dict(),
            "reference_items": self.reference_items,
            "budget_reached": self.budget_reached,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.ledger.load_state_dict(state_dict["ledger"])
        self.reference_items = state_dict["reference_items"]
        self.budget_reached = state_dict["budget_reached"]


def _data_parallel(trainer: "pl.Trainer") -> dict[str, int]:
    """``rank`` and ``num_replicas`` of this process among those that see different data; empty on a single device."""
    sampler: dict[str, int] = getattr(trainer.strategy, "distributed_sampler_kwargs", {})
    return sampler
