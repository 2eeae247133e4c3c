"""FSDP2Strategy where a small slip would go unnoticed: what stays gathered, what is given back, what is sent."""

from typing import Any

import pytest
import torch
from fsdp2_runs import fp16, fsdp2
from gloo import run_ranks
from small_models import Regression, loader, quiet_trainer, regression_batches
from torch.distributed.tensor import DTensor


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
