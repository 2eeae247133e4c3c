"""What FSDP2Strategy can not do right is refused, and strict loading is strict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fsdp2_runs import Recorded, batches, fsdp2, model
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, fit, loader, quiet_trainer, regression_batches, shard
from torch import nn


class Manual(Regression):
    """Regression with a part that is given."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.automatic_optimization = False


def scales() -> pl.LightningModule:
    return Manual(nn.ParameterList([nn.Parameter(torch.ones(1))]))


def tied() -> pl.LightningModule:
    module = Manual(nn.Linear(4, 4))
    module.other = nn.Linear(4, 4)
    module.other.weight = module.part.weight
    return module


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (scales, r"manual optimization: part\.0 of Manual belongs to no module that is called"),
        (tied, r"other\.weight.* one parameter \(tied weights\).*into one submodule with a forward"),
    ],
)
@on_ranks(run_ranks, 2)
def test_parameters_that_ranks_would_train_apart_in_manual_optimization_are_refused(
    rank: int, make: Callable[[], pl.LightningModule], says: str
) -> None:
    with pytest.raises((MisconfigurationException, ValueError), match=says):
        fit(make(), regression_batches(1), devices=2, strategy=fsdp2())


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Rprop])
def test_an_optimizer_that_torch_cannot_step_shards_with_is_refused_at_set_up(
    kind: type[torch.optim.Optimizer],
) -> None:
    """Stock Lightning ends inside torch at the first step; where that trains, the refusal can go."""

    class Sharded(Regression):
        def configure_model(self) -> None:
            shard(self, self.net)

    def run(rank: int) -> str:
        stock = ModelParallelStrategy(process_group_backend="gloo")
        with pytest.raises(RuntimeError, match="DTensor|placement|aten"):
            fit(Sharded(kind), regression_batches(1), devices=2, strategy=stock)
        with pytest.raises(ValueError, match="has sharded parameters") as caught:
            fit(Regression(kind), regression_batches(1), devices=2, strategy=fsdp2())
        return str(caught.value)

    if kind is torch.optim.Rprop and torch.__version__ >= "2.15":
        pytest.skip("torch 2.15 steps shards with Rprop")
    for said in run_ranks(run, 2):
        assert said.startswith(f"{kind.__name__} has sharded parameters (DTensors, from FSDP2 or tensor parallelism)")
        assert said.endswith("or train with DDP.")


@on_ranks(run_ranks, 2)
def test_sync_batchnorm_is_refused(rank: int) -> None:
    trainer = quiet_trainer(devices=2, strategy=fsdp2(), sync_batchnorm=True)
    with pytest.raises(MisconfigurationException, match=r"FSDP2Strategy .*sync_batchnorm=True.*batch norms stay"):
        trainer.fit(Regression(), loader(regression_batches(1)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_on_an_object_store_is_refused(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(rank: int) -> None:
        trainer = quiet_trainer(devices=2, strategy=fsdp2(save_distributed_checkpoint=sharded), max_steps=1)
        trainer.fit(Regression(), loader(regression_batches(1)))
        with pytest.raises(MisconfigurationException, match=r"'memory://a/b.ckpt' is none: it would become a local"):
            trainer.save_checkpoint("memory://a/b.ckpt")

    run_ranks(run, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("sharded", [True, False])
def test_other_weights_are_refused_or_left_as_the_module_says(sharded: bool, tmp_path: Path) -> None:
    def with_more() -> Recorded:
        module = model()
        module.more = nn.Linear(2, 2)
        return module

    def validate(module: Recorded, path: Path, *, strict: bool) -> None:
        module.strict_loading = strict
        trainer = quiet_trainer(devices=2, strategy=fsdp2())
        trainer.validate(module, loader(batches(1)), ckpt_path=path, verbose=False)

    def run(rank: int) -> Any:
        for make, name in ((model, "less"), (with_more, "more")):
            strategy = fsdp2(save_distributed_checkpoint=sharded)
            trainer = quiet_trainer(devices=2, strategy=strategy)
            trainer.validate(make(), loader(batches(1)), verbose=False)
            trainer.save_checkpoint(tmp_path / name, weights_only=True)
        for make, name, says in ((model, "more", "[uU]nexpected"), (with_more, "less", "[mM]issing")):
            with pytest.raises(RuntimeError, match=rf"{says} key.*more\.weight"):
                validate(make(), tmp_path / name, strict=True)
            validate(make(), tmp_path / name, strict=False)

    run_ranks(run, 2)


def refusal(strategy: Any, module: pl.LightningModule | None = None, **arguments: Any) -> str:
    def run(rank: int) -> str:
        with pytest.raises((ValueError, MisconfigurationException)) as caught:
            quiet_trainer(devices=2, strategy=strategy, **arguments).fit(
                module or model(), loader(regression_batches(1)), loader(regression_batches(1))
            )
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    return first


def test_a_rule_that_matches_nothing_says_what_there_is() -> None:
    message = refusal(fsdp2("model.block.*"))
    assert "FSDP2Strategy: 'model.block.*' matches no module of Recorded" in message
    assert "model.blocks.0" in message
    assert "Classes: Linear (9)" in message


def test_sizes_that_do_not_divide_are_refused() -> None:
    message = refusal(fsdp2(replicate_size=3))
    assert message.startswith(
        "FSDP2Strategy(replicate_size=3, tensor_parallel_size=1) needs a multiple of 3 ranks, and"
    )


def test_a_stock_scaler_is_refused() -> None:
    message = refusal(fsdp2(), plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))])
    assert "Use Trainer(plugins=[lightning_mp.AutocastPrecision('16-mixed')])" in message


# Lightning's word of models that are built in `configure_model`, as this one is; the refusal says more.
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_callbacks_that_have_copied_the_model_are_refused() -> None:
    message = refusal(fsdp2(), callbacks=[EMAWeightAveraging(decay=0.9)])
    assert message.startswith("FSDP2Strategy cannot be used with EMAWeightAveraging, which copies the model before")
