"""A float32 number as a bfloat16 number and the 16 bits that it lacks.

bfloat16 is the upper half of float32. If the lower half is kept beside a bf16 weight, the pair is the float32 number to
the last bit, in 4 bytes instead of 2 + 4.

.. code-block:: text

    m          = bits of |x|                      (x is nan: bits of the canonical nan)
    high       = (m + 0x8000) >> 16               rounds to nearest, ties away from zero
    remainder  = m - (high << 16)                 in [-0x8000, 0x7fff]: 16 bits
    |x|        = (high << 16) + remainder

Every finite number, both zeros and both infinities come back to the bit, subnormal numbers too. Of a nan only the sign
survives: its payload does not fit, and CUDA's own nan, 0x7fffffff, would round to -0.0. The bf16 number differs from
what ``x.to(torch.bfloat16)`` gives (ties to even) at ties only.

References:
    The idea is that of ``store_param_remainders`` in NVIDIA's Transformer Engine,
    https://github.com/NVIDIA/TransformerEngine, there for its own Adam on CUDA.
"""

import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_SIGN = -0x80000000
_HALF = 0x8000


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 number nearest to each float32 number, and what it lacks.

    Example:
        >>> import torch
        >>> high, remainder = split(torch.tensor([1.0, 1.001]))
        >>> high.tolist(), remainder.tolist()
        ([1.0, 1.0], [0, 8389])
        >>> join(high, remainder)
        tensor([1.0000, 1.0010])
    """
    bits = master.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    magnitude.masked_fill_(magnitude > _INFINITY, _NAN)
    high = (magnitude + _HALF).bitwise_right_shift_(16)
    remainder = magnitude.sub_(high << 16).to(torch.int16)
    high.bitwise_or_((bits >> 16).bitwise_and_(_HALF))
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join(working: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers that :func:`split` took apart.

    If the bf16 number was changed since, the result is a number that still rounds to it: what is left of the old
    remainder is less than half its last bit.
    """
    high = working.view(torch.int16).to(torch.int32)
    magnitude = (high & (_MAGNITUDE >> 16)).bitwise_left_shift_(16).add_(remainder)
    # Below zero only if the weight was set to zero from outside; without the limit that would be a nan.
    magnitude.clamp_(0, _NAN)
    return magnitude.bitwise_or_(high.bitwise_and_(_SIGN)).view(torch.float32)
