"""Signal to quantisation noise: the measure itself, of number formats, of fp8 layers, and of a whole model."""

import pytest
import torch
from float8_sqnr import layer_sqnr, model_sqnr, sqnr_db
from torch import nn
from torch.nn import functional as F

from lightning_mp.language_model import GPT, GPTConfig
from lightning_mp.training.policy.float8_layers import choose_float8_layers
from lightning_mp.training.precision.float8 import why_no_float8_on
from lightning_mp.training.precision.fp8.conversion import RECIPES, convert_to_float8, float8_config

# What the formats' mantissa bits let expect of a product (see sqnr_db), less 2 dB for mantissas that are not evenly
# spread and for what falls among the subnormals. Output, gradient of the input, gradient of the weight.
FLOORS_DB = {"tensorwise": (27.5, 23.5, 23.5), "rowwise": (27.5, 27.5, 27.5), "rowwise_with_gw_hp": (27.5, 27.5, 48.0)}


@pytest.mark.parametrize(
    ("dtype", "decibels"),
    [(torch.float8_e4m3fn, 32.5), (torch.float8_e5m2, 26.5), (torch.bfloat16, 56.6), (torch.float16, 74.7)],
    ids=str,
)
def test_rounding_costs_what_the_docstring_says(dtype, decibels):
    evenly_spread = torch.rand(100_000) + 1  # one binade
    assert sqnr_db(evenly_spread, evenly_spread.to(dtype).double()) == pytest.approx(decibels, abs=0.1)


ON_CUDA = [pytest.param("cuda", rows, marks=pytest.mark.gpu) for rows in (64, 7)]


@pytest.mark.parametrize(("device", "rows"), [("cpu", 64), *ON_CUDA])
@pytest.mark.parametrize("emulate", [False, True], ids=["real", "emulated"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_a_layer_stay_above_the_floor(recipe, emulate, device, rows):
    reason = why_no_float8_on(torch.device(device), emulate=emulate)
    if reason is not None:
        pytest.skip(reason)
    model = nn.Sequential(nn.Linear(256, 128, bias=False)).to(device)
    x, grad_output = torch.randn(rows, 256, device=device), torch.randn(rows, 128, device=device)
    in_bf16 = layer_sqnr(model[0], x, grad_output)
    convert_to_float8(choose_float8_layers(model, skip_first_and_last=False), float8_config(recipe, emulate=emulate))
    measured = layer_sqnr(model[0], x, grad_output)
    values = (measured.output_db, measured.input_gradient_db, measured.weight_gradient_db)
    for value, floor in zip(values, FLOORS_DB[recipe], strict=True):
        assert floor <= value <= floor + 10
    # The floors mean something: bf16 is far above those of fp8.
    assert min(in_bf16.output_db, in_bf16.input_gradient_db, in_bf16.weight_gradient_db) > 48


def test_rows_of_very_different_size_need_a_factor_each():
    """Why rowwise is the default: with one factor per tensor small rows fall among the subnormals and below."""
    x = torch.randn(64, 256) * torch.logspace(0, -6, 64).unsqueeze(1)
    smallest = {}
    for recipe in ("tensorwise", "rowwise"):
        model = nn.Sequential(nn.Linear(256, 128, bias=False))
        convert_to_float8(choose_float8_layers(model, skip_first_and_last=False), float8_config(recipe))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        smallest[recipe] = sqnr_db(F.linear(x[-8:], model[0].weight.detach()), output[-8:])
    assert smallest["rowwise"] > 28
    assert smallest["tensorwise"] < 5


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layer_of_a_model_stays_above_the_floor_on_its_own_inputs(recipe):
    model = GPT(GPTConfig(layers=2, heads=2, width=64, block_tokens=32, vocab=256))
    tokens = torch.randint(256, (4, 33))
    layers = choose_float8_layers(model)
    convert_to_float8(layers, float8_config(recipe))

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    report = model_sqnr(layers, loss)
    assert [row.name for row in report] == [layer.name for layer in layers if layer.skipped_because is None]
    assert len(report) == 7
    for row in report:
        measured = (row.output_db, row.input_gradient_db, row.weight_gradient_db)
        # Activations after GELU and gradients after softmax are less even than a normal distribution: 1 dB more.
        assert all(value > floor - 1 for value, floor in zip(measured, FLOORS_DB[recipe], strict=True)), row
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
