"""Promise: `preflight` changes nothing, says what it could not look at, and its report reads alike in text and JSON."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from preflight_projects import PROJECTS, Net
from small_models import WIDTH, Trained, loader, quiet_trainer, regression_batches
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from lightning_mp import AutocastPrecision, ChinchillaBudget, preflight
from lightning_mp.monitors.preflight_checks.report import PreflightFinding, PreflightReport

NOTHING = PreflightReport(())


def test_module_random_state_and_trainer_stay_to_the_bit() -> None:
    """A project with every hook of its own, in the middle of its life: gradients, counters, running statistics."""
    module = PROJECTS["a step of the bare optimizer"].module()
    module.net.insert(1, torch.nn.BatchNorm1d(8))
    module.net.append(torch.nn.Dropout(0.5))
    batches = regression_batches(4)
    module.training_step(batches[0], 0).backward()
    trainer = quiet_trainer(plugins=[AutocastPrecision("16-mixed")], gradient_clip_val=1.0)
    shuffled = DataLoader(Augmented(batches), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(3))
    before = _state(module, trainer, shuffled)
    preflight(trainer, module, shuffled)
    after = _state(module, trainer, shuffled)
    assert before.keys() == after.keys()
    assert {name for name in before if not _same(before[name], after[name])} == set()


class OwnOrder(Sampler[int]):
    """A sampler whose generator no loader knows."""

    def __init__(self, samples: int) -> None:
        self.samples, self.generator_of_order = samples, np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator_of_order.permutation(self.samples).tolist())

    def __len__(self) -> int:
        return self.samples


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("order", ["shuffle", "generator", "own sampler", "own batch sampler"])
def test_the_fit_sees_the_batches_that_it_would_have_seen(order: str, batched: bool) -> None:
    def made() -> "DataLoader[Any]":
        data, size = torch.arange(8.0)[:, None], 2 if batched else None
        match order:
            case "shuffle":
                return DataLoader(data, size, shuffle=True)
            case "generator":
                return DataLoader(data, size, shuffle=True, generator=torch.Generator().manual_seed(3))
            case "own sampler":
                return DataLoader(data, size, sampler=OwnOrder(8))
            case _:
                return DataLoader(data, batch_sampler=BatchSampler(OwnOrder(8), 2, drop_last=False))

    seen = []
    for is_checked in (False, True):
        torch.manual_seed(0)
        loader = made()
        if is_checked:
            preflight(quiet_trainer(), scale(), loader)
        seen.append([batch.flatten().tolist() for _ in range(2) for batch in loader])
    assert seen[0] == seen[1]


def scale() -> Trained:
    """The smallest model."""
    return Trained(lambda module, batch: (module.scale * batch).mean(), scale=lambda: torch.nn.Parameter(torch.ones(1)))


class Augmented(Dataset[Any]):
    """Draws from every global generator."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [self.batches[index][0] + torch.rand(()) * random.random() + np.random.rand(), self.batches[index][1]]


