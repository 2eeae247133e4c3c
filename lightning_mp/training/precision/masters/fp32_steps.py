"""Optimizer steps on fp32 parameters whose gradients are 16 bit.

Optimizers get fp32 copies of these gradients: torch's Adam kernels refuse 16-bit gradients of fp32 weights, and other
optimizers differ without an error. An optimizer whose update of a parameter depends on no other parameter steps block
by block, so that the copies never exist for all parameters at once. Numbers are those of one block, to the bit.
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core import private_optimizer_api
from lightning_mp.training.gradients.step_blocks import step_blocks
from lightning_mp.training.optimizer_step.bypassed_steps import with_wrapped
from lightning_mp.training.optimizers.adam_moments import Bf16Moments
from lightning_mp.training.precision.masters.fp32_gradients import Fp32Gradients


class Fp32Steps:
    """Shows fp32 gradients to one optimizer, through the hooks that every ``torch.optim.Optimizer`` has."""

    def __init__(self, optimizer: Optimizer, gradients: Fp32Gradients) -> None:
        self.optimizer = optimizer
        self.gradients = gradients
        self._whole: list[
            tuple[dict[str, Any], list[Tensor]]
        ] = []  # groups that are stepped in blocks, and all of each
        private_optimizer_api.make_room_for_hooks(optimizer)
        self._around = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self.gather_blocks()),
        )

    def remove(self) -> None:
        """Removes the hooks."""
        self.gather_blocks()
        for hook in self._around:
            hook.remove()

    def gather_blocks(self) -> None:
        """Gives groups all of their parameters again: after a step, or one that raised."""
        whole, self._whole = self._whole, []
        for group, parameters in whole:
            group["params"] = parameters

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes the step for all blocks but the last, which is left to the optimizer."""
        if self._whole:
            return  # the step of a parent class, inside of this one
        is_evaluated = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        # Other hooks around the step have to find all parameters in it; those before it may have seen copies.
        has_other_hooks = private_optimizer_api.has_other_step_hooks(*self._around, besides=Bf16Moments)
        is_alone = not has_other_hooks and len(with_wrapped(optimizer)) == 1
        blocks = self._blocks() if is_alone and not is_evaluated and not self.gradients.are_shown else []
        groups = optimizer.param_groups
        if not blocks:
            self._begin_block([p for group in groups for p in group["params"]])
            return
        self._whole = [(group, group["params"]) for group in groups]
        for block in blocks:
            for group, members in zip(groups, block, strict=True):
                group["params"] = members
            parameters = [p for members in block for p in members]
            self._begin_block(parameters)
            if block is not blocks[-1]:
                private_optimizer_api.step_without_hooks(optimizer)
                self._end_block(parameters)

    def _blocks(self) -> list[list[list[Tensor]]]:
        return step_blocks(self.optimizer)

    def _begin_block(self, parameters: list[Tensor]) -> None:
        self.gradients.show(parameters)

    def _end_block(self, parameters: list[Tensor]) -> None:
        self.gradients.put_back(parameters)
