"""Checkpoints of modules with compiled parts fit eager ones, and the other way round."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_models import WIDTH, loader, quiet_trainer, regression_batches
from torch import Tensor, nn

from lightning_mp import AutocastPrecision, ExactResume, preflight


def eager(module: nn.Module) -> Any:
    return module


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_inside(module: nn.Module) -> Any:
    assert isinstance(module, nn.Sequential)
    module[0], module[3] = compiled(module[0]), compiled(module[3])
    return module


def compiled_in_place(module: nn.Module) -> Any:
    module.compile(backend="eager")
    return module


WAYS = {way.__name__: way for way in (eager, compiled, compiled_inside, compiled_in_place)}


class Net(pl.LightningModule):
    def __init__(self, way: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = way(nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trainer_of(*callbacks: Any, **arguments: Any) -> pl.Trainer:
    return quiet_trainer(plugins=[AutocastPrecision("bf16-mixed")], callbacks=list(callbacks), **arguments)


def saved(way: str, path: Path) -> Path:
    trainer = trainer_of(ExactResume(), max_epochs=1)
    trainer.fit(Net(WAYS[way]), loader(regression_batches(3)))
    trainer.save_checkpoint(path)
    return path


def numbers(module: nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


@pytest.mark.parametrize("resumed_as", WAYS)
@pytest.mark.parametrize("saved_as", WAYS)
def test_a_run_resumes_as_if_nothing_had_changed(saved_as: str, resumed_as: str, tmp_path: Path) -> None:
    path, data = saved(saved_as, tmp_path / "saved.ckpt"), loader(regression_batches(3))
    straight, resumed, tested = (Net(WAYS[way]) for way in (saved_as, resumed_as, resumed_as))
    trainer_of(ExactResume(), max_epochs=2).fit(straight, data, ckpt_path=path)
    trainer = trainer_of(ExactResume(), max_epochs=2)
    assert not preflight(trainer, resumed, data, ckpt_path=path).findings
    trainer.fit(resumed, data, ckpt_path=path)
    assert all(torch.equal(a, b) for a, b in zip(numbers(straight), numbers(resumed), strict=True))
    trainer_of(ExactResume()).test(tested, data, ckpt_path=path, verbose=False)
    before = torch.load(path, weights_only=True)["state_dict"].values()
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(tested), strict=True))
    assert all(not module._load_state_dict_pre_hooks for module in (resumed, tested))


@pytest.mark.parametrize(("saved_as", "resumed_as"), [("eager", "compiled"), ("compiled", "eager")])
def test_without_the_callback_a_hint_and_preflight_name_it(saved_as: str, resumed_as: str, tmp_path: Path) -> None:
    path, data = saved(saved_as, tmp_path / "saved.ckpt"), loader(regression_batches(3))
    trainer, module = trainer_of(max_epochs=2), Net(WAYS[resumed_as])
    [finding] = preflight(trainer, module, data, ckpt_path=path).findings
    assert "differ in what torch.compile(module) puts into names" in finding.what
    with pytest.raises(RuntimeError, match="loading state_dict") as caught:
        trainer.fit(module, data, ckpt_path=path)
    [hint] = caught.value.__notes__
    for text in (hint, finding.cure):
        assert "Add ExactResume()" in text
        assert "module.compile()" in text


def test_other_differences_stay_errors(tmp_path: Path) -> None:
    path, data = saved("compiled", tmp_path / "saved.ckpt"), loader(regression_batches(3))
    module = Net(eager)
    module.net.append(nn.Linear(1, 1))
    trainer = trainer_of(ExactResume(), max_epochs=2)
    assert "missing in it (net.4.weight" in preflight(trainer, module, data, ckpt_path=path).findings[0].what
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "net.4.weight", "net.4.bias". $'):
        trainer.fit(module, data, ckpt_path=path)