def _state(module: pl.LightningModule, trainer: pl.Trainer, data: "DataLoader[Any]") -> dict[str, Any]:
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    gradients = {f"{name}.grad": None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    return {
        **tensors,
        **gradients,
        "objects": [id(p) for p in module.parameters()],
        "attributes": {name: value for name, value in vars(module).items() if not name.startswith("_")},
        "hooks": [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()],
        "training": [part.training for part in module.modules()],
        "trainer": {name: id(value) for name, value in vars(trainer).items()},
        "loops": deepcopy(trainer.fit_loop.state_dict()),
        "attached": module._trainer,
        "scale": trainer.precision_plugin.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "order": data.generator.get_state(),
    }


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


class ReadsNumbers(Net):
    """Its schedule is too long, and is seen though the step is not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 10 else loss * 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)]


def test_what_cannot_be_looked_at_is_said_and_the_rest_is_checked() -> None:
    report = preflight(quiet_trainer(max_epochs=3), ReadsNumbers(), loader(regression_batches(2)))
    assert [finding.name for finding in report.findings] == ["scheduler_length"]
    [(what, reason)] = report.not_checked
    assert what == "training step"
    assert "test_preflight_report.py:" in reason
    assert " in training_step reads values of tensors" in reason
    assert f"not checked: {reason}"[:60] in str(report)


class ConfiguresByNumbers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / 4

    def configure_optimizers(self) -> Any:
        largest = max(parameter.abs().max().item() for parameter in self.parameters())
        return torch.optim.AdamW(self.parameters(), lr=1e-3 * largest)


def test_optimizers_that_cannot_be_tried_are_said_to_be_unchecked() -> None:
    """The step is checked without them; memory, which would lack their states, is not."""
    trainer = quiet_trainer(max_epochs=3, accumulate_grad_batches=4)
    report = preflight(trainer, ConfiguresByNumbers(), loader(regression_batches(4)), device="T4")
    [(what, reason)] = report.not_checked
    assert what == "configure_optimizers"
    assert " reads values of tensors, for instance by .item()" in reason
    assert reason.endswith("What optimizers train, their schedules and memory are not checked either.")
    assert [finding.name for finding in report.findings] == ["loss_divided_twice"]


def test_what_a_callback_refuses_is_said_once() -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=[ChinchillaBudget(tokens=100)])
    report = preflight(trainer, Net(), loader(regression_batches(2)))
    assert [finding.name for finding in report.findings] == ["refused"]
    assert report.not_checked == ()


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.ones(3, 8))


class WithData(Net):
    def train_dataloader(self) -> Any:
        self.asked = True
        return DataLoader(TensorDataset(torch.ones(6, 8), torch.ones(6, 1)), batch_size=2)


class Data(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.batches = regression_batches(3)

    def train_dataloader(self) -> Any:
        return loader(self.batches)


class DataOfARank(Data):
    """Reads its Trainer, and writes to it."""

    def setup(self, stage: str) -> None:
        self.trainer.should_stop = True
        self.batches = regression_batches(3 * self.trainer.world_size)


@pytest.mark.parametrize(
    "data",
    [
        regression_batches(1)[0],
        tuple(regression_batches(1)[0]),
        iter(regression_batches(2)),
        DataLoader(TensorDataset(torch.ones(6, 8), torch.ones(6, 1)), batch_size=2, shuffle=True),
        Data(),
        DataOfARank(),
        None,
    ],
    ids=["a batch", "a tuple", "an iterator", "a loader", "a data module", "one of a rank", "the module's own"],
)
def test_data_in_any_form(data: Any) -> None:
    module, trainer = WithData(), quiet_trainer()
    assert preflight(trainer, module, data) == NOTHING
    assert not trainer.should_stop
    assert getattr(data, "trainer", None) is None
    assert not hasattr(module, "asked")
    assert not hasattr(data, "batches")


def test_data_without_an_end_and_without_a_batch() -> None:
    endless = preflight(quiet_trainer(max_steps=5), Net(), DataLoader(Stream(), batch_size=None))
    assert [what for what, _ in endless.not_checked] == ["training step"]  # no targets in it
    empty = preflight(quiet_trainer(), Net(), loader([]))
    assert empty.not_checked == (("data", "There is no batch in the data."),)
    none = preflight(quiet_trainer(), Net())
    assert "Pass a data module, a loader or a batch" in none.not_checked[0][1]


class LooksAround(Net):
    """Asks its Trainer and its data module for what most projects ask for, and makes tensors on its own device."""

    def setup(self, stage: str) -> None:
        self.train_batches = len(self.trainer.datamodule.batches)

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.head = torch.nn.Linear(1, 1)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] / 2, batch[1]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("epoch", self.current_epoch)
        self.logger.experiment.add_scalar("x", self.global_step)
        noise = torch.rand(1, device=self.device) / self.trainer.world_size
        return torch.nn.functional.mse_loss(self.head(self.net(batch[0])) + noise, batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), fused=True)
        steps = self.train_batches * self.trainer.max_epochs
        assert steps == self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_that_asks_its_trainer(device: str) -> None:
    module = LooksAround().to(device)
    assert preflight(quiet_trainer(max_epochs=2), module, Data()) == NOTHING
    assert not hasattr(module, "head")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"preflight\(module=...\) takes a lightning.pytorch.LightningModule, got"):
        preflight(quiet_trainer(), torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`device` 'H101' is not known"):
        preflight(quiet_trainer(), Net(), device="H101")


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    torch.save({"weights": 1}, tmp_path / "weights.ckpt")
    for path, reason in ((tmp_path, "a folder of shards"), (tmp_path / "weights.ckpt", "has no 'state_dict'")):
        report = preflight(quiet_trainer(), Net(), regression_batches(1)[0], ckpt_path=path)
        [(what, said)] = report.not_checked
        assert what == "checkpoint"
        assert reason in said


def test_the_report_as_text_and_as_json() -> None:
    report = PreflightReport(
        (
            PreflightFinding("error", "memory", "It does not fit. " * 10, "Use less."),
            PreflightFinding("advice", "tensor_cores", "It is 7.", "Make it 8."),
        ),
        (("budget", "no labels"),),
    )
    text = str(report)
    assert text.startswith("Preflight: 1 error, 0 warnings, 1 advice; 1 part not checked\n  error    memory")
    assert max(map(len, text.splitlines())) <= 110
    assert "-> Use less." in text
    assert "not checked: no labels" in text
    read = json.loads(report.to_json())
    assert read == report.to_dict()
    assert read["findings"][1] == {
        "severity": "advice",
        "name": "tensor_cores",
        "what": "It is 7.",
        "cure": "Make it 8.",
    }
    assert [len(report.at_least(severity)) for severity in ("error", "warning", "advice")] == [1, 1, 2]


@pytest.mark.parametrize("holds", ["as it is", "in a dict", "in a dataclass"])
@pytest.mark.filterwarnings("ignore:.*is an instance of `nn.Module`")
def test_networks_in_saved_hyperparameters_are_stand_ins(holds: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Lightning keeps a copy of them beside the module; BatchNorm's buffers are in it."""

    @dataclass
    class Config:
        net: nn.Module

    class Saves(pl.LightningModule):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)
            self.net = net["net"] if isinstance(net, dict) else getattr(net, "net", net)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    net = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
    given = {"as it is": net, "in a dict": {"net": net}, "in a dataclass": Config(net)}[holds]
    report = preflight(quiet_trainer(plugins=[AutocastPrecision("bf16-mixed")]), Saves(given), regression_batches(1)[0])
    assert report.not_checked == ()
    assert "Traceback" not in capfd.readouterr().err
