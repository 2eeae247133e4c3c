"""The callbacks of the package that a long run would carry, all of them at once."""

from lightning.pytorch.callbacks import Callback

from lightning_mp import (
    AccumulationScheduler,
    ChinchillaBudget,
    MFUMonitor,
    OverflowMonitor,
    OverflowPostMortem,
    UnderflowMonitor,
)
from lightning_mp.callbacks.token_learning_rate import TokenLearningRate
from lightning_mp.training.lr_schedule.schedules import WarmupCosine


def all_callbacks(window: int = 1, flops_per_token: float | str = "exact") -> dict[str, Callback]:
    """New ones, by class name.

    Args:
        window: micro-batches per optimizer step.
        flops_per_token: as in `MFUMonitor`, which cannot count those of compiled code.
    """
    callbacks: list[Callback] = [
        OverflowMonitor(),
        OverflowPostMortem(),
        UnderflowMonitor(),
        MFUMonitor(flops_per_token=flops_per_token),
        AccumulationScheduler({0: window}),
        ChinchillaBudget(tokens="1B"),
        TokenLearningRate(WarmupCosine()),
    ]
    return {type(callback).__name__: callback for callback in callbacks}
