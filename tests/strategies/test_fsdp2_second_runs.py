"""A model that FSDP2Strategy has sharded in an earlier run: what goes on, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_runs import Blocks, PostNorm, ResumableLoader, batches, fp16, fsdp2, model
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, fit, loader, quiet_trainer, regression_batches
from torch import nn
from torch.distributed.fsdp import FSDPModule


def trainer(**arguments: Any) -> Any:
    strategy = fsdp2(**arguments)
    return quiet_trainer(devices=2, strategy=strategy, plugins=[fp16()], max_steps=2, max_epochs=-1)


@pytest.mark.full
def test_a_validation_after_the_fit_leaves_the_state_of_the_optimizer_as_it_is(tmp_path: Path) -> None:
    """Queries, keys and values in one matrix are put in order once, not once per run."""

    def run(rank: int) -> None:
        module, rows = model(), batches(3)
        fitted = trainer(tensor_parallel_size=2, save_distributed_checkpoint=False)
        fitted.fit(module, ResumableLoader(rows), loader(rows[:1]))
        fitted.save_checkpoint(tmp_path / "fitted")
        fitted.validate(module, loader(rows[:1]), verbose=False)
        fitted.save_checkpoint(tmp_path / "validated")

    run_ranks(run, 2)
    before, after = (
        torch.load(tmp_path / name, weights_only=False)["optimizer_states"][0]["state"]
        for name in ("fitted", "validated")
    )
    assert len(before) == 15
    for number, values in before.items():
        for name, value in values.items():
            torch.testing.assert_close(after[number][name], value, rtol=0, atol=0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("earlier", "now", "says"),
    [
        ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size=1, and FSDP2Strategy now has tensor_parallel_size=2"),
        ({"tensor_parallel_size": 2}, {}, "tensor_parallel_size=2, and FSDP2Strategy now has tensor_parallel_size=1"),
        ({"replicate_size": 2}, {}, "replicate_size=2, and FSDP2Strategy now has replicate_size=1"),
    ],
)
@on_ranks(run_ranks, 2)
def test_another_layout_is_refused(rank: int, earlier: Any, now: Any, says: str) -> None:
    """Ranks that compute one model together would otherwise get different data."""
    module, rows = model(), loader(batches(1))
    trainer(**earlier).validate(module, rows, verbose=False)
    with pytest.raises(MisconfigurationException, match=says):
        trainer(**now).validate(module, rows, verbose=False)
    trainer(**earlier).validate(module, rows, verbose=False)


@pytest.mark.full
@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="torch 2.11 has no FSDPModule.reset_iter_state, which takes back a step that failed in its middle",
)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_run_starts_after_one_that_failed_in_the_middle_of_a_step(place: str) -> None:
    def fail(block: nn.Module, *_: Any) -> None:
        if block.training:
            raise RuntimeError("planted")

    def run(rank: int) -> Any:
        rows, val = ResumableLoader(batches(3, rank, 2)), loader(batches(1))
        alone = model()
        trainer().fit(alone, rows, val)
        module = model()
        block = module.model.blocks[1]
        hook = block.register_forward_hook(fail) if place == "forward" else block.register_full_backward_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            trainer().fit(module, rows, val)
        hook.remove()
        module.losses.clear()
        trainer().fit(module, rows, val)
        return module.losses, alone.losses

    for losses, wanted in run_ranks(run, 2):
        assert losses == wanted
        assert len(losses) == 2


class Fails(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise RuntimeError("planted")


@pytest.mark.full
def test_step_methods_are_given_back_and_a_second_run_keeps_the_shards() -> None:
    def run(rank: int) -> Any:
        module = Blocks()
        data = loader(regression_batches(2))
        with pytest.raises(RuntimeError, match="planted"):
            quiet_trainer(devices=2, strategy=fsdp2(PostNorm), plugins=[fp16()], callbacks=[Fails()]).fit(module, data)
        left = {name for name in vars(module) if name.endswith("_step")}
        shards = [p.to_local().data_ptr() for p in module.parameters()]
        trainer = quiet_trainer(devices=2, strategy=fsdp2(PostNorm), plugins=[fp16()])
        trainer.fit(module, data)
        assert [p.to_local().data_ptr() for p in module.parameters()] == shards
        other = quiet_trainer(devices=2, strategy=fsdp2(PostNorm))
        with pytest.raises(
            MisconfigurationException, match=r"gathers weights in torch.float16, and precision is now '3"
        ):
            other.fit(module, data)
        return left | {name for name in vars(module) if name.endswith("_step")}, trainer.global_step

    assert run_ranks(run, 2) == [(set(), 2)] * 2


def test_a_step_method_that_the_module_itself_was_given_is_given_back() -> None:
    def run(rank: int) -> bool:
        module = Regression()

        def step(batch: Any, batch_idx: int) -> Any:
            return Regression.training_step(module, batch, batch_idx)

        module.training_step = step
        fit(module, regression_batches(1), devices=2, strategy=fsdp2("net.0"), plugin=fp16())
        return vars(module)["training_step"] is step

    assert run_ranks(run, 2) == [True, True]
