"""The gradient epilogue: everything between the end of backward and the optimizer's own kernel.

Loss scale, item count and clip coefficient are gathered as scalars on the device and applied together. One reduction of
a small vector makes every rank decide alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.core.host_copy import HostCopy
from lightning_mp.gradients import gradient_ops
from lightning_mp.gradients.fused_optimizers import applies_grad_scale
from lightning_mp.gradients.replication import GradientReplication

__all__ = ["GradientEpilogue"]


@dataclass
class _Plan:
    """Scalars on the device; the gradient to step with is ``raw * factor * coefficient``, or limited by value."""

    factor: Tensor | None = None
    coefficient: Tensor | None = None
    value_limit: float | None = None

    def combined(self) -> Tensor | None:
        if self.factor is None or self.coefficient is None:
            return self.factor if self.coefficient is None else self.coefficient
        return self.factor * self.coefficient


class GradientEpilogue:
    """One optimizer step's gradients, from raw to what the optimizer may take.

    .. code-block:: text

        norms       = |g_p| of every local shard                      one pass over the gradients
        sum, totals = sum over ranks of (sum_p norm_p^2 / copies_p, window totals)
        factor      = normalisation(totals) / scale
        found_inf   = sum or 1/scale is not finite, or sum * factor^2 does not fit into fp32
        coefficient = min(1, max_norm / (sqrt(sum) * factor + 1e-6))
        fused:   optimizer.grad_scale = 1 / (factor * coefficient); the kernel divides, and skips on found_inf
        else:    g *= factor * coefficient                             two passes

    Args:
        optimizer: its gradients are worked on.
        scale: the loss scale, a scalar tensor; None without a scaler.
        ranks: who steps together, and who holds the same gradients.
        device: where scalars live if the optimizer has no gradient at all.
    """

    def __init__(
        self, optimizer: Optimizer, scale: Tensor | None, *, ranks: GradientReplication, device: torch.device
    ) -> None:
        self.optimizer = optimizer
        self.parameters = gradient_ops.parameters_with_gradient(optimizer)
        gradient_ops.reduce_partial_gradients_(self.parameters)
        self._ranks = ranks
        self._device = self.parameters[0].device if self.parameters else device
        # A copy: the scaler updates its own in place before the outcome is read.
        self.scale = scale.to(self._device, copy=True, non_blocking=True) if scale is not None else None
        self.in_kernel = applies_grad_scale(optimizer)
        self.is_checked = False
        self._unscaled_found: list[Tensor] | None = None
        self._anyone: Tensor | None = None
        self._plan = _Plan()
        self._host_factor: float | None = None
        self.norms: Tensor | None = None
        self.grad_norm: Tensor = torch.zeros((), device=self._device)
        self.found_inf: Tensor = torch.zeros((), device=self._device)

    def were_unscaled(self, found_inf: Sequence[Tensor]) -> None:
        """Gradients are true already: ``scaler.unscale_`` has made them so, and has found this."""
        self._unscaled_found = list(found_inf)

    def anyone_has_gradients(self) -> bool:
        """Whether any rank has some; all ranks get the same answer. Only a rank without waits for the device."""
        return bool(self.parameters) or (self._anyone is not None and bool(self._anyone > 0))

    @property
    def shards(self) -> list[Tensor]:
        """The local gradients as they are now."""
        return gradient_ops.local_shards(self.parameters)

    def reduce(self, totals: Tensor | None) -> Tensor | None:
        """Reads the gradients once and adds norm and window totals over all ranks.

        Args:
            totals: window totals of this rank, shape ``[num_totals]``, or None.

        Returns:
            The totals over all ranks.
        """
        square_sum = self._local_square_sum()
        for found in self._unscaled_found or ():
            # What was not finite may have been clipped since; the step is skipped nevertheless, as by the scaler.
            square_sum = torch.where(found.to(square_sum.device) > 0, torch.nan, square_sum)
        vector = torch.stack([square_sum, torch.full_like(square_sum, float(bool(self.parameters)))])
        if totals is not None:
            vector = torch.cat([vector, totals.to(device=vector.device, dtype=vector.dtype)])
        self._ranks.sum_(vector)
        self.grad_norm = vector[0].sqrt()
        self._anyone = vector[1]
        self.found_inf = (~torch.isfinite(self.grad_norm)).float()
        return vector[2:] if totals is not None else None

    def _local_square_sum(self) -> Tensor:
        shards = self.shards
        self.norms = None
        if not shards:
            return torch.zeros((), dtype=gradient_ops.accumulation_dtype(self._device), device=self._device)
        self.norms = gradient_ops.shard_norms(shards)
        return gradient_ops.square_sum(self.norms, self._ranks.copies_of(self.parameters))

    def plan_factor(self, normalisation: Tensor | None) -> None:
        """Sets the factor from raw to true gradients: normalisation over loss scale."""
        factor = normalisation
        if self.scale is not None and self._unscaled_found is None:
            inverse = self.scale.to(self.grad_norm.dtype).reciprocal()
            self.found_inf = torch.maximum(self.found_inf, (~torch.isfinite(inverse)).float())
            factor = inverse if factor is None else factor.to(inverse) * inverse
        self._plan.factor = factor
        if factor is not None:
            self.grad_norm = self.grad_norm * factor.to(self.grad_norm)
            if self.scale is not None:
                # A scale below 1 makes gradients larger.
                self.found_inf = torch.maximum(self.found_inf, gradient_ops.any_overflow(self.grad_norm.float()))

    def make_true(self) -> None:
        """Turns raw gradients into true ones in place, for those who look at them (two passes)."""
        if self._plan.factor is not None:
            gradient_ops.multiply_(self.shards, self._plan.factor)
            self._plan.factor = None

    def clip_by_norm(self, max_norm: float, *, fresh: bool) -> None:
        """Plans the clip coefficient.

        Args:
            max_norm: largest two-norm over all parameters and ranks.
            fresh: the gradients may have changed since :meth:`reduce`; their norm is taken again (one pass).
        """
        norm = self.check_again() if fresh else self.grad_norm
        self._plan.coefficient = gradient_ops.clip_coefficient(norm, max_norm)

    def check_again(self) -> Tensor:
        """Reads gradients again that may have been written since :meth:`reduce`, or are new (one pass).

        Returns:
            Their norm over all ranks.
        """
        self.parameters = gradient_ops.parameters_with_gradient(self.optimizer)
        gradient_ops.reduce_partial_gradients_(self.parameters)
        norm = self._ranks.sum_(self._local_square_sum()).sqrt()
        self.found_inf = torch.maximum(self.found_inf, (~torch.isfinite(norm)).float())
        self.is_checked = True
        return norm

    def clip_by_value(self, limit: float) -> None:
        """Limits every element to ``[-limit, limit]``, measured on true gradients (two passes).

        Without a fused optimizer it waits for :meth:`apply`, where it shares its passes with the factor.
        """
        if self._plan.factor is not None and not self.in_kernel:
            self._plan.value_limit = limit
            return
        self._clamp(limit)

    def _clamp(self, limit: float) -> None:
        bound = torch.full((), limit, dtype=self.grad_norm.dtype, device=self._device)
        if self._plan.factor is not None:
            bound = bound / self._plan.factor.to(bound)
        gradient_ops.clamp_(self.shards, bound)

    def clip_scaled(self, limit: float, *, by_value: bool) -> None:
        """Clips by the size of the true gradients but leaves them scaled, for manual optimization.

        Gradients that are not finite stay so, and the step that follows is skipped.
        """
        if by_value:
            self._clamp(limit)
            # Clamping has turned every inf into the bound.
            keep = torch.where(self.found_inf > 0, torch.nan, 1.0)
            gradient_ops.multiply_([shard for shard in self.shards if shard.numel()][:1], keep)
        else:
            gradient_ops.multiply_(self.shards, gradient_ops.clip_coefficient(self.grad_norm, limit))

    def apply(self) -> None:
        """Multiplies what was planned into the gradients (two passes)."""
        combined = self._plan.combined()
        if self._plan.value_limit is not None:
            assert self._host_factor is not None
            bound = self._plan.value_limit / self._host_factor
            gradient_ops.scaled_clamp_(self.shards, self._host_factor, bound)
        elif combined is not None:
            gradient_ops.multiply_(self.shards, combined)
        self._plan = _Plan()

    def wait_for_decision(self) -> bool:
        """Whether the step is to be skipped; waits for the device once."""
        plan = self._plan
        factor = None if plan.value_limit is None or plan.factor is None else HostCopy(plan.factor.reshape(1))
        found_inf = bool(self.found_inf.item())
        if factor is not None:
            self._host_factor = factor.read()[0]
        return found_inf

    def tell_optimizer(self) -> None:
        """What was planned, and the decision, for a fused optimizer's own kernel; see :meth:`release`."""
        combined = self._plan.combined()
        self.optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]  # torch's protocol
        if combined is not None:
            self.optimizer.grad_scale = combined.reciprocal().float()  # type: ignore[attr-defined]

    def release(self) -> None:
        """Takes off the optimizer what it was told."""
        if self.in_kernel:
            for name in ("found_inf", "grad_scale"):
                if hasattr(self.optimizer, name):
                    delattr(self.optimizer, name)
