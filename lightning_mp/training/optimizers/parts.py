"""The optimizers that one is made of, for code that needs no more of a joint one."""

from torch.optim import Optimizer


class OptimizerOfParts(Optimizer):
    """One optimizer that steps several; :class:`~lightning_mp.JointOptimizer`."""

    optimizers: list[Optimizer]


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Those that it steps; the optimizer itself if it is not made of others."""
    return optimizer.optimizers if isinstance(optimizer, OptimizerOfParts) else [optimizer]
