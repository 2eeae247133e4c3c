"""The gradient epilogue: everything between the end of backward and the optimizer's own kernel.

Loss scale, item count and clip coefficient are gathered as scalars on the device and applied together. One reduction of
a small vector makes every rank take the same decision.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.ranks import sum_over_ranks_
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.replication import GradientReplication


class GradientEpilogue:
    """One optimizer step's gradients, from raw to final.

    .. code-block:: text

        norms       = |g_p| of every local shard                      one pass over the gradients
        sum, totals = sum over ranks of (sum_p norm_p^2 / copies_p, window totals)
        factor      = normalisation(totals) / scale
        found_inf   = sum * factor^2 is not finite, or under a loss scale does not fit into fp32
        coefficient = min(1, max_norm / (sqrt(sum) * factor + 1e-6))
        fused:   optimizer.grad_scale = 1 / (factor * coefficient); the kernel divides, and skips on found_inf
        else:    g *= factor * coefficient                             two passes
    """

    # Known from `reduce` on.
    parameters: list[Tensor]  # those with a gradient, in the order of the optimizer's groups
    scale: Tensor | None  # a copy of the loss scale
    norms: Tensor | None  # two-norms of their local gradients, shape `[num_parameters]`; None if there are none
    grad_norm: Tensor  # two-norm of the gradient over all ranks, a scalar tensor; true once it is planned for
    found_inf: Tensor  # scalar tensor, 1.0 if the step is to be skipped
    _anyone: Tensor | None
    _anyone_scaled: Tensor | None = None

    def __init__(
        self,
        optimizer: Optimizer,
        scale: Tensor | None,
        *,
        ranks: GradientReplication,
        device: torch.device,
        in_kernel: bool = False,
        unscaled_found: Sequence[Tensor] | None = None,
        found_inf: Sequence[Tensor] = (),
        has_scaled: bool | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.in_kernel = in_kernel
        self.is_checked = False
        self._ranks = ranks
        self._device = device
        self._given_scale = scale
        self._unscaled_found = unscaled_found
        self._found_before = (*(unscaled_found or ()), *found_inf)
        self._has_scaled = has_scaled
        # The plan: the optimizer gets `raw * multiplier`, or `raw * factor` limited by value.
        self._factor: Tensor | None = None
        self._made_true_by: Tensor | None = None
        self.multiplier: Tensor | None = None
        self._value_limit: float | None = None
        self._host_factor: float | None = None

    def anyone_has_gradients(self) -> bool:
        """Whether any rank has gradients, the same on all ranks. Only a rank without them waits for the device."""
        return bool(self.parameters) or (self._anyone is not None and bool(self._anyone > 0))

    def anyone_has_scaled(self) -> bool:
        """Whether any rank has scaled the loss of these gradients; only a rank that has not waits for the device."""
        scaled = self._anyone_scaled
        return self._has_scaled is not False or (scaled is not None and bool(scaled > 0))

    @property
    def shards(self) -> list[Tensor]:
        """The local gradients as they are now."""
        return gradient_ops.local_shards(self.parameters)

    def reduce(self, totals: Tensor | None) -> Tensor | None:
        """Reads the gradients once and adds norm and window totals over all ranks."""
        here = self._read()
        if self._ranks.is_one_process and here.norms is not None:
            # In float32 the sum of squares would overflow at a norm of 1.8e19, which scaled gradients reach.
            wide = torch.float32 if self._device.type == "mps" else torch.float64
            self.grad_norm = torch.linalg.vector_norm(here.norms, dtype=wide).to(self._device)
            self.grad_norm = self._unless_found(self.grad_norm)
            self._anyone = None
            totals = totals.to(self.grad_norm) if totals is not None else None
        else:
            square_sum = self._unless_found(self._ranks.square_sum(here, self._device))
            had_gradients = bool(self.parameters or self._found_before)
            flags = [had_gradients] if self._has_scaled is None else [had_gradients, self._has_scaled]
            vector = torch.stack([square_sum, *(torch.full_like(square_sum, float(flag)) for flag in flags)])
            if totals is not None:
                vector = torch.cat([vector, totals.to(vector)])
            sum_over_ranks_(vector, self._ranks.group)
            self.grad_norm = vector[0].sqrt()
            self._anyone = vector[1]
            self._anyone_scaled = vector[2] if self._has_scaled is not None else None
            totals = vector[1 + len(flags) :] if totals is not None else None
        # A copy: the scaler updates its own in place before the outcome is read.
        scale = self._given_scale
        self.scale = scale.to(self._device, self.grad_norm.dtype, copy=True) if scale is not None else None
        if not self._is_scaled:
            self.found_inf = gradient_ops.not_below(self.grad_norm, torch.inf)
        return totals

    @property
    def _is_scaled(self) -> bool:
        """The gradients are to be divided by the loss scale; whether they overflow is known once they are."""
        return self.scale is not None and self._unscaled_found is None

    def _unless_found(self, value: Tensor) -> Tensor:
        """Non-finite gradients may have been clipped or cleared since; the step is skipped nevertheless."""
        for found in self._found_before:
            value = torch.where(found.to(self._device) > 0, torch.nan, value)
        return value

    def _read(self) -> gradient_ops.LocalGradients:
        here = gradient_ops.read_gradients(self.optimizer)
        self.parameters, self.norms = here.parameters, here.norms
        return here

    def plan(self, normalisation: Tensor | None, max_norm: float | None = None) -> None:
        """Plans the factor for the gradients: normalisation over loss scale, times the clip coefficient."""
        factor = normalisation
        if self._is_scaled:
            assert self.scale is not None
            inverse = self.scale.reciprocal()
            factor = inverse if factor is None else factor.to(inverse) * inverse
        self._factor = self.multiplier = factor
        if factor is not None:
            self.grad_norm = self.grad_norm * factor.to(self.grad_norm)
        if factor is not None and self.scale is not None:
            # A scale below 1 makes gradients larger.
            found_inf = gradient_ops.not_below(self.grad_norm, gradient_ops.LARGEST_NORM)
            self.found_inf = found_inf if self._is_scaled else torch.maximum(self.found_inf, found_inf)
        if max_norm is not None:
            self.multiplier = self._clipped(self.grad_norm, max_norm)

    def _clipped(self, norm: Tensor, max_norm: float) -> Tensor:
        """The factor times the clip coefficient of a true norm; one kernel less than their product."""
        if self._factor is None:
            return gradient_ops.clip_coefficient(norm, max_norm)
        return torch.minimum(self._factor, self._factor * max_norm / (norm + 1e-6))

    def make_true(self) -> None:
        """Turns raw gradients into true ones in place, for hooks that see them (two passes)."""
        if self._factor is not None:
            gradient_ops.multiply_(self.shards, self._factor)
            self._made_true_by, self._factor, self.multiplier = self._factor, None, None

    def make_raw(self) -> None:
        """Takes :meth:`make_true` back, before another backward adds to the gradients."""
        if self._made_true_by is not None:
            gradient_ops.multiply_(self.shards, self._made_true_by.reciprocal())

    def clip_by_norm(self, max_norm: float, *, fresh: bool) -> None:
        """Plans the clip coefficient."""
        self.multiplier = self._clipped(self.check_again() if fresh else self.grad_norm, max_norm)

    def check_again(self) -> Tensor:
        """Reads gradients again that may have been written since :meth:`reduce`, or are new (one pass)."""
        square_sum = self._ranks.square_sum(self._read(), self._device)
        norm = sum_over_ranks_(square_sum, self._ranks.group).sqrt()
        self.found_inf = torch.maximum(self.found_inf, gradient_ops.not_below(norm, torch.inf))
        self.is_checked = True
        return norm

    def clip_by_value(self, limit: float) -> None:
        """Limits every element to ``[-limit, limit]``, measured on true gradients (two passes).

        Without a fused optimizer it waits for :meth:`apply`, where it shares its passes with the factor.
        """
        if self._factor is not None and not self.in_kernel:
            self._value_limit = limit
            return
        self._clamp(limit)

    def _clamp(self, limit: float) -> None:
        bound = torch.full((), limit, dtype=self.grad_norm.dtype, device=self._device)
        if self._factor is not None:
            bound = bound / self._factor.to(bound)
        gradient_ops.clamp_(self.shards, bound)

    def clip_now(self, limit: float, *, by_value: bool) -> None:
        """Clips true gradients in place (3 passes): hooks that read gradients may also change them afterwards.

        Gradients that are not finite are left as they are by norm, and the step is skipped.
        """
        norm = self.check_again()
        self.is_checked = False
        if by_value:
            self._clamp(limit)
        else:
            coefficient = gradient_ops.clip_coefficient(norm, limit)
            gradient_ops.multiply_(self.shards, torch.where(self.found_inf > 0, 1.0, coefficient))

    def clip_scaled(self, limit: float, *, by_value: bool) -> None:
        """Clips by the size of the true gradients but leaves them scaled, for manual optimization.

        Gradients that are not finite stay so, and the step that follows is skipped.
        """
        if by_value:
            self._clamp(limit)
            # Clamping has turned every inf into the bound; a nan in one tensor is enough for the check before the step.
            keep = torch.where(self.found_inf > 0, torch.nan, 1.0)
            gradient_ops.multiply_([shard for shard in self.shards if shard.numel()][:1], keep)
        else:
            gradient_ops.multiply_(self.shards, gradient_ops.clip_coefficient(self.grad_norm, limit))

    def apply(self) -> None:
        """Multiplies what was planned into the gradients (two passes)."""
        if self._value_limit is not None:
            assert self._host_factor is not None
            gradient_ops.scaled_clamp_(self.shards, self._host_factor, self._value_limit / self._host_factor)
        elif self.multiplier is not None:
            gradient_ops.multiply_(self.shards, self.multiplier)
        self._factor = self.multiplier = self._value_limit = None

    def wait_for_decision(self) -> bool:
        """Whether the step is to be skipped; waits for the device once."""
        limited = self._factor if self._value_limit is not None else None
        # Its transfer begins before the host waits, so that both are there after one wait.
        factor = HostCopy(limited.reshape(1)) if limited is not None else None
        found_inf = bool(self.found_inf.item())
        if factor is not None:
            self._host_factor = factor.read()[0]
        return found_inf
