"""Who looks at gradients between backward and the optimizer step."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_mp.seams import callbacks_of

__all__ = ["overrides", "someone_looks_at_gradients"]


def overrides(instance: object, base: type, method: str) -> bool:
    """Whether an object has its own version of a method of ``base``; also if it was set on the instance.

    Lightning's ``is_overridden`` cannot be asked about callables that are set on an instance (``LambdaCallback``).

    Example:
        >>> from lightning.pytorch.callbacks import Callback, LambdaCallback
        >>> overrides(LambdaCallback(on_before_optimizer_step=print), Callback, "on_before_optimizer_step")
        True
        >>> overrides(Callback(), Callback, "on_before_optimizer_step")
        False
    """
    bound: Any = getattr(instance, method)
    return getattr(bound, "__func__", bound) is not getattr(base, method)


def someone_looks_at_gradients(trainer: "pl.Trainer", module: "pl.LightningModule") -> bool:
    """Whether a callback or the module may read or change the gradients before this step.

    The pack's own callbacks answer ``needs_gradients(step_index)`` themselves, so that nothing is paid on other steps.
    """
    if overrides(module, pl.LightningModule, "on_before_optimizer_step"):
        return True
    if overrides(module, pl.LightningModule, "configure_gradient_clipping"):
        return True
    for callback in callbacks_of(trainer):
        needs_gradients = getattr(callback, "needs_gradients", None)
        if needs_gradients is not None:
            if needs_gradients(trainer.global_step):
                return True
        elif overrides(callback, Callback, "on_before_optimizer_step"):
            return True
    return False
