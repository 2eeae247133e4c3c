"""Who looks at gradients between backward and the optimizer step."""

from collections.abc import Iterable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


def overrides(instance: object, base: type, method: str) -> bool:
    """Whether an object has its own version of a method of ``base``; also if it was set on the instance.

    Lightning's ``is_overridden`` cannot be asked about callables that are set on an instance (``LambdaCallback``).
    """
    bound: Any = getattr(instance, method)
    return getattr(bound, "__func__", bound) is not getattr(base, method)


def gradient_consumers(
    callbacks: Iterable[Callback], module: "pl.LightningModule", step_index: int
) -> Literal["nobody", "readers", "writers"]:
    """Who looks at the gradients before this step; who does may change them.

    The pack's own callbacks only read. They answer ``needs_gradients(step_index)`` themselves, so that nothing is paid
    on other steps; ``needs_gradients = False`` means on no step.
    """
    for hook in ("on_before_optimizer_step", "configure_gradient_clipping"):
        if overrides(module, pl.LightningModule, hook):
            return "writers"
    shown: Literal["nobody", "readers"] = "nobody"
    for callback in callbacks:
        needs_gradients = getattr(callback, "needs_gradients", None)
        if needs_gradients is None:
            # Lightning passes over a hook that is None, as those of our callbacks are that have nothing to do.
            if callback.on_before_optimizer_step is not None and overrides(
                callback, Callback, "on_before_optimizer_step"
            ):
                return "writers"
        elif needs_gradients and needs_gradients(step_index):
            shown = "readers"
    return shown


def clips_by_itself(module: "pl.LightningModule") -> bool:
    """Whether the module has a ``configure_gradient_clipping`` of its own, the last to change gradients."""
    return overrides(module, pl.LightningModule, "configure_gradient_clipping")
