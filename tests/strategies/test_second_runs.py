"""One module, Trainer, plugin and strategy in run after run: evaluations in between change nothing; what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_runs import Blocks, PostNorm, ResumableLoader, batches, fp16, fsdp2, full_weights, model
from gloo import FLOAT8, on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pipelined_models import PipelinedGPT
from small_models import Regression, at, fit, loader, quiet_trainer, raising, regression_batches
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp import Float8Precision, LossScaler, MasterWeightsPrecision
from lightning_mp.language_model import LanguageModel
from lightning_mp.strategies import PipelineParallelStrategy

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

PLUGINS: dict[str, Callable[[], Precision]] = {
    "no plugin": Precision,
    "fp16": fp16,
    "remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
    "fp16 masters": lambda: MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=1024.0)),
    "fp8": lambda: Float8Precision(emulate=True, skip_small=False),
}


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(layers=1, heads=2, width=32, block_tokens=8, vocab=32, learning_rate=1e-2, warmup_steps=1)


#: Strategy and model.
STRATEGIES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "DDP": (lambda: DDPStrategy(process_group_backend="gloo"), language_model),
    "FSDP2": (fsdp2, language_model),
    "tensor parallel": (lambda: fsdp2(tensor_parallel_size=2), language_model),
    "pipeline": (lambda: PipelineParallelStrategy(microbatches=2), PipelinedGPT),
}


def after_runs(strategy: str, plugin: str, evaluates: bool) -> Any:
    """Two fits of two steps; with an evaluation before each, and one at the end."""
    make_strategy, make_module = STRATEGIES[strategy]
    module, data = make_module(), loader(batches(2))
    trainer = quiet_trainer(devices=2, strategy=make_strategy(), plugins=[PLUGINS[plugin]()], max_epochs=1)
    for epochs in (1, 2):
        if evaluates:
            trainer.validate(module, data, verbose=False)
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, data, data)
    weights = full_weights(module)
    if evaluates:
        trainer.validate(module, data, verbose=False)
    return trainer.global_step, weights


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fits_and_evaluations_follow_one_another(strategy: str) -> None:
    def run(rank: int) -> dict[str, Any]:
        return {plugin: [after_runs(strategy, plugin, evaluates) for evaluates in (False, True)] for plugin in PLUGINS}

    for plugin, (alone, evaluated) in run_ranks(run, 2, 300, imports=FLOAT8)[0].items():
        assert alone[0] == evaluated[0] == 4, plugin
        for name, value in alone[1].items():
            assert torch.equal(evaluated[1][name], value), (plugin, name)


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


@pytest.mark.full
def test_step_methods_are_given_back_and_a_second_run_keeps_the_shards() -> None:
    def run(rank: int) -> Any:
        module = Blocks()
        data = loader(regression_batches(2))
        fails = at(raising(RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            quiet_trainer(devices=2, strategy=fsdp2(PostNorm), plugins=[fp16()], callbacks=[fails]).fit(module, data)
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
