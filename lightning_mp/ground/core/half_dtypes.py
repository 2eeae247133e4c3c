"""The dtypes of 16 bit, of which much code needs to know no more than that."""

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)

#: Those of all weights that plugins cast.
CAST_DTYPES = (torch.float32, *HALF_DTYPES)

#: The largest fp16 number.
HALF_MAX = torch.finfo(torch.float16).max
