"""What is known of optimizers that skip and unscale in their own kernel."""

from torch.optim import Optimizer

__all__ = ["applies_grad_scale", "momentum_is_missing"]


def applies_grad_scale(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own kernel divides gradients by ``optimizer.grad_scale`` and skips on ``found_inf``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def momentum_is_missing(optimizer: Optimizer) -> bool:
    """Whether a fused SGD would make a momentum buffer in this step.

    If that very step is skipped on the device, the buffer stays uninitialised memory.
    """
    return any(
        "momentum" in group and group["momentum"] != 0 and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    )
