"""Steps beside the plugin: ``scaler.unscale_`` by hand, steps past it, optimizers that another optimizer wraps."""

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core import private_optimizer_api


def found_by_unscaling(
    scaler: "torch.amp.GradScaler", optimizer: Optimizer, model: "pl.LightningModule"
) -> list[Tensor] | None:
    """What the user's own ``scaler.unscale_`` has found in an optimizer's gradients; None if it was not called.

    It may have been given Lightning's wrapper of the optimizer.
    """
    handed_out = model.optimizers()
    wrappers = handed_out if isinstance(handed_out, list) else [handed_out]
    same = [w for w in wrappers if isinstance(w, LightningOptimizer) and w.optimizer is optimizer]
    return private_optimizer_api.unscaled_found_inf(scaler, [optimizer, *same])


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those among its attributes that step the same lists of parameters, however deep.

    Example:
        >>> import torch
        >>> outer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> outer.base_optimizer = torch.optim.Adam(outer.param_groups)
        >>> outer.other = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
        >>> [type(found).__name__ for found in with_wrapped(outer)]
        ['SGD', 'Adam']
    """
    found = [optimizer]
    lists = {id(group["params"]) for group in optimizer.param_groups}
    for outer in found:  # grows meanwhile
        for inner in vars(outer).values():
            if not isinstance(inner, Optimizer) or any(inner is known for known in found):
                continue
            if any(id(group["params"]) in lists for group in inner.param_groups):
                found.append(inner)
    return found


def holds_parameters_of(optimizer: Optimizer, model: "pl.LightningModule") -> bool:
    """Whether an optimizer steps any of a module's parameters, as one that another optimizer wraps."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def check_step_past_the_plugin(
    optimizer: Optimizer, plugin: object, scaler: "torch.amp.GradScaler | None", model: "pl.LightningModule"
) -> None:
    """To be called before a step that bypasses the plugin changes a weight.

    ``scaler.step`` is right: it has unscaled and checked the gradients. Without a scale a warning says what is missing.
    """
    with_gradient = [group for group in optimizer.param_groups if any(p.grad is not None for p in group["params"])]
    # torch makes an optimizer's state, for a checkpoint, by a step with a learning rate of zero.
    if all(group.get("lr") == 0 for group in with_gradient):
        return
    name = type(optimizer).__name__
    if scaler is None:
        rank_zero_warn(
            f"{name}.step() was called on the optimizer itself, bypassing {plugin}: non-finite gradients are not"
            " skipped, and nothing is normalised or clipped. Call step() on what self.optimizers() returns."
        )
    elif found_by_unscaling(scaler, optimizer, model) is None and not hasattr(optimizer, "found_inf"):
        raise RuntimeError(
            f"{name}.step() was called on the optimizer itself, bypassing {plugin}: its gradients are still scaled by"
            f" {scaler.get_scale():.10g}, unchecked and unclipped. Call step() on what self.optimizers() returns or"
            " optimizer_step receives, not on its `.optimizer`; or use scaler.step(optimizer)."
        )
