"""Shared set-up of callbacks: refusing conflicting callbacks, counting batches consistently."""

from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.training.tokens.loss_weighting import CountFunction, Weighting
from lightning_mp.training.tokens.run_counts import RunCounts

#: The tokens of the run; these and the weights of micro-batches; or the inputs that a monitor measures, and no more.
CountUse = Literal["tokens", "weights", "inputs"]


def refuse_conflicting_callbacks(callback: object, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
    """Refuses anything other than the accumulation controller that controls accumulation windows."""
    name = type(callback).__name__
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"{name} needs automatic optimization; with automatic_optimization=False the module decides itself when"
            " to step. Remove the callback or turn automatic optimization on."
        )
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            f"{name} cannot be used with DeepSpeed, which accumulates gradients itself. Set"
            " gradient_accumulation_steps in the DeepSpeed config, or use strategy='fsdp'."
        )
    for other in callbacks_of(trainer):
        if isinstance(other, StochasticWeightAveraging):
            raise MisconfigurationException(
                f"{name} cannot be used with StochasticWeightAveraging, which sets accumulate_grad_batches itself and"
                " steps the optimizer while it renews batch norms. Remove one of them; EMAWeightAveraging works beside"
                " it."
            )
        if isinstance(other, GradientAccumulationScheduler):
            raise MisconfigurationException(
                f"{name} and {type(other).__name__} both set accumulate_grad_batches. Remove the latter and give its"
                " schedule to lightning_mp.AccumulationScheduler."
            )


def check_counts(
    callback: object, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, *, needs_tokens: bool
) -> Weighting:
    """Checks before a fit what its first batch will be checked for: that all callbacks count it consistently."""
    refuse_conflicting_callbacks(callback, trainer, pl_module)
    weighting = Weighting(None)
    for other in callbacks_of(trainer):
        if hasattr(other, "check_setup") and hasattr(other, "count"):
            weighting = weighting.joined_by(getattr(other, "weight_by", None), **counts_of(other, other.count))
    tokens_for = type(callback).__name__ if needs_tokens else ""
    return weighting.resolved(batch, shifted=False, tokens_for=tokens_for)


def counts_of(callback: object, count: CountFunction | None) -> dict[str, Any]:
    """What the ``count`` of a callback counts, by its class: the tokens of the run, unless stated otherwise."""
    use: CountUse = getattr(callback, "_count_use", "tokens")
    if use == "inputs":
        return {"count": None, "input_count": count}
    return {"count": count, "count_weighs": use == "weights"}


def micro_batches_left(trainer: "pl.Trainer", window: int) -> dict[str, int]:
    """Micro-batches that a rank may still run under the Trainer's limits, by the name of each limit."""
    left = {}
    if trainer.max_epochs not in (None, -1) and trainer.num_training_batches != float("inf"):
        left["max_epochs"] = int(trainer.num_training_batches) * (trainer.max_epochs - trainer.current_epoch)
    if trainer.max_steps != -1:
        left["max_steps"] = (trainer.max_steps - trainer.global_step) * window
    return left


def run_counts(
    callback: object, trainer: "pl.Trainer", pl_module: "pl.LightningModule", count: CountFunction | None
) -> RunCounts:
    """For monitors: has micro-batches counted, and returns what counts them."""
    # Imported here: a monitor reads counts, whatever forms and weighs the windows.
    from lightning_mp.callbacks._window_controller import join_window_controller

    return join_window_controller(callback, trainer, pl_module, count, weight_by=None)
