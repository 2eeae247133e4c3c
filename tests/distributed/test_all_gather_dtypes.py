"""In which dtype FSDP2 gathers weights and reduces gradients, module by module."""

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from small_models import Regression
from torch import nn

from lightning_mp.strategies.fsdp2_model import units_for
from lightning_mp.training.policy.gathered_dtypes import gathered_dtypes


def test_shared_weights_are_gathered_in_fp32_and_those_of_a_conv1d_in_16_bit() -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"table": nn.Embedding(8, 4), "up": Conv1D(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["table"].weight
    model["again"] = model["up"]
    found = gathered_dtypes(model, None, torch.bfloat16).modules
    assert {module.name: module.dtype for module in found if module.has_parameters} == {
        "table": torch.float32,
        "up": "low",
        "head": torch.float32,
    }


def test_weights_in_16_bit_have_their_gradients_reduced_in_fp32() -> None:
    (unit,) = units_for(Regression(), ["net.0"], HalfPrecision("bf16-true"))
    assert unit.mixed_precision.reduce_dtype == torch.float32
