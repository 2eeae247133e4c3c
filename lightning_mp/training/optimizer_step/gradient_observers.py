"""Which hooks read or write gradients between backward and the optimizer step."""

from collections.abc import Iterable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


def overrides(instance: object, base: type, method: str) -> bool:
    """Whether an object has its own version of a method of ``base``; also if it was set on the instance.

    Lightning's ``is_overridden`` does not see callables that are set on an instance (``LambdaCallback``).
    """
    bound: Any = getattr(instance, method)
    return getattr(bound, "__func__", bound) is not getattr(base, method)


def gradient_consumers(
    callbacks: Iterable[Callback], module: "pl.LightningModule", step_index: int
) -> Literal["none", "readers", "writers"]:
    """Whether hooks read the gradients before this step, or may write them, as any foreign hook may.

    The callbacks of this package only read. Their ``needs_gradients(step_index)`` says on which steps, so that the
    others cost nothing; ``needs_gradients = False`` means on no step.
    """
    for hook in ("on_before_optimizer_step", "configure_gradient_clipping"):
        if overrides(module, pl.LightningModule, hook):
            return "writers"
    found: Literal["none", "readers"] = "none"
    for callback in callbacks:
        needs_gradients = getattr(callback, "needs_gradients", None)
        if needs_gradients is None:
            # Lightning skips a hook that is None, as idle hooks of our callbacks are.
            if callback.on_before_optimizer_step is not None and overrides(
                callback, Callback, "on_before_optimizer_step"
            ):
                return "writers"
        elif needs_gradients and needs_gradients(step_index):
            found = "readers"
    return found


def clips_by_itself(module: "pl.LightningModule") -> bool:
    """Whether the module overrides ``configure_gradient_clipping``, the last hook to change gradients."""
    return overrides(module, pl.LightningModule, "configure_gradient_clipping")


def makes_true_gradients(plugin: object) -> bool:
    """Whether a precision plugin is one of this package: it shows true gradients, skips, and reports each step."""
    return getattr(plugin, "makes_true_gradients", False) is True
