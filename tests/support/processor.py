"""What torch can compute on this processor."""

import functools

import pytest
import torch
from torch import nn

NO_16_BIT_LSTM = "oneDNN has no 16-bit LSTM on this processor (it needs AVX-512)"


@functools.cache
def has_16_bit_lstm() -> bool:
    """Under autocast torch takes oneDNN's LSTM, which has 16-bit kernels on processors with AVX-512 only."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError as error:
        if "could not create a primitive" in str(error):
            return False
        raise
    return True


needs_16_bit_lstm = pytest.mark.skipif(not has_16_bit_lstm(), reason=NO_16_BIT_LSTM)
