"""FSDP2Strategy where a small slip would go unnoticed: what stays gathered, what is given back, what is sent."""

from typing import Any

import pytest
import torch
from fsdp2_runs import fp16, fsdp2
from gloo import process_group, run_ranks
from lightning.pytorch.plugins.precision import HalfPrecision
from small_models import Regression, loader, quiet_trainer, regression_batches
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_mp.checkpoints.sharded import without_a_made_up_step
from lightning_mp.sharding.all_gather_dtypes import gathered_dtypes
from lightning_mp.sharding.materialize import Materialiser
from lightning_mp.sharding.rules import repeated_blocks, unit_names, units_by_size
from lightning_mp.strategies.fsdp2_model import units_for


class Evaluated(Regression):
    """The last layer is in no unit but the model itself, and gathered for the whole step."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.gathered = not isinstance(self.net[2].weight, DTensor)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.test_step(batch, batch_idx)
        return batch[1]


@pytest.mark.parametrize("loop", ["test", "predict"])
def test_nothing_stays_gathered_after_testing_and_prediction(loop: str) -> None:
    def run(rank: int) -> Any:
        module = Evaluated()
        trainer = quiet_trainer(devices=2, strategy=fsdp2("net.0"), plugins=[fp16()])
        if loop == "test":
            trainer.test(module, loader(regression_batches(1)), verbose=False)
        else:
            trainer.predict(module, loader(regression_batches(1)), return_predictions=False)
        return module.gathered, {type(parameter) for parameter in module.parameters()}

    assert run_ranks(run, 2) == [(True, {DTensor})] * 2


def test_a_step_method_that_the_module_itself_was_given_is_given_back() -> None:
    def run(rank: int) -> bool:
        module = Regression()

        def step(batch: Any, batch_idx: int) -> Any:
            return Regression.training_step(module, batch, batch_idx)

        module.training_step = step
        trainer = quiet_trainer(devices=2, strategy=fsdp2("net.0"), plugins=[fp16()])
        trainer.fit(module, loader(regression_batches(1)))
        return vars(module)["training_step"] is step

    assert run_ranks(run, 2) == [True, True]


def test_buffers_start_from_those_of_rank_zero() -> None:
    def run(rank: int) -> list[float]:
        module = Regression()
        module.register_buffer("offset", torch.full((3,), float(rank + 1)))
        trainer = quiet_trainer(devices=2, strategy=fsdp2("net.0"), plugins=[fp16()])
        trainer.fit(module, loader(regression_batches(1)))
        return module.offset.tolist()

    assert run_ranks(run, 2) == [[1.0] * 3] * 2


def test_what_comes_to_life_stays_frozen_has_its_buffers_and_may_lie_in_any_order() -> None:
    def run(rank: int) -> Any:
        with process_group():
            norm, turned = nn.BatchNorm1d(3, device="meta"), nn.Linear(4, 3)
            norm.weight.requires_grad_(False)
            turned.weight = nn.Parameter(torch.full((4, 3), float(rank)).t())
            Materialiser(torch.device("cpu"))([norm, turned])
            trainable = [parameter.requires_grad for parameter in norm.parameters()]
            # NCCL sends nothing that is not contiguous.
            sent = turned.weight.abs().sum().item(), turned.weight.is_contiguous()
            return trainable, norm.running_var.tolist(), sent

    assert run_ranks(run, 2) == [([False, True], [1.0] * 3, (0.0, True))] * 2


def test_the_tenth_block_is_not_inside_of_the_first() -> None:
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(11))
    blocks[10].weight = blocks[1].weight
    assert repeated_blocks(nn.ModuleDict({"blocks": blocks})) == [f"blocks.{i}" for i in range(10) if i != 1]
    with pytest.raises(ValueError, match=r"blocks\.1\.weight and blocks\.10\.weight are one parameter"):
        unit_names(nn.ModuleDict({"blocks": blocks}), ("blocks.1",))


def test_half_of_a_tie_is_no_unit_of_that_size_and_layers_without_weights_are_none_at_all() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    assert units_by_size(model, 20) == ["1"]
    assert repeated_blocks(nn.ModuleList([nn.Tanh(), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2)])) == ["2", "3"]


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


@pytest.mark.parametrize("gradient", [None, torch.ones(3)], ids=["none", "of a window"])
def test_asking_for_the_state_before_the_first_step_leaves_gradients_alone(gradient: Any) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = gradient
    with without_a_made_up_step(torch.optim.AdamW([parameter])):
        assert parameter.grad is not None
    assert parameter.grad is gradient
    assert gradient is None or gradient.equal(torch.ones(3))
