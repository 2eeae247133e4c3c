"""Noise with memory around a fitted curve: how long it remembers, how large it is, and more noise of the same kind.

The losses of one run scatter around their law with a memory: smoothed losses, learning rates and data in order all
make neighbours alike. The noise is taken for the sum of two Gaussian parts, one with a memory and one without::

    noise_t = sqrt(1 - w) x_t + sqrt(w) e_t         x_t = rho x_(t-1) + sqrt(1 - rho^2) u_t

A fitted curve bends towards noise with a memory, so its residuals show less of both than there is. The restricted
likelihood (Patterson and Thompson 1971, "Recovery of inter-block information when block sizes are unequal") allows for
the constants that were fitted. It is computed by a Kalman filter on a grid of rho and w. Draws take rho, w and the
variance in proportion to it, so what the residuals leave open about the noise is in them.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_MEMORIES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98)
_WHITE_SHARES = (0.0, 0.3, 0.6)


@dataclass(frozen=True)
class CorrelatedNoise:
    """What residuals reveal about their noise: one row per pair of rho and w."""

    memory: Tensor  # rho, shape `[rows]`
    white_share: Tensor  # w, shape `[rows]`
    probability: Tensor  # of each pair, shape `[rows]`
    squares: Tensor  # sum of squares of the residuals without their memory, shape `[rows]`
    freedom: int  # how many of them are independent: points less fitted constants

    @classmethod
    def of(cls, residuals: Tensor, design: Tensor) -> "CorrelatedNoise":
        """From the residuals ``[points]`` of a fit and its derivatives by the constants ``[points, constants]``.

        Smoothed noise remembers:

        >>> white = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> smooth = white.unfold(0, 10, 1).mean(1)
        >>> line = torch.stack([torch.ones(300), torch.arange(300)], 1).double()
        >>> noises = [CorrelatedNoise.of(white, line), CorrelatedNoise.of(smooth, line[:291])]
        >>> [round(float((noise.memory * noise.probability).sum()), 1) for noise in noises]
        [0.0, 0.9]
        """
        pairs = [(0.0, 0.0), *((rho, w) for rho in _MEMORIES for w in _WHITE_SHARES)]
        memory, white_share = torch.tensor(pairs, dtype=torch.float64).T
        points, constants = design.shape
        orthonormal, _ = torch.linalg.qr(design)
        columns = torch.cat([residuals[:, None], orthonormal], dim=1)
        whitened, log_variances = _whiten(columns, memory, white_share)
        products = torch.einsum("tri,trj->rij", whitened, whitened)
        information = products[:, 1:, 1:]
        projected = torch.linalg.solve(information, products[:, 1:, :1])
        squares = (products[:, 0, 0] - (products[:, 0, 1:] * projected[:, :, 0]).sum(1)).clamp_min(1e-300)
        freedom = points - constants
        log_likelihood = -0.5 * (log_variances + torch.logdet(information) + freedom * squares.log())
        # Beforehand noise without memory is as likely as eight pairs with one: it is one point of the grid against 33.
        log_prior = torch.where(memory > 0, 1.0, 8.0).log()
        return cls(memory, white_share, (log_likelihood + log_prior).softmax(0), squares, freedom)

    def draw(self, samples: int, points: int, generator: torch.Generator) -> Tensor:
        """More noise of the same kind, shape ``[samples, points]``."""
        rows = torch.multinomial(self.probability, samples, replacement=True, generator=generator)
        memory, white_share = self.memory[rows], self.white_share[rows]
        normal = torch.randn(samples, 2 * points + self.freedom, generator=generator, dtype=torch.float64)
        # The sum of squares over chi-squared: what is not known of the variance.
        variance = self.squares[rows] / normal[:, 2 * points :].square().sum(1)
        remembered = normal[:, :points].T.contiguous()
        fresh = (1 - memory.square()).sqrt()
        for earlier, later in pairwise(remembered):
            later.mul_(fresh).add_(memory * earlier)
        white = normal[:, points : 2 * points]
        mixed = (1 - white_share).sqrt()[:, None] * remembered.T + white_share.sqrt()[:, None] * white
        return variance.sqrt()[:, None] * mixed


def _whiten(columns: Tensor, memory: Tensor, white_share: Tensor) -> tuple[Tensor, Tensor]:
    """Innovations of every column under every pair, ``[points, rows, columns]``, and the sum of log variances."""
    mean = torch.zeros(len(memory), columns.shape[1], dtype=torch.float64)
    variance, fresh = 1 - white_share, (1 - memory.square()) * (1 - white_share)
    innovations, variances = [], []
    for values in columns:
        total = variance + white_share
        gain = variance / total
        innovation = values - mean
        innovations.append(innovation / total.sqrt()[:, None])
        variances.append(total)
        mean = memory[:, None] * (mean + gain[:, None] * innovation)
        variance = memory.square() * (variance - gain * variance) + fresh
    return torch.stack(innovations), torch.stack(variances).log().sum(0)
